"""`Policy.safe_modules`: the classes of a model whose parameters DeepSpeed may communicate in lower precision.

DeepSpeed rounds the parameters of the classes in `torch_autocast.lower_precision_safe_modules` to the section's dtype
when it gathers them (ZeRO stage 3), and their gradients when it reduces them (all stages). If the op that takes a
parameter rounds it to the same dtype anyway, gathering it rounded changes no result. The biases of `nn.Linear` are an
exception under stage 3, whose own `linear` adds them in float32 to a product of three or more dimensions; DeepSpeed
cannot select weights without biases.

Source: deepspeed/runtime/torch_autocast.py, init_autocast_params, which compares `module.__class__` and sets the
attribute `comm_dtype` of `module.parameters(recurse=False)` (DeepSpeed 0.19).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

from torch_promote.errors import DeviceTypeError, DtypeError, PolicyError
from torch_promote.policy.dtype_names import parse_dtype
from torch_promote.policy.op_table import FLOAT8_POLICIES, CastPolicy, spell_policy
from torch_promote.policy.overrides import LEGAL_DEVICES, check_device_types
from torch_promote.policy.policy import Policy
from torch_promote.regions.module_forward import ModulePolicy, PolicyForward, policy_of
from torch_promote.regions.module_policies import in_tables

__all__ = ["safe_modules"]


_NORMS = {
    "batchnorm.BatchNorm1d": "batch_norm",
    "batchnorm.BatchNorm2d": "batch_norm",
    "batchnorm.BatchNorm3d": "batch_norm",
    "instancenorm.InstanceNorm1d": "instance_norm",
    "instancenorm.InstanceNorm2d": "instance_norm",
    "instancenorm.InstanceNorm3d": "instance_norm",
    "normalization.GroupNorm": "group_norm",
    "normalization.LayerNorm": "layer_norm",
    "normalization.RMSNorm": "rms_norm",
}
#: Classes by name, and the overloads to which their forward passes their parameters, with any options. Under stage 3,
#: DeepSpeed replaces `linear` by a function that calls addmm and matmul. Recurrent modules are not here, because the
#: ops that they call depend on the backend.
_OVERLOADS = {
    "torch.nn.modules.linear.Linear": ("linear", "addmm", "matmul"),
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear": ("linear", "addmm", "matmul"),  # called by the next
    "torch.nn.modules.activation.MultiheadAttention": ("linear", "addmm", "matmul"),
    "torch.nn.modules.linear.Bilinear": ("bilinear",),
    "torch.nn.modules.conv.Conv1d": ("conv1d",),
    "torch.nn.modules.conv.Conv2d": ("conv2d",),
    "torch.nn.modules.conv.Conv3d": ("conv3d",),
    "torch.nn.modules.conv.ConvTranspose1d": ("conv_transpose1d",),
    "torch.nn.modules.conv.ConvTranspose2d": ("conv_transpose2d.input",),
    "torch.nn.modules.conv.ConvTranspose3d": ("conv_transpose3d.input",),
    "torch.nn.modules.sparse.Embedding": ("embedding",),
    "torch.nn.modules.sparse.EmbeddingBag": ("embedding_bag", "embedding_bag.padding_idx"),
    "torch.nn.modules.activation.PReLU": ("prelu",),
    "transformers.pytorch_utils.Conv1D": ("addmm",),
    **{f"torch.nn.modules.{name}": (op,) for name, op in _NORMS.items()},
}
#: The parameters that reach those ops. Reparametrized modules have others, which other ops read.
_PARAMETERS = {"weight", "bias", *(f"{one}_proj_weight" for one in ("q", "k", "v", "in")), "in_proj_bias"}
#: The methods of those classes that decide about the ops.
_METHODS = ("forward", "_conv_forward")


def safe_modules(policy: Policy, model: nn.Module, device_type: str, dtype: torch.dtype | str) -> list[str]:
    """`Policy.safe_modules`."""
    if not isinstance(device_type, str):
        raise DeviceTypeError(f"safe_modules takes one device type, got {device_type!r}.{LEGAL_DEVICES}")
    check_device_types(device_type)
    dtype = parse_dtype(dtype)
    if dtype not in (torch.bfloat16, torch.float16):
        raise DtypeError(
            f"dtype is that of DeepSpeed's section torch_autocast, got {dtype!r}. Legal: torch.bfloat16, torch.float16."
        )
    lower = (CastPolicy.lower_precision_fp, *FLOAT8_POLICIES, dtype)
    modules = [
        (name, module, _why_not(module, effective, device_type, lower))
        for name, module, effective in _walk("", model, policy, in_tables(policy, model))
    ]
    #: The names of the modules for which a parameter may not be rounded, and why.
    against: dict[nn.Parameter, tuple[str, str]] = {}
    for name, module, why in modules:
        if why is not None:
            for parameter in module.parameters(recurse=False):
                against.setdefault(parameter, (name, why))
    safe: dict[type[nn.Module], str] = {}
    unsafe: dict[type[nn.Module], tuple[str, str]] = {}
    for name, module, why in modules:
        parameters = list(module.parameters(recurse=False))
        other = next((against[parameter] for parameter in parameters if parameter in against), None)
        if other is not None:
            reason = why or f"it shares a parameter with {other[0]!r}, where {other[1]}"
            unsafe.setdefault(type(module), (name, reason))
        elif parameters:
            safe.setdefault(type(module), name)
    for kind, name in safe.items():
        if kind in unsafe:
            unlike, reason = unsafe[kind]
            raise PolicyError(
                f"DeepSpeed selects modules by class, and cannot select {name!r} without {unlike!r}: both are "
                f"{_name(kind)}, but {reason}. Give {unlike!r} a class of its own at the top of your module, class "
                f"Own{kind.__name__}({kind.__name__}): pass, with model.get_submodule({unlike!r}).__class__ = "
                f"Own{kind.__name__}, and call safe_modules again; or write the list by hand."
            )
    return sorted(
        _name(kind) for kind in safe if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    )


def _name(kind: type[nn.Module]) -> str:
    """The name by which DeepSpeed imports a class."""
    return f"{kind.__module__}.{kind.__name__}"


def _walk(
    name: str, module: nn.Module, outer: Policy | None, tables: dict[nn.Module, ModulePolicy]
) -> Iterator[tuple[str, nn.Module, Policy | None]]:
    """Yields each module under each of its names, and the policy in its forward; None if autocast is off there."""
    policy = outer
    for of_module in (tables.get(module), policy_of(module)):
        if of_module is None or policy is None:
            continue
        value = of_module.value
        if isinstance(value, dict):
            policy = policy.override(value)
        elif of_module.change is None:
            policy = None
        else:
            policy, tables = Policy.of(value), {}
    yield name, module, policy
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _walk(f"{name}.{child_name}".lstrip("."), child, policy, tables)


def _why_not(module: nn.Module, policy: Policy | None, device_type: str, lower: tuple[object, ...]) -> str | None:
    """Why the parameters of a module itself may not be rounded; None if they may."""
    if policy is None:
        return "autocast is off there"
    known = next((kind for kind in type(module).__mro__ if _name(kind) in _OVERLOADS), None)
    forward = vars(module).get("forward")
    is_its_own = forward is None or (isinstance(forward, PolicyForward) and forward.inner is None)
    if (
        known is None
        or not is_its_own
        or any(getattr(type(module), name, None) is not getattr(known, name, None) for name in _METHODS)
    ):
        return "its forward may do anything with its parameters"
    others = {name for name, _ in module.named_parameters(recurse=False)} - _PARAMETERS
    if others:
        return f"other ops read its parameter {min(others)!r}"
    for name in _overloads(known, module, policy, device_type):
        value = _lookup(policy, name, device_type)
        if value not in lower:
            return f"{name} has the policy {spell_policy(value)} there" if value else f"{name} casts nothing there"
    return None


def _overloads(known: type, module: nn.Module, policy: Policy, device_type: str) -> tuple[str, ...]:
    overloads = _OVERLOADS[_name(known)]
    if not isinstance(module.__dict__.get("padding"), str) or module.padding_mode != "zeros":
        return overloads
    # padding="same" is another overload. CUDA has no policy for it, and casts in the op that it calls.
    padding = f"{overloads[0]}.padding"
    return (padding,) if _lookup(policy, padding, device_type) is not CastPolicy.fallthrough else ("_convolution",)


def _lookup(policy: Policy, name: str, device_type: str) -> CastPolicy | torch.dtype | None:
    return policy.lookup(f"aten::{name}" if "." in name else f"aten::{name}.default", device_type)
