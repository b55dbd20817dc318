"""The reference: PyTorch's dtype rules in plain Python, independent of PyTorch's answers and of this package's C++.

Each subpackage uses only those above it:

- dtypes: every dtype, its family and its kind
- promotion: `promote_types` (table), `result_type` (states), `can_cast` (casting)
- promotion_rules: the rules of PyTorch, JAX, NumPy and the array API standard, `promotion_rule` and `make_rule`
- elementwise: `infer_elementwise` (tensor_iterator, config), shapes and strides (strides, memory_format)
- ops: `infer`, the results of any op, and the table of op rules
- autocast: `autocast_plan`, what autocast does with a call
- derivation: `why`, an explanation of an expression's dtype

Example:
    >>> import torch
    >>> from torch_promote import reference
    >>> reference.result_type(torch.ones(3, dtype=torch.int32), 5.5, default_dtype=torch.float32)
    torch.float32
"""

from torch_promote.reference.autocast.plan import AutocastPlan, AutocastState, Cast, DeviceAutocast, autocast_plan
from torch_promote.reference.derivation.derivation import Derivation, why
from torch_promote.reference.derivation.expression import ExpressionError
from torch_promote.reference.elementwise.config import TensorIteratorConfig
from torch_promote.reference.elementwise.memory_format import is_non_overlapping_and_dense, suggest_memory_format
from torch_promote.reference.elementwise.strides import ShapeError
from torch_promote.reference.elementwise.tensor_iterator import ElementwiseResult, infer_elementwise, infer_where
from torch_promote.reference.ops.infer import NO_RULE, Inference, NoRule, infer, rule_name
from torch_promote.reference.promotion.casting import can_cast
from torch_promote.reference.promotion.states import Operand, ResultTypeState, result_type
from torch_promote.reference.promotion.table import PromotionError, promote_types
from torch_promote.reference.promotion_rules import RULE_NAMES, PromotionRule, make_rule, promotion_rule

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
