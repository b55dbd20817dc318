"""Runs a program's step under different policies, each time from the same state."""
