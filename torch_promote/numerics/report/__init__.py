"""`TraceReport` (trace_report.py): what can be asked of a trace, and the forms in which it can be read and saved."""
