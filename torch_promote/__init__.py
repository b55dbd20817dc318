"""torch_promote: PyTorch autocast on a dispatch key of its own.

`my_autocast` is used as `torch.autocast` is, and gives the same bits; it goes on working where stock autocast breaks,
and the cast policy of every op can be seen and overridden.

Where things are:

- `my_autocast`, `cache_info`, `clear_cache`: torch_promote.autocast
- `CastPolicy` and the op table: torch_promote.policies
- `Policy`, policy files and named policies: torch_promote.policy; what holds for a whole program
  (`set_default_policy`, `register_policy`): torch_promote.defaults
- policies of modules (`set_module_policy`): torch_promote.modules (loaded when first used)
- `promotion`, promotion by a rule of one's choice: torch_promote.promotion; its lint: torch_promote.promotion_lint; the
  rules, and `make_rule`: torch_promote.reference.promotion_rules (loaded when first used)
- errors, all subclasses of `TorchPromoteError`: torch_promote.errors
- `crosscheck`: torch_promote.checking.crosscheck; `reference`: torch_promote.reference (loaded when first used)
- the command `torch-promote`: torch_promote.cli

Example:
    >>> import torch, torch_promote as tp
    >>> with tp.my_autocast("cpu"):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
"""

import importlib
from typing import TYPE_CHECKING, Any

from torch_promote._extension import OUR_KEY, check_extension

check_extension()

from torch_promote import _compile, _higher_order, _kept_casts  # noqa: E402 (what follows needs the extension)
from torch_promote._checkpoint import checkpoint_contexts  # noqa: E402
from torch_promote.autocast import cache_info, clear_cache, my_autocast  # noqa: E402
from torch_promote.defaults import (  # noqa: E402
    RegisteredPolicy,
    default_policy,
    register_policy,
    registered_policies,
    set_default_policy,
    use_environment,
)
from torch_promote.errors import (  # noqa: E402
    DecoratorError,
    DeviceTypeError,
    DtypeError,
    ExtensionError,
    OptionError,
    PolicyError,
    PromotionLintError,
    PromotionRuleError,
    PromotionWarning,
    PromotionWriteError,
    RegionError,
    RuleDefinitionError,
    TorchPromoteError,
    UnsupportedDeviceError,
)
from torch_promote.policies import CastPolicy  # noqa: E402
from torch_promote.policy import Policy  # noqa: E402
from torch_promote.promotion import promotion  # noqa: E402
from torch_promote.promotion_lint import PromotionEvent, PromotionKind  # noqa: E402

if TYPE_CHECKING:
    from torch_promote import reference
    from torch_promote.checking.crosscheck import CrosscheckError, CrosscheckReport, crosscheck
    from torch_promote.modules import (
        format_module_policy,
        module_policies,
        print_module_policy,
        remove_module_policy,
        set_module_policy,
    )
    from torch_promote.reference.promotion_rules import PromotionRule, make_rule

_compile.install(my_autocast, promotion)
_kept_casts.keep_from_replaying_modes()
_higher_order.pass_over(OUR_KEY)
use_environment()

__version__ = "0.1.0"

__all__ = [
    "CastPolicy",
    "CrosscheckError",
    "CrosscheckReport",
    "DecoratorError",
    "DeviceTypeError",
    "DtypeError",
    "ExtensionError",
    "OptionError",
    "Policy",
    "PolicyError",
    "PromotionEvent",
    "PromotionKind",
    "PromotionLintError",
    "PromotionRule",
    "PromotionRuleError",
    "PromotionWarning",
    "PromotionWriteError",
    "RegionError",
    "RegisteredPolicy",
    "RuleDefinitionError",
    "TorchPromoteError",
    "UnsupportedDeviceError",
    "__version__",
    "cache_info",
    "checkpoint_contexts",
    "clear_cache",
    "crosscheck",
    "default_policy",
    "format_module_policy",
    "make_rule",
    "module_policies",
    "my_autocast",
    "print_module_policy",
    "promotion",
    "reference",
    "register_policy",
    "registered_policies",
    "remove_module_policy",
    "set_default_policy",
    "set_module_policy",
]

#: What a training loop does not need is loaded when it is first asked for, and from where.
_LAZY = {
    "CrosscheckError": "torch_promote.checking.report",
    "CrosscheckReport": "torch_promote.checking.report",
    "crosscheck": "torch_promote.checking.crosscheck",
    "PromotionRule": "torch_promote.reference.promotion_rules",
    "make_rule": "torch_promote.reference.promotion_rules",
    **dict.fromkeys(
        (
            "format_module_policy",
            "module_policies",
            "print_module_policy",
            "remove_module_policy",
            "set_module_policy",
        ),
        "torch_promote.modules",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "reference":
        return importlib.import_module("torch_promote.reference")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
