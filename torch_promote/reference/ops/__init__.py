"""The results of any op, by op rules."""
