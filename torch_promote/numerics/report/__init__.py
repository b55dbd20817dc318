"""`TraceReport` (trace_report.py): queries on a trace, and its text, page, plots and file formats."""
