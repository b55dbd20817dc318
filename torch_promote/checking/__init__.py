"""Checking what runs: each call of an op against the reference and against stock autocast.

- `crosscheck`, for people: torch_promote.checking.crosscheck, and its report beside it
- what it does with each call: torch_promote.checking.checker
- how calls are seen: torch_promote.checking.dispatch_observer
- what is expected of one call: torch_promote.checking.expectation
- two results compared: torch_promote.checking.comparison
- what is known to differ: torch_promote.checking.known_gaps and its data file
"""
