"""Checks of a running program: crosscheck, check_casts, why, and the pytest plugin.

- crosscheck: the context manager, and its observer, which compares each call with its expectation, and with a second
  run under stock autocast; report: what it returns; pytest_plugin: one around each test
- expectation: what the reference expects of a call, or the registered fake of a custom op
- comparison: two results, bit for bit; known_gaps: the known differences, from known_gaps.toml
- check_casts: compares every reused cast with a fresh one
- why: explains a result or a call; expression: the calls that people write as text
"""
