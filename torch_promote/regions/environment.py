"""Applies the environment variables: the default policy, and `install`.

TORCH_PROMOTE_AUTOCAST=1 calls `install`: _torch_promote_hooks.py, next to the package, imports the package at the end
of `import torch`.
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
    """Calls `install` with TORCH_PROMOTE_OVERRIDES and TORCH_PROMOTE_CACHE if TORCH_PROMOTE_AUTOCAST is 1.

    It passes no policy: regions without one use the default policy, which TORCH_PROMOTE_POLICY sets.

    Returns:
        The installation, or None if TORCH_PROMOTE_AUTOCAST is not 1.

    Raises:
        PolicyError: An op or policy of TORCH_PROMOTE_OVERRIDES does not exist, or the policy is not legal for the op.
        OptionError: The cache mode does not exist.
    """
    if os.environ.get(AUTOCAST) != "1":  # _torch_promote_hooks warns of other values
        return None
    cache = os.environ.get(CACHE, "")
    try:
        return install(overrides=asked_overrides(), cache=cache or None)
    except OptionError as error:
        raise OptionError(f"the environment variable {CACHE} is {cache!r}: {error}") from None


def asked_overrides() -> dict[str, str]:
    """Returns the overrides in TORCH_PROMOTE_OVERRIDES.

    Raises:
        PolicyError: An op or policy does not exist, or the policy is not legal for the op.
    """
    text = os.environ.get(OVERRIDES, "")
    try:
        overrides = split_overrides(text)
        parse_overrides(overrides)
    except PolicyError as error:
        raise PolicyError(f"the environment variable {OVERRIDES} is {text!r}: {error}") from None
    return overrides


def split_overrides(text: str) -> dict[str, str]:
    """Parses overrides from one line.

    Args:
        text: For example "softmax=fp32,linalg_*=fp32". Spaces and empty parts are ignored.

    Raises:
        PolicyError: A part has no equals sign, or an op is named twice.

    Example:
        >>> split_overrides("softmax=lower, linalg_*=float64")
        {'softmax': 'lower', 'linalg_*': 'float64'}
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
    """Formats overrides as one line.

    Example:
        >>> join_overrides({"softmax": "lower", "exp": "fp32"})
        'softmax=lower,exp=fp32'
    """
    return ",".join(f"{op}={policy}" for op, policy in overrides.items())
