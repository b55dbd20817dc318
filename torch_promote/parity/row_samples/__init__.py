"""Sample calls for each row of the op table, one file for each family of ops.

Samples are called as `torch.ops.aten.<op>.<overload>`, so that each reaches its own row.
"""

from __future__ import annotations

from torch_promote.parity.row_samples import losses, matrices, pointwise, products, spatial
from torch_promote.parity.row_samples.make import Call, Make, Sample

__all__ = ["SAMPLES", "Call", "Make", "Sample"]

_FAMILIES = (losses, matrices, pointwise, products, spatial)

#: The qualified name of an overload -> its sample calls.
SAMPLES: dict[str, list[Sample]] = {name: samples for family in _FAMILIES for name, samples in family.SAMPLES.items()}
