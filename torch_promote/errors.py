"""The errors of this package. Each says what was asked, what was got, what is legal and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "DecoratorError",
    "DeviceTypeError",
    "DtypeError",
    "ExtensionError",
    "OptionError",
    "PolicyError",
    "PromotionLintError",
    "PromotionRuleError",
    "PromotionWarning",
    "PromotionWriteError",
    "RegionError",
    "RuleDefinitionError",
    "TorchPromoteError",
    "UnsupportedDeviceError",
]


class TorchPromoteError(Exception):
    """Every error that this package raises itself."""


class ExtensionError(TorchPromoteError, ImportError):
    """The compiled part is missing, or was built against another PyTorch, or its dispatch key is taken."""


class DeviceTypeError(TorchPromoteError, ValueError):
    """A device type that is not a string, or a sequence of them that cannot be meant."""


class UnsupportedDeviceError(TorchPromoteError, RuntimeError):
    """A device type that has no autocast here, or that cannot do what is asked."""


class DtypeError(TorchPromoteError, TypeError):
    """An autocast dtype that is not a floating torch.dtype."""


class DecoratorError(TorchPromoteError, TypeError):
    """Something that cannot be called was decorated."""


class PolicyError(TorchPromoteError, ValueError):
    """An op or a cast policy that does not exist, or a policy that is not legal for the op."""


class OptionError(TorchPromoteError, ValueError):
    """An option that does not exist, or a value of it that is not legal."""


class RegionError(TorchPromoteError, RuntimeError):
    """A region is used in a way that it cannot be: ended where it is not open, or exported with overrides."""


class PromotionRuleError(TorchPromoteError, RuntimeError):
    """Operands that have no common dtype under a promotion rule.

    It is a RuntimeError, as PyTorch's own are: PyTorch takes a TypeError in `x + y` for "not implemented" and drops it.

    Attributes:
        rule: The rule's name.
        operands: The operands in words, such as "int32[3]" and "5.5 (a Python float)".
        reason: What of the rule forbids them, as a clause.
        remedy: What to write instead, as a sentence.
        op: The op that was called, or None if it is not known.

    Example:
        >>> print(PromotionRuleError("strict", ["int8[3]", "int16[3]"], "the two differ", "Cast one.", "add"))
        add: the promotion rule "strict" has no common dtype for int8[3] and int16[3]: the two differ. Cast one.
    """

    def __init__(self, rule: str, operands: Iterable[str], reason: str, remedy: str, op: str | None = None) -> None:
        self.rule, self.operands, self.reason, self.remedy, self.op = rule, tuple(operands), reason, remedy, op
        super().__init__(rule, self.operands, reason, remedy, op)  # the arguments: pickle makes the error from them

    def __str__(self) -> str:
        words = f"{', '.join(self.operands[:-1])} and {self.operands[-1]}" if self.operands[1:] else self.operands[0]
        called = f"{self.op}: the" if self.op else "the"
        return f'{called} promotion rule "{self.rule}" has no common dtype for {words}: {self.reason}. {self.remedy}'


class PromotionWriteError(PromotionRuleError):
    """An in-place or out= op that would write another dtype than the promotion rule lets it.

    Example:
        >>> operands = ["int8[3]", "float32[3]"]
        >>> print(PromotionWriteError("jax", operands, "float32 is not written to int8", "Cast.", "add_"))
        add_ of int8[3] and float32[3] under the promotion rule "jax": float32 is not written to int8. Cast.
    """

    def __str__(self) -> str:
        called = self.op or "an op that writes"
        words = " and ".join(self.operands)
        return f'{called} of {words} under the promotion rule "{self.rule}": {self.reason}. {self.remedy}'


class PromotionLintError(TorchPromoteError, RuntimeError):
    """A silent promotion in a region of `promotion(..., on_promotion="raise")`."""


class PromotionWarning(UserWarning):
    """A silent promotion in a region of `promotion(..., on_promotion="warn")`."""


class RuleDefinitionError(TorchPromoteError, ValueError):
    """A promotion rule that is none: a pair without an answer, two answers for one pair, an unknown name."""


def did_you_mean(name: str, known: Iterable[str], count: int = 3) -> str:
    """Returns the known names closest to a misspelt one, as the end of a sentence, or "" if none is close.

    Args:
        name: What was asked for.
        known: The names that exist.
        count: How many to offer at most.

    Returns:
        `" Closest: a, b."`, with a leading space, or the empty string.

    Example:
        >>> did_you_mean("sofmax", ["softmax", "sum"])
        ' Closest: softmax.'
    """
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    return f" Closest: {', '.join(close)}." if close else ""
