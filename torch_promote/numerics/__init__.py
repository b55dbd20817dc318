"""What a program does with numbers: which op ran in which dtype and why, what that costs, and what to override.

- trace.py: `trace`; traced_process.py: a whole program traced, for the commands
- records/: a call, its casts, what calls add up to
- ranges/: the ranges of tensors, counted without the program's notice
- observing/: makes a call's record: module, line, phase, casts, who gave the policy
- nonfinite/: `find_nonfinite`: finds the first call that makes an inf or NaN, judges it, and suggests an override
- runs/: a step run again and again from the same state
- comparing/: `compare`, its `Comparison`, and the text, page and plot of that
- tuning/: `tune`, its `Tuning`, and the text, pages and plots of that
- pages/: what all reports share: the template and style of pages, charts, text in 80 columns, numbers, files
- report/: `TraceReport`: explanations, differences, the summary, the page, plots and files
"""
