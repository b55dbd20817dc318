"""Policies for a whole program: the default policy of regions, and registered policies of custom ops.

They apply to regions that any thread enters afterwards. Open regions keep their policy. The regions of a coroutine or
generator are entered again at each of its steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Self

import torch

from torch_promote import _C
from torch_promote.errors import PolicyError, check_flag, explains_arguments
from torch_promote.extension import fork_safe_lock, register_change
from torch_promote.integrations import checkpoint
from torch_promote.integrations import compile as _compile
from torch_promote.policy.module_tables import module_finder
from torch_promote.policy.named_policies import replace_registered_ops
from torch_promote.policy.op_table import CastPolicy, DeviceTypes, OpPolicy, spell_policy
from torch_promote.policy.overrides import check_device_types, parse_overrides, show_key
from torch_promote.policy.policy import Policy, PolicyLike
from torch_promote.regions.autocast import number_of_applied, policy_change

#: The environment variables that name a policy, or the file of one, and the class of the model of its tables.
VARIABLE, MODEL = "TORCH_PROMOTE_POLICY", "TORCH_PROMOTE_MODEL"
#: What reports call it. The name of its file stands before it.
DEFAULT_POLICY = "the default policy"

_lock = fork_safe_lock()
_default: Policy | None = None
_default_tables = 0  # the number of the default policy's module tables
_default_file = ""  # the name of the file that it comes from
_registered: _Registered = {}


@explains_arguments
def set_default_policy(policy: PolicyLike | None) -> Policy | None:
    """Sets the policy of regions that have no `policy` argument and no region around them.

    The environment variable TORCH_PROMOTE_POLICY does the same when the package is imported.

    Args:
        policy: A `Policy`, the name of one, or the path of a policy file. None: PyTorch's own.

    Returns:
        The previous default; None for PyTorch's own.

    Raises:
        PolicyError: The policy does not exist, its file is invalid, or it has module tables and `apply_to` was not
            called. The default is then unchanged.

    Example:
        >>> from torch_promote import my_autocast
        >>> before = set_default_policy("cuda")
        >>> with my_autocast("cpu"):
        ...     torch.exp(torch.ones(2, dtype=torch.float16)).dtype
        torch.float32
        >>> set_default_policy(before)
        Policy.named('cuda')
    """
    global _default_file
    chosen = None if policy is None else Policy.of(policy)
    tables = 0 if chosen is None else number_of_applied(chosen)
    is_file = isinstance(policy, str | os.PathLike) and policy not in Policy.names()
    with _lock:
        before = _default
        _put(_registered, chosen, tables)
        _default_file = os.path.basename(os.fspath(policy)) if is_file else ""  # type: ignore[arg-type]
    return before


def default_policy() -> Policy | None:
    """Returns the policy set by `set_default_policy`; None for PyTorch's own.

    Example:
        >>> default_policy()
    """
    return _default


def source_of_default_policy() -> str:
    """Returns what reports call the default policy, with the name of its file if it comes from one."""
    return f"{_default_file}, {DEFAULT_POLICY}" if _default_file else DEFAULT_POLICY


def spell_default_policy() -> str:
    """Returns the default policy and where it comes from, in words; "" for PyTorch's own."""
    if _default is None:
        return ""
    asked = os.environ.get(VARIABLE, "")
    try:
        is_asked = bool(asked) and Policy.of(asked) == _default
    except PolicyError:
        is_asked = False
    return f"{_default!r}, from {f'{VARIABLE}={asked}' if is_asked else 'set_default_policy'}"


