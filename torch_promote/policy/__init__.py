"""Policies: what autocast does with each op.

- cast_policy, op_table: the cast policies, the table of PyTorch's policies, and what the running PyTorch registers
- op_names, dtype_names: the ways to write an op or a dtype, and suggestions for misspelt ones
- overrides: the policies that are legal for an op, and what a user writes as overrides
- named_policies, module_tables, files: the named policies, tables for modules, TOML files
- policy: `Policy`, the value that a region takes
"""
