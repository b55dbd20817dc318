"""What a program does with numbers: which op ran in which dtype, and why; where the first inf or NaN came from.

- trace.py: `trace`; traced_process.py: a whole program traced, for the commands
- records/: a call, its casts, what calls add up to
- ranges/: the ranges of tensors, counted without the program's notice
- observing/: makes a call's record: module, line, phase, casts, who gave the policy
- nonfinite/: `find_nonfinite`: finds the first call that makes an inf or NaN, judges it, and suggests an override
- report/: `TraceReport`: explanations, differences, the summary, the page, plots and files
"""
