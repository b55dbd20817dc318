"""Promotion rules as data: which dtype operands promote to under PyTorch's rule, and under others.

- what a rule is, and the common dtype of any operands by it: torch_promote.reference.promotion_rules.rule
- tensors and Python numbers as operands: operands; the cast to write where there is no common dtype: remedy
- the rules: torch_rule, jax_rule, numpy_rule, array_api_rule and strict_rule beside it; by name: registry
- a user's own: torch_promote.reference.promotion_rules.user
- where a rule deliberately differs from the library that it is named after: exceptions

Example:
    >>> import torch
    >>> operands = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.float16)
    >>> {name: promotion_rule(name).common(operands) for name in ("torch", "jax", "numpy")}
    {'torch': torch.float16, 'jax': torch.float16, 'numpy': torch.float64}
"""

from torch_promote.errors import PromotionRuleError, RuleDefinitionError
from torch_promote.reference.promotion_rules.registry import RULE_NAMES, promotion_rule
from torch_promote.reference.promotion_rules.rule import PromotionRule
from torch_promote.reference.promotion_rules.user import make_rule

__all__ = [
    "RULE_NAMES",
    "PromotionRule",
    "PromotionRuleError",
    "RuleDefinitionError",
    "make_rule",
    "promotion_rule",
]
