"""Numerics tools: trace dtypes and casts, find the first inf or NaN, compare policies, and tune overrides.

- trace.py: `trace`; traced_process.py: a whole program traced, for the commands
- records/: records of calls and casts, and their sums
- ranges/: the ranges of tensors, counted without side effects on the program
- observing/: makes the record of a call: module, line, phase, casts, and the source of its policy
- nonfinite/: `find_nonfinite`: finds the first call that makes an inf or NaN, judges it, and suggests an override
- runs/: repeated runs of a step from the same state
- comparing/: `compare`, its report `Comparison`, and the report's text, page and plot
- tuning/: `tune`, its report `Tuning`, and the report's text, page and plots
- pages/: shared by all reports: the template and style of pages, charts, text in 80 columns, numbers, files
- report/: `TraceReport`: explanations, differences, the summary, the page, plots and files
"""
