"""Parity: runs PyTorch's own samples under stock autocast and under ours, and compares both with the reference.

- model: the values of a run (options, entries, results), and the devices
- samples: the samples of an entry, from PyTorch's op database, the rows of the op table, and pairs of dtypes
- runner: the entries, the samples of one under stock and ours, and many in worker processes
- report: totals, text, JSON and JUnit XML, and the merge of shards
"""
