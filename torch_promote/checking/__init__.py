"""Crosscheck: compares each call of an op with the reference, and with stock autocast.

- crosscheck: the context manager; report: what it returns; pytest_plugin: one around each test
- dispatch_observer: shows each dispatched call to an observer, several_observers to more than one; checker: the
  observer that checks
- expectation: what the reference expects of a call, under autocast_in_force and expected_promotion
- stock_run: the second run of a call, under stock autocast; comparison: two results, bit for bit
- known_gaps: the known differences, from known_gaps.toml; uninitialized_results: results that have no bits to compare
"""
