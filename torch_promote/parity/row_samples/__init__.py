"""Sample calls for each row of the op table, one file for each family of ops.

Samples are called as `torch.ops.aten.<op>.<overload>`, so that each reaches its own row.
"""

from __future__ import annotations

from torch_promote.parity.row_samples.losses import _LOSSES
from torch_promote.parity.row_samples.make import Call, Make, Sample
from torch_promote.parity.row_samples.matrices import _MATRICES
from torch_promote.parity.row_samples.pointwise import _POINTWISE
from torch_promote.parity.row_samples.products import _PRODUCTS
from torch_promote.parity.row_samples.spatial import _SPATIAL

__all__ = ["SAMPLES", "Call", "Make", "Sample"]

#: The qualified name of an overload -> its sample calls.
SAMPLES: dict[str, list[Sample]] = {**_LOSSES, **_MATRICES, **_POINTWISE, **_PRODUCTS, **_SPATIAL}
