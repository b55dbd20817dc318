"""Numerics tools: find the first inf or NaN, compare policies, and tune overrides."""
