"""Overrides: what a user writes, checked, as a policy for each overload; the policies that are legal for an op."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torch_promote.errors import DeviceTypeError, PolicyError, UnsupportedDeviceError, did_you_mean, shown
from torch_promote.policy.dtype_names import close_dtype, dtype_of_name, why_not_cast
from torch_promote.policy.op_names import find_overloads, in_order, is_pattern, spell_key
from torch_promote.policy.op_table import (
    DEVICE_TYPES,
    FLOAT8_POLICIES,
    LEGAL_NAMES,
    POLICY_ALIASES,
    CastPolicy,
    Row,
    rows_by_name,
    schema_of,
    spell_policy,
)

#: Legal for every overload that takes a tensor, including one that writes to an argument.
_CASTING_NOTHING = (CastPolicy.fallthrough, CastPolicy.keep, CastPolicy.banned)

#: The op for which the float8 policies are legal. What autocast does for a composite op, it does in place of the ops
#: inside, so `linear` stands for the mm or addmm that it would call.
_IN_FLOAT8 = "aten::linear"

#: Ops that return their argument's data, or memory of its kind, and compute nothing. An op whose schema declares that a
#: result shares its argument's data, and the copying version of such an op (the tag `view_copy`), are recognized
#: without being listed.
_MOVES_DATA = re.compile(
    r"clone|copy|lift|\w+_clone|_foreach_copy|copy_sparse_to_sparse|copy_strided|_copy_from(_and_resize)?"
    r"|_?to_(copy|cpu|dense|mkldnn|sparse|sparse_csr|sparse_csc|sparse_bsr|sparse_bsc)|_cast_\w+|_pin_memory"
    r"|_unsafe_view|unsafe_(chunk|split|split_with_sizes)|reshape|_reshape_copy|_reshape_from_tensor|_mkldnn_reshape"
    r"|(empty|zeros|ones|full|rand|randn|randint)_like|new_\w+|resize(_as)?(_sparse)?|_resize_output"
    r"|sparse_resize(_and_clear)?"
)


#: Ops that write to lists of any dtype, and count steps or scale in float32 beside them.
_KEEPS_FLOAT32 = re.compile(r"aten::_(fused_(adam|adamw|adagrad|sgd)_?(\.|$)|amp_)")


def legal_policies(op: Row | str) -> tuple[CastPolicy, ...]:
    """Returns the cast policies that a schema allows. A floating dtype is legal wherever `CastPolicy.fp32` is."""
    return tuple(policy for policy in CastPolicy if why_illegal(op, policy) is None)


def check_legal(op: Row | str, policy: CastPolicy | torch.dtype) -> None:
    """Raises PolicyError if a policy is not legal for an overload."""
    why = why_illegal(op, policy)
    if why is not None:
        name = op.name if isinstance(op, Row) else op
        raise PolicyError(f"{name} cannot use {spell_policy(policy)!r}: {why}.{legal_text(legal_policies(op))}")


def why_illegal(op: Row | str, policy: CastPolicy | torch.dtype) -> str | None:
    """Returns why a policy is not legal for an overload, or None if it is."""
    schema = schema_of(op)
    if schema is None:
        return f"torch {torch.__version__} has no such overload"
    arguments = schema.arguments
    if not any(_holds_tensors(argument.type) for argument in arguments):
        return "it takes no tensor, so autocast does not apply to it"
    if policy in _CASTING_NOTHING:
        return None
    if policy in FLOAT8_POLICIES:
        name = op.name if isinstance(op, Row) else op
        return None if name == _IN_FLOAT8 else f"only {_IN_FLOAT8} has a product in float8"
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)
    if policy is CastPolicy.match_self:
        if _KEEPS_FLOAT32.match(str(op)):
            return "it counts steps or scales in float32 beside tensors of any dtype"
        return None if writes else "it does not write to an argument, so there is no dtype to match"
    if writes:
        return "it writes to an argument, and autocast never casts that argument"
    if not isinstance(op, Row) and converts(op):
        return "it converts to the dtype that the program names: change the conversion in the code"
    if not isinstance(op, Row) and moves_data(op):
        return (
            "it returns its argument's data, or memory of the same dtype, and computes nothing, and the kernels of "
            "other ops call it and read the result in the dtype that they passed. Override the op that computes with "
            "the result"
        )
    if policy is CastPolicy.fp32_set_opt_dtype:
        if not any(str(argument.real_type) == "Optional[ScalarType]" for argument in arguments):
            return "its schema has no optional dtype argument"
        return None if arguments[0].type.kind() == "TensorType" else "its first argument is not a Tensor"
    row = op if isinstance(op, Row) else rows_by_name().get(op)
    if policy is CastPolicy.fp32_append_dtype and not (row is not None and row.redispatch_overload):
        return "the op table names no overload of it that takes an output dtype"
    return None


def converts(op: str) -> bool:
    """Whether an overload converts to the dtype that the program names."""
    return op.startswith(("aten::to.", "aten::_to_copy", "aten::type_as"))


def moves_data(op: str) -> bool:
    """Whether an overload returns its argument's data, or memory of the same dtype, and computes nothing."""
    schema = schema_of(op)
    if schema is None or op in rows_by_name():
        return False
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return True
    namespace, _, name = op.partition("::")
    name, _, overload = name.partition(".")
    if namespace not in ("aten", "prims"):
        return False
    if _MOVES_DATA.fullmatch(name):
        return True
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload or "default", None)
    return name.endswith("_copy") and torch.Tag.view_copy in getattr(found, "tags", ())


