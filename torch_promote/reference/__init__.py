"""The reference: PyTorch's dtype rules in plain Python, independent of PyTorch's answers and of this package's C++.

Each module or package uses only those above it:

- dtypes: every dtype, its family and its kind
- promotion: `promote_types`, `result_type`, `can_cast`
- promotion_rules: the rules of PyTorch, JAX, NumPy and the array API standard, `promotion_rule` and `make_rule`
- strides: memory formats, broadcasting, strides of results
- tensor_iterator: `infer_elementwise`
- ops: `infer`, the results of any op, and the table of op rules
- autocast: `autocast_plan`, what autocast does with a call
- explanation: the same in words

Example:
    >>> import torch
    >>> from torch_promote import reference
    >>> reference.result_type(torch.ones(3, dtype=torch.int32), 5.5, default_dtype=torch.float32)
    torch.float32
"""

import functools

from torch_promote.errors import raise_no_attribute
from torch_promote.reference.autocast import AutocastPlan, AutocastState, Cast, DeviceAutocast, autocast_plan
from torch_promote.reference.ops.infer import NO_RULE, Inference, NoRule, infer
from torch_promote.reference.promotion import (
    Operand,
    PromotionError,
    can_cast,
    promote_types,
    result_type,
)
from torch_promote.reference.promotion_rules import RULE_NAMES, PromotionRule, RuleName, make_rule, promotion_rule
from torch_promote.reference.strides import ShapeError, is_non_overlapping_and_dense
from torch_promote.reference.tensor_iterator import (
    ElementwiseResult,
    TensorIteratorConfig,
    infer_elementwise,
    infer_where,
)

__all__ = [
    "NO_RULE",
    "RULE_NAMES",
    "AutocastPlan",
    "AutocastState",
    "Cast",
    "DeviceAutocast",
    "ElementwiseResult",
    "Inference",
    "NoRule",
    "Operand",
    "PromotionError",
    "PromotionRule",
    "RuleName",
    "ShapeError",
    "TensorIteratorConfig",
    "autocast_plan",
    "can_cast",
    "infer",
    "infer_elementwise",
    "infer_where",
    "is_non_overlapping_and_dense",
    "make_rule",
    "promote_types",
    "promotion_rule",
    "result_type",
]

globals()["__getattr__"] = functools.partial(raise_no_attribute, __name__, __all__)
