"""Promotion rules as data: which dtype operands promote to under PyTorch's rule, and under others.

- what a rule is: torch_promote.reference.promotion_rules.rule
- PyTorch's: torch_promote.reference.promotion_rules.torch_rule

Example:
    >>> import torch
    >>> promotion_rule("torch", default_dtype=torch.float32).common([torch.int64, torch.float16])
    torch.float16
"""

from torch_promote.reference.promotion_rules.registry import RULE_NAMES, promotion_rule
from torch_promote.reference.promotion_rules.rule import PromotionRule

__all__ = ["RULE_NAMES", "PromotionRule", "promotion_rule"]
