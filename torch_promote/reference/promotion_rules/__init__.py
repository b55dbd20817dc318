"""Promotion rules as data: PyTorch's rule and others.

- rule: `PromotionRule`, the tables of a rule and the common dtype of any operands
- torch_rule, jax_rule, numpy_rule, array_api_rule, strict_rule: the rules; registry: `promotion_rule`, a rule by name
- user: `make_rule`, a user's own rule; text_table: tables written as text
- operands: tensors and Python numbers as operands; remedy: the cast that an error proposes

Example:
    >>> import torch
    >>> operands = torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.float16)
    >>> {name: promotion_rule(name).common(operands) for name in ("torch", "jax", "numpy")}
    {'torch': torch.float16, 'jax': torch.float16, 'numpy': torch.float64}
"""

from torch_promote.errors import PromotionRuleError, RuleDefinitionError
from torch_promote.reference.promotion_rules.named_rules import RULE_NAMES, promotion_rule
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
