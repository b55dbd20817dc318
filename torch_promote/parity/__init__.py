"""Parity: PyTorch's own samples under stock autocast, under ours, and both against the reference.

- what is asked for and what came of it: torch_promote.parity.model
- the entries, and one entry's run: torch_promote.parity.runner
- samples: torch_promote.parity.samples, from PyTorch's op database (op_database), from its autocast lists
  (autocast_lists) and from the row samples (row_samples)
- one sample's run in one region: torch_promote.parity.outcome
- devices, a pretended one among them: torch_promote.parity.devices
- many entries in processes that may die: torch_promote.parity.jobs, and a process's side of it: worker
- what all of them came to, as a table and as JSON: torch_promote.parity.report; as JUnit's XML: junit
"""
