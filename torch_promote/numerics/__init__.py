"""Numerics tools: find the first inf or NaN, compare policies, and tune overrides.

- find_nonfinite.py: `find_nonfinite`, its report, and the overrides to try;
  nonfinite_finder.py: which call is at fault
- step_runs.py: repeated runs of a step from the same state; step_state.py: what is state
- compare.py: `compare`; call_observers.py: its runs; impacts.py: the effect of errors on the loss
- tune.py: `tune`; search.py: what can get an override, and the search; trials.py: its runs
- comparison.py, tuning.py: the reports `Comparison` and `Tuning`
- traced_process.py: observes a whole program, for the commands trace and find-nan
"""
