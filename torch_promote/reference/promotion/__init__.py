"""Promotion of dtypes: the table, operands by their states, and casting."""