def legal_text(policies: Iterable[CastPolicy]) -> str:
    """Returns the sentence that ends an error text: the legal policies."""
    names = [policy.value for policy in policies]
    if not names:
        return ""
    return f" Legal: {', '.join(names)}{' or a floating dtype' if 'fp32' in names else ''}."


def _holds_tensors(kind: Any) -> bool:
    return kind.kind() == "TensorType" or any(map(_holds_tensors, kind.containedTypes()))


#: What users write for no cast. No policy has a name that is close to these.
_NO_POLICY = ("none", "off", "no", "null")
_NAMES = [name for name in (*(policy.value for policy in CastPolicy), *POLICY_ALIASES) if "float8" not in name]
_LEGAL_VALUES = (
    f"Legal: {LEGAL_NAMES} or a floating dtype of 16 bits or more, such as float16; "
    "for linear also float8, which computes scales."
)
_LEGAL_FLOAT8 = f"Legal for linear: float8 (float8:rowwise), {', '.join(policy.value for policy in FLOAT8_POLICIES)}."
#: What users write for float8, and why other ways of scaling are not there.
_FLOAT8 = ("float8", "fp8", "mx")
_OTHER_SCALES = {
    "mx": ": PyTorch has no product on a CPU for MX, with a scale for 32 elements",
    "block": ": PyTorch has no product on a CPU for blocks with a scale each, so that none could be tested",
}
#: The end of errors about device types.
LEGAL_DEVICES = f" Legal: {', '.join(map(repr, DEVICE_TYPES))}."


def selects(key: str, policy: str, overload: str) -> bool:
    """Whether an override is legal, and acts on an overload."""
    try:
        return any(name == overload for name, _ in parse_overrides({key: policy}))
    except PolicyError:
        return False


def parse_overrides(overrides: Mapping[Any, Any]) -> tuple[tuple[str, CastPolicy | torch.dtype], ...]:
    """Checks overrides, and returns pairs of an overload's full name and its policy, in the order of `in_order`."""
    # If a key selects several overloads, those for which the policy is legal get it. A name takes precedence over a
    # pattern.
    if not isinstance(overrides, Mapping):
        raise PolicyError(
            f"overrides must be a mapping of ops to policies, got {type(overrides).__name__}. Write {{op: policy}}, "
            'such as {"softmax": "fp32"}.'
        )
    chosen: dict[str, tuple[CastPolicy | torch.dtype, object]] = {}
    for key, value in sorted(overrides.items(), key=lambda item: is_pattern_key(item[0])):
        policy, names = select(key, value)
        for name in names:
            known, other = chosen.setdefault(name, (policy, key))
            if known != policy and is_pattern_key(key) == is_pattern_key(other):
                raise PolicyError(
                    f"{name} gets two policies, {spell_policy(known)!r} from {show_key(other)} and "
                    f"{spell_policy(policy)!r} from {show_key(key)}. {which_wins(key)}"
                )
    return tuple((name, chosen[name][0]) for name in in_order(chosen))


def show_key(key: object) -> str:
    """Returns an op as errors show it: a name as the user wrote it, other objects by the name of the op."""
    return repr(key if isinstance(key, str) else spell_key(key))


def is_pattern_key(key: object) -> bool:
    """Whether a key of overrides is a pattern, and not an op. An op that is named has that policy, not a pattern's."""
    return isinstance(key, str) and is_pattern(key)


def which_wins(key: object) -> str:
    """Returns what to do about two policies for an op, of which the one for this key is not the first."""
    if is_pattern_key(key):
        return "Name the op itself as well, which takes precedence over patterns, or change a pattern."
    return "Name each overload once."


def spell_overrides(overrides: Mapping[Any, Any]) -> str:
    """Returns overrides as a repr shows them."""
    shown = []
    for op, policy in overrides.items():
        name = op if isinstance(op, str) else spell_key(op)
        shown.append(f"{name!r}: {str(policy.value if isinstance(policy, CastPolicy) else policy)!r}")
    return f"{{{', '.join(shown)}}}"


