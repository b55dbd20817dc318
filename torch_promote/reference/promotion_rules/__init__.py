"""Promotion rules as data: PyTorch's rule and others.

rule: `PromotionRule`, the tables of a rule and the common dtype of any operands; named_rules: the rules by
name; user: `make_rule`, a user's own rule.
"""

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
