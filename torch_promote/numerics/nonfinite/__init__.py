"""`find_nonfinite`: finder.py observes calls, judge.py diagnoses a non-finite one, suggestion.py tries overrides."""
