"""Parity: runs PyTorch's own samples under stock autocast and under ours, and compares both with the reference.

- model: the values of a run: options, entries, results, mismatches
- runner: the entries, and the run of one; entry_run: its samples under stock and ours; outcome: one call in one region
- samples: from PyTorch's op database (op_database), its autocast lists (autocast_lists), each row of the op table
  (row_samples), and pairs of dtypes (promotion)
- devices: real devices, and a simulated CUDA device
- jobs: hands entries to worker processes; worker: one such process
- report: the totals of a run, its JSON, and the merge of shards; junit: the JUnit XML
"""
