"""Policies: what autocast does with each op.

- op_table, cast_policy: the table of PyTorch's policies, and the enum of all cast policies
- op_names, legality, overrides: from what a user writes to overloads and policies that are legal for them
- python_names, python_functions, closest_ops: functions of PyTorch as names of ops, and suggestions; dtype_names: names
  of dtypes
- policy, named, files: `Policy`, the value that a region takes; the named ones; TOML files
- registered: the ops that PyTorch and libraries register for autocast, compared with the table
"""
