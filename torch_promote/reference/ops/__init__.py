"""`infer`: the results of any op, by a table of rules.

- infer: reads the table, rules/*.rules, looks a rule up and applies it; call: the arguments of a call
- dtype_rules: the rules for one result's dtype; elementwise_rules: those for an elementwise op's result
"""
