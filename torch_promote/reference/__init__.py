"""The reference: PyTorch's dtype rules in plain Python, which asks neither PyTorch nor this package's own C++.

Where things are:

- dtypes, their families and kinds: torch_promote.reference.dtypes
- `promote_types`, two dtypes by a table: torch_promote.reference.promotion_table
- `result_type`, operands by their states: torch_promote.reference.promotion
- other promotion rules than PyTorch's, `promotion_rule` and `make_rule`: torch_promote.reference.promotion_rules
- `can_cast`: torch_promote.reference.casting
- shapes and strides: torch_promote.reference.strides, torch_promote.reference.memory_format
- `infer_elementwise`: torch_promote.reference.tensor_iterator, and torch_promote.reference.tensor_iterator_config
- `infer`, the results of any op: torch_promote.reference.infer, with the op rules in torch_promote.reference.rules
- `autocast_plan`: torch_promote.reference.autocast_plan
- `why`, a derivation in words: torch_promote.reference.derivation, with its expressions and operators beside it

Example:
    >>> import torch
    >>> from torch_promote import reference
    >>> reference.result_type(torch.ones(3, dtype=torch.int32), 5.5, default_dtype=torch.float32)
    torch.float32
"""

from torch_promote.reference.autocast_plan import AutocastPlan, AutocastState, Cast, DeviceAutocast, autocast_plan
from torch_promote.reference.casting import can_cast
from torch_promote.reference.derivation import Derivation, why
from torch_promote.reference.expression import ExpressionError
from torch_promote.reference.infer import NO_RULE, Inference, NoRule, infer, rule_name
from torch_promote.reference.memory_format import is_non_overlapping_and_dense, suggest_memory_format
from torch_promote.reference.promotion import Operand, ResultTypeState, result_type
from torch_promote.reference.promotion_rules import RULE_NAMES, PromotionRule, make_rule, promotion_rule
from torch_promote.reference.promotion_table import PromotionError, promote_types
from torch_promote.reference.strides import ShapeError
from torch_promote.reference.tensor_iterator import ElementwiseResult, infer_elementwise, infer_where
from torch_promote.reference.tensor_iterator_config import TensorIteratorConfig

__all__ = [
    "NO_RULE",
    "RULE_NAMES",
    "AutocastPlan",
    "AutocastState",
    "Cast",
    "Derivation",
    "DeviceAutocast",
    "ElementwiseResult",
    "ExpressionError",
    "Inference",
    "NoRule",
    "Operand",
    "PromotionError",
    "PromotionRule",
    "ResultTypeState",
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
    "rule_name",
    "suggest_memory_format",
    "why",
]
