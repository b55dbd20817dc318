"""Promotion rules as data: PyTorch's rule and others."""

from torch_promote.errors import PromotionRuleError, RuleDefinitionError
from torch_promote.reference.promotion_rules.named_rules import RULE_NAMES, RuleName, promotion_rule
from torch_promote.reference.promotion_rules.rule import PromotionRule
from torch_promote.reference.promotion_rules.user import make_rule

__all__ = [
    "RULE_NAMES",
    "PromotionRule",
    "PromotionRuleError",
    "RuleDefinitionError",
    "RuleName",
    "make_rule",
    "promotion_rule",
]
