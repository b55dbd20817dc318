"""`find_nonfinite`: finder.py observes calls, judge.py says what is wrong with one, suggestion.py runs overrides."""
