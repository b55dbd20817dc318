"""The reference: PyTorch's dtype rules in plain Python, which asks neither PyTorch nor this package's own C++.

Where things are:

- dtypes, their kinds and the table: torch_promote.reference.dtypes
- `promote_types`, `result_type`: torch_promote.reference.promotion; `can_cast`: torch_promote.reference.casting
- shapes and strides: torch_promote.reference.strides
- `infer_elementwise`: torch_promote.reference.tensor_iterator
- `why`, a derivation in words: torch_promote.reference.derivation

Example:
    >>> import torch
    >>> from torch_promote import reference
    >>> reference.result_type(torch.ones(3, dtype=torch.int32), 5.5, default_dtype=torch.float32)
    torch.float32
"""

from torch_promote.reference.casting import can_cast
from torch_promote.reference.promotion import Operand, PromotionError, ResultTypeState, promote_types, result_type

__all__ = [
    "Operand",
    "PromotionError",
    "ResultTypeState",
    "can_cast",
    "promote_types",
    "result_type",
]
