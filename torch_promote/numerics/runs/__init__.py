"""Runs of a program's step under one policy after the other, from the same state each time."""
