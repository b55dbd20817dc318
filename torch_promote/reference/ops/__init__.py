"""`infer`: the results of any op, by a table of rules."""
