"""Readers of recordings: trace, its report and explanations, and the comparison of two runs."""
