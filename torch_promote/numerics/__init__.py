"""Numerics tools: trace dtypes and casts, find the first inf or NaN, compare policies, and tune overrides.

- trace.py: `trace`; traced_process.py: a whole program traced, for the commands
- records/: records of calls and casts, and their sums
- ranges/: the ranges of tensors, counted without side effects on the program
- observing/: makes the record of a call: module, line, phase, casts, and the source of its policy
- find_nonfinite.py: `find_nonfinite` and its report; nonfinite_finder.py: which call is at fault;
  nonfinite_suggestion.py: the override that cures it
- step_runs.py: repeated runs of a step from the same state; step_state.py: what is state
- compare.py: `compare`; call_observers.py: its runs; impacts.py: the effect of errors on the loss
- tune.py: `tune`; search.py: the search; trials.py: its runs; candidates.py: what can get an override
- comparison.py, tuning.py: the reports `Comparison` and `Tuning`
- pages/: shared by all reports: the template and style of pages, charts, text in 80 columns, numbers, files
- report/: `TraceReport`: explanations, differences, the summary, the page, plots and files
"""
