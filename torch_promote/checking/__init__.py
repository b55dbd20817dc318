"""Checks of a running program: crosscheck, check_casts, why, and the pytest plugin."""
