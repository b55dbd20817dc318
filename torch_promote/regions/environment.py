"""What the environment variables ask for: the default policy, and `install`.

TORCH_PROMOTE_AUTOCAST=1 does what `install` does. For it, torch_promote_autoload.py, beside the package, imports the
package at the end of `import torch`.
"""

from __future__ import annotations

import os

from torch_promote.errors import OptionError, PolicyError
from torch_promote.policy.overrides import parse_overrides
from torch_promote.regions import defaults
from torch_promote.regions.installation import Installation, install

__all__ = [
    "AUTOCAST",
    "CACHE",
    "OVERRIDES",
    "POLICY",
    "VARIABLES",
    "asked_overrides",
    "join_overrides",
    "split_overrides",
    "use_environment",
]

AUTOCAST = "TORCH_PROMOTE_AUTOCAST"
POLICY = defaults.VARIABLE
OVERRIDES = "TORCH_PROMOTE_OVERRIDES"
CACHE = "TORCH_PROMOTE_CACHE"
VARIABLES = (AUTOCAST, POLICY, OVERRIDES, CACHE)


def use_environment() -> Installation | None:
    """Installs what TORCH_PROMOTE_OVERRIDES and TORCH_PROMOTE_CACHE say, if TORCH_PROMOTE_AUTOCAST is 1.

    The policy is not an argument here: regions without one have the default policy, which TORCH_PROMOTE_POLICY sets.

    Returns:
        What is in force; None if the environment asks for nothing.

    Raises:
        PolicyError: An op or policy of TORCH_PROMOTE_OVERRIDES does not exist, or the policy is not legal for the op.
        OptionError: The cache mode does not exist.
    """
    if os.environ.get(AUTOCAST) != "1":  # torch_promote_autoload warns of other values
        return None
    cache = os.environ.get(CACHE, "")
    try:
        return install(overrides=asked_overrides(), cache=cache or None)
    except OptionError as error:
        raise OptionError(f"the environment variable {CACHE} is {cache!r}: {error}") from error


def asked_overrides() -> dict[str, str]:
    """Returns the overrides that TORCH_PROMOTE_OVERRIDES asks for.

    Raises:
        PolicyError: An op or policy does not exist, or the policy is not legal for the op.
    """
    text = os.environ.get(OVERRIDES, "")
    try:
        overrides = split_overrides(text)
        parse_overrides(overrides)
    except PolicyError as error:
        raise PolicyError(f"the environment variable {OVERRIDES} is {text!r}: {error}") from error
    return overrides


def split_overrides(text: str) -> dict[str, str]:
    """Reads overrides of one line.

    Args:
        text: Such as "softmax=fp32,linalg_*=fp32". Spaces and empty parts do not count.

    Raises:
        PolicyError: A part has no equals sign, or an op is named twice.

    Example:
        >>> split_overrides("softmax=fp16, linalg_*=float64")
        {'softmax': 'fp16', 'linalg_*': 'float64'}
    """
    overrides: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        op, equals, policy = (piece.strip() for piece in part.partition("="))
        if not (op and equals and policy):
            raise PolicyError(f"{part!r} is not an override. Write OP=POLICY, as in softmax=fp32.")
        if overrides.setdefault(op, policy) != policy:
            raise PolicyError(f"{op!r} has two policies, {overrides[op]!r} and {policy!r}. Name each op once.")
    return overrides


def join_overrides(overrides: dict[str, str]) -> str:
    """Writes overrides in one line.

    Example:
        >>> join_overrides({"softmax": "fp16", "exp": "fp32"})
        'softmax=fp16,exp=fp32'
    """
    return ",".join(f"{op}={policy}" for op, policy in overrides.items())