def select(key: object, value: object) -> tuple[CastPolicy | torch.dtype, tuple[str, ...]]:
    """Returns a policy, and the overloads that a key selects and for which the policy is legal: one or more."""
    names = find_overloads(key)
    policy = parse_policy(value, names[0] if len(names) == 1 else repr(spell_key(key)))
    if len(names) == 1:
        check_legal(names[0], policy)
        return policy, names
    reasons = {name: why_illegal(name, policy) for name in names}
    legal = tuple(name for name, why in reasons.items() if why is None)
    if not legal:
        raise PolicyError(_illegal_for_all(spell_key(key), policy, reasons))
    return policy, legal


def _illegal_for_all(key: str, policy: CastPolicy | torch.dtype, reasons: Mapping[str, str | None]) -> str:
    overloads: dict[str | None, str] = {}  # one for each reason
    for name, why in reasons.items():
        overloads.setdefault(why, name)
    text = "; ".join(f"{why} ({name})" for why, name in overloads.items())
    legal = {policy for name in reasons for policy in legal_policies(name)}
    for_some = legal_text(policy for policy in CastPolicy if policy in legal).replace(" Legal:", " Legal for some:")
    return f"none of the {len(reasons)} overloads of {key!r} can use {spell_policy(policy)!r}: {text}.{for_some}"


def parse_policy(value: object, op: str = "") -> CastPolicy | torch.dtype:
    """Returns the policy of a user's value: a `CastPolicy`, a floating dtype, or a name, such as "lower", of either."""
    # "fp16" and "fp32" are names of policies; "fp16" is `lower_precision_fp`. `op` starts the error text.
    where = f"{op}: " if op else ""
    if isinstance(value, CastPolicy):
        return value
    if isinstance(value, torch.dtype):
        why = why_not_cast(value)
        if why is None:
            return value
        remedy = " For other ops, scale the tensors and call an op that takes scales, such as F.scaled_mm."
        raise PolicyError(f"{where}{why}. {_LEGAL_VALUES}{remedy if value.is_floating_point else ''}")
    if not isinstance(value, str):
        got = shown(value)
        raise PolicyError(f"{where}a policy is a str, a CastPolicy or a torch.dtype, got {got}. {_LEGAL_VALUES}")
    try:
        return CastPolicy(value)
    except ValueError:
        pass
    dtype = dtype_of_name(value)
    if dtype is not None:
        return parse_policy(dtype, op)
    if value.lower().startswith(_FLOAT8):
        why = next((text for word, text in _OTHER_SCALES.items() if word in value.lower()), "")
        raise PolicyError(f"{where}no cast policy is called {value!r}{why}. {_LEGAL_FLOAT8}")
    if value.lower() in _NO_POLICY:
        raise PolicyError(
            f"{where}no cast policy is called {value!r}. 'fallthrough' leaves the op to the dtypes of its inputs; "
            f"'keep' runs it with autocast off. {_LEGAL_VALUES}"
        )
    dtype = dtype_of_name(close_dtype(value))
    if dtype is not None and not dtype.is_floating_point:
        return parse_policy(dtype, op)
    close = (f" Closest: {str(dtype).removeprefix('torch.')}." if dtype is not None else "") or did_you_mean(
        value.lower(), _NAMES
    ).replace("fp16", "fp16 (the region's dtype)")
    raise PolicyError(f"{where}no cast policy is called {value!r}.{close} {_LEGAL_VALUES}")


def advice_for(value: object) -> str:
    """Returns what to write, for the policy of an op or a dtype in the place of a whole policy; "" for other values."""
    try:
        policy = parse_policy(value)
    except PolicyError:
        return ""
    shown = repr(value) if isinstance(value, str) else str(policy)
    of_region = f" The dtype of a region is my_autocast(dtype={shown})." if isinstance(policy, torch.dtype) else ""
    of_region = " For every op, write 'fp32'." if policy in (torch.float32, CastPolicy.fp32) else of_region
    means = ", and means the region's dtype" if value == "fp16" else ""
    op = "'linear'" if policy in FLOAT8_POLICIES else "op"
    return f" {shown} is for single ops{means}: overrides={{{op}: {shown}}}.{of_region}"


def check_device_types(device_type: object) -> tuple[str, ...]:
    """Returns the device types that a user names: one, a sequence of them, or None for all."""
    names = DEVICE_TYPES if device_type is None else (device_type,) if isinstance(device_type, str) else device_type
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise DeviceTypeError(
            f"device_type is a device type, a sequence of them or None, got {shown(device_type)}.{LEGAL_DEVICES}"
        )
    for name in names:
        if name not in DEVICE_TYPES:
            raise UnsupportedDeviceError(f"a policy has no device type {name!r}.{LEGAL_DEVICES}")
    if len(set(names)) < len(names):
        raise DeviceTypeError(f"device_type {list(names)!r} contains a duplicate. Name each device type once.")
    return tuple(names)
