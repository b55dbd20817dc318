"""`infer`: the results of any op, by a table of rules.

- infer: looks the rule up and applies it; rule_table: reads the table, rules/*.rules; call: the arguments of a call
- dtypes_of_results: the rules for one result's dtype, in dtypes_from_operands, _arguments and _branches
- elementwise: the rules for an elementwise op's result, in elementwise_iterated and _allocated
- registered: which ops PyTorch has kernels for
"""
