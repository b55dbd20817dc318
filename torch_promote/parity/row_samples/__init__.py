"""Sample calls: at least one of every overload in the op table, one file for each family of ops.

A sample is called through `torch.ops.aten.<op>.<overload>`, so that it reaches this row and no other.
"""

from __future__ import annotations

from torch_promote.parity.row_samples import losses, matrices, pointwise, products, spatial
from torch_promote.parity.row_samples.make import Call, Make, Sample

__all__ = ["SAMPLES", "Call", "Make", "Sample"]

_FAMILIES = (losses, matrices, pointwise, products, spatial)

#: The qualified name of an overload -> its sample calls.
SAMPLES: dict[str, list[Sample]] = {name: samples for family in _FAMILIES for name, samples in family.SAMPLES.items()}