class RegisteredPolicy:
    """The handle that `register_policy` returns, which removes the policy again. Also a context manager that does so.

    Attributes:
        overloads: Full names of the overloads that have the policy.
        device_types: The device types on which they have it.
        policy: The policy. Where stock autocast has the same one, nothing is registered.
    """

    def __init__(self, overloads: Iterable[str], device_types: Iterable[str], policy: CastPolicy | torch.dtype) -> None:
        self.overloads: tuple[str, ...] = tuple(overloads)
        self.device_types: tuple[str, ...] = tuple(device_types)
        self.policy = policy

    def remove(self) -> None:
        """Removes the policy from each overload, unless another call has replaced it. Repeating it does nothing."""
        with _lock:
            kept = {place: given for place, given in _registered.items() if given[1] is not self}
            if len(kept) < len(_registered):
                _put(kept, _default, _default_tables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        policy = self.policy.value if isinstance(self.policy, CastPolicy) else str(self.policy)
        return f"<{policy} for {', '.join(self.overloads)} on {', '.join(self.device_types)}>"


@explains_arguments
def register_policy(
    op: object,
    policy: OpPolicy,
    *,
    device_type: DeviceTypes | None = None,
    replace: bool = False,
) -> RegisteredPolicy:
    """Gives an op, usually a custom one, a cast policy in every region, as part of what regions start from.

    `torch.library.register_autocast` casts to one dtype, which is fixed when you call it, and can be called once. This
    function takes any cast policy, follows the region's dtype, and can be changed and removed. A region's own
    `overrides` take precedence, and so does its `policy` where that differs from stock for the op. A kernel of
    `torch.library.register_autocast` for the same op stays in use wherever this policy does not apply.

    Args:
        op: The op, named as in `my_autocast(overrides=...)`.
        policy: The cast policy, or a floating dtype to run in.
        device_type: One of the device types of `my_autocast`, or a sequence of these. None: all.
        replace: Whether the policy replaces one that was registered for the op before.

    Returns:
        A handle, whose `remove()` takes the policy off again.

    Raises:
        PolicyError: The op or the policy does not exist, the policy is not legal for the op, stock autocast has the
            same policy for it, or the op has a registered policy and `replace` is False. Nothing is then changed.
        DeviceTypeError, UnsupportedDeviceError: A device type that has no autocast here.

    Example:
        >>> from torch_promote import my_autocast
        >>> @torch.library.custom_op("mylib::scaled", mutates_args=())
        ... def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        ...     return x * factor
        >>> handle = register_policy("mylib::scaled", "lower")
        >>> with my_autocast("cpu"):
        ...     scaled(torch.ones(2), 3.0).dtype
        torch.bfloat16
        >>> handle.remove()
    """
    devices, replace = check_device_types(device_type), check_flag("replace", replace)
    given = Policy.stock().override({op: policy}, devices)
    parsed = parse_overrides({op: policy})
    named = {(name, device) for name, _ in parsed for device in devices}
    handle = RegisteredPolicy([name for name, _ in parsed], devices, parsed[0][1])
    with _lock:
        if not replace and (taken := sorted(named & _registered.keys())):
            name, device = taken[0]
            known = spell_policy(_registered[name, device][0])
            raise PolicyError(
                f"{show_key(op)} with policy {policy!r}: {name} already has a registered policy on {device}, {known!r}."
                f" Pass replace=True to replace it, or call remove() of the handle that register_policy returned."
            )
        kept = {place: known for place, known in _registered.items() if place not in named}
        if not given.changes and len(kept) == len(_registered):
            raise PolicyError(
                f"{show_key(op)} with policy {policy!r}: this is what PyTorch's autocast does. Leave it out."
            )
        wanted = {**kept, **{(name, device): (value, handle) for name, device, value in given.changes}}
        _put(wanted, _default, _default_tables)
    return handle


def registered_policies() -> Mapping[tuple[str, str], CastPolicy | torch.dtype]:
    """Returns the policies set by `register_policy`, keyed by the overload's full name and the device type.

    Example:
        >>> with register_policy("relu", "fp32", device_type="cpu"):
        ...     registered_policies()
        {('aten::relu', 'cpu'): <CastPolicy.fp32: 'fp32'>}
    """
    with _lock:
        return {place: value for place, (value, _) in _registered.items()}


def use_environment() -> None:
    """Sets the default policy that the environment variable names; the models that run follow its tables."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    try:
        policy = Policy.of(asked)
        if policy.modules:
            module_finder().follow(policy, os.environ.get(MODEL, ""))
        set_default_policy(asked)
    except PolicyError as error:
        text = f"the environment variable {VARIABLE} is {asked!r}: {error} Correct it, or unset it."
        raise PolicyError(text) from None


_Registered = dict[tuple[str, str], tuple[CastPolicy | torch.dtype, RegisteredPolicy]]


def _put(registered: _Registered, default: Policy | None, tables: int) -> None:
    """Puts registered policies and a default, with the number of its tables, in force. An error changes nothing."""
    global _registered, _default, _default_tables
    changes = [(*place, value) for place, (value, _) in sorted(registered.items(), key=lambda item: item[0])]
    if changes:
        checkpoint.install()
    _C.set_defaults(register_change(changes), policy_change(default, None, tables))
    # Dynamo does not guard on the default policy, which graphs that open an outermost region were traced under.
    if _compile.graphs_open_regions():
        sys.modules["torch._dynamo"].reset()
    if registered is not _registered:
        replace_registered_ops(registered)
    _registered, _default, _default_tables = registered, default, tables
