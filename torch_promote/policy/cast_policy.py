"""The cast policies and the device types. The command reads them before it imports PyTorch, so this module does not."""

from __future__ import annotations

import enum
from typing import Literal

from torch_promote.errors import PolicyError, did_you_mean, shown


class CastPolicy(enum.Enum):
    """What autocast does with a call of an op. The names are PyTorch's.

    Source: aten/src/ATen/autocast_mode.h, enum class CastPolicy (v2.13), for the first five.

    Example:
        >>> CastPolicy("fp32")
        <CastPolicy.fp32: 'fp32'>
        >>> CastPolicy("lower")
        <CastPolicy.lower_precision_fp: 'lower_precision_fp'>
        >>> CastPolicy.fp32.meaning
        'Cast every eligible argument to float32.'
    """

    _value_: str
    #: What the policy does, in a sentence.
    meaning: str

    lower_precision_fp = (
        "lower_precision_fp",
        "Cast every eligible argument to the region's autocast dtype. Short: lower. Alias: fp16.",
    )
    fp32 = "fp32", "Cast every eligible argument to float32."
    fp32_set_opt_dtype = (
        "fp32_set_opt_dtype",
        "Cast nothing; an optional dtype argument that the caller omits becomes float32.",
    )
    fp32_append_dtype = (
        "fp32_append_dtype",
        "Cast nothing; call the overload that takes an output dtype, with float32.",
    )
    promote = (
        "promote",
        "Cast every eligible argument to the widest dtype among the eligible tensors and tensor lists.",
    )
    match_self = (
        "match_self",
        "For an op that writes to an argument: cast its other floating arguments to the dtype of that argument.",
    )
    float8_tensorwise = (
        "float8:tensorwise",
        "Of linear: multiply in float8, with one scale for each tensor; gradients in e5m2.",
    )
    float8_rowwise = (
        "float8:rowwise",
        "Of linear: multiply in float8, with a scale for each row, a power of two. Short: float8.",
    )
    float8_rowwise_with_gw_hp = (
        "float8:rowwise_with_gw_hp",
        "Of linear: like float8:rowwise, but the gradient of the weight is computed in the autocast dtype.",
    )
    fallthrough = "fallthrough", "Do nothing; ops inside a composite op still see autocast."
    keep = "keep", "Cast nothing, and run the op and what is inside it with autocast off."
    banned = "banned", "Raise: the op's results are unsafe under autocast."

    def __new__(cls, value: str, meaning: str = "") -> CastPolicy:
        """Makes a member whose value is its name, without the meaning."""
        member = object.__new__(cls)
        member._value_ = value
        member.meaning = meaning
        return member

    @classmethod
    def _missing_(cls, value: object) -> CastPolicy | None:
        if isinstance(value, str) and value in POLICY_ALIASES:
            return POLICY_ALIASES[value]
        names = [policy.value for policy in cls]
        closest = did_you_mean(str(value), [*names, *POLICY_ALIASES], 1)
        raise PolicyError(f"no cast policy is called {shown(value)}.{closest} Legal: {', '.join(names)}.")


#: Other names of policies. `fp16` is PyTorch's name of a list of ops; they run in the region's dtype, whatever it is.
POLICY_ALIASES = {
    "lower": CastPolicy.lower_precision_fp,
    "fp16": CastPolicy.lower_precision_fp,
    "float8": CastPolicy.float8_rowwise,
}

#: What `CastPolicy` accepts.
CastPolicyName = Literal[
    "lower",
    "fp32",
    "promote",
    "match_self",
    "keep",
    "fallthrough",
    "banned",
    "float8",
    "fp16",
    "lower_precision_fp",
    "fp32_set_opt_dtype",
    "fp32_append_dtype",
    "float8:tensorwise",
    "float8:rowwise",
    "float8:rowwise_with_gw_hp",
]

#: The device types that have a column in the table, in the order of the columns.
DEVICE_TYPES: tuple[DeviceType, ...] = ("cpu", "cuda", "xpu", "mps")

DeviceType = Literal["cpu", "cuda", "xpu", "mps"]
