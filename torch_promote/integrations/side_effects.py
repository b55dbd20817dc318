"""What importing or using this package changes outside of it: in PyTorch, in Python and in the process.

`torch-promote info` prints the list, and docs describe it. Each entry can tell whether its change is in force now.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer
from torch.utils import _pytree

from torch_promote import _C
from torch_promote.dispatch_keys import AUTOCAST_KEY
from torch_promote.integrations.after_import import waiting_for
from torch_promote.policy.op_table import rows_by_name
from torch_promote.policy.policy import Policy

__all__ = ["NEVER_UNDONE", "SIDE_EFFECTS", "SideEffect", "side_effects_in_force"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: `undone` of a change that lasts.
NEVER_UNDONE = "Not until the process ends."


@dataclass(frozen=True)
class SideEffect:
    """A change outside of this package.

    Attributes:
        place: What is changed.
        what: The change, in a sentence.
        when: When it happens.
        why: What would go wrong without it.
        undone: How or when it is undone.
        on_import: Whether `import torch_promote` alone makes the change.
        check: Returns whether the change is in force.
    """

    place: str
    what: str
    when: str
    why: str
    undone: str
    on_import: bool
    check: Callable[[], bool]

    @property
    def in_force(self) -> bool:
        """Whether the change is in force now."""
        return self.check()

    def to_dict(self) -> dict[str, Any]:
        """Returns the entry as values that JSON has."""
        names = ("place", "what", "when", "why", "undone", "on_import", "in_force")
        return {name: getattr(self, name) for name in names}


def side_effects_in_force() -> Mapping[str, bool]:
    """Returns whether each change is in force now, by its place.

    Example:
        >>> side_effects_in_force()["torch.optim.Optimizer"]
        True
    """
    return {effect.place: effect.in_force for effect in SIDE_EFFECTS}


# --- checks


def _is_ours(function: Any) -> bool:
    """Whether a function was defined by this package."""
    code = getattr(function, "__code__", None)
    return code is not None and os.path.abspath(code.co_filename).startswith(_PACKAGE)


def _hooks(registered: Mapping[Any, Any]) -> list[Any]:
    """Returns those of registered hooks that are ours."""
    return [hook for hook in registered.values() if _is_ours(hook)]


def _module(name: str) -> Any:
    """Returns a module that somebody has imported, or None."""
    return sys.modules.get(name)


def _attribute(module: str, path: str) -> Any:
    """Returns an attribute of a module without importing it, or None."""
    found = _module(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _has_kernel(op: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))


def _has_other_ops() -> bool:
    """Whether an op has our kernel that has none after the import."""
    registered = set(torch._C._dispatch_get_registrations_for_dispatch_key(AUTOCAST_KEY))
    return not registered <= {"aten::linalg_matrix_exp", *rows_by_name()}


def _falls_through() -> bool:
    number = torch._C._dispatch_key_parse(AUTOCAST_KEY)
    return number in torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS


def _keeps_policies() -> bool:
    frame = getattr(torch.utils.checkpoint, "_CheckpointFrame", None)
    descriptor = vars(frame).get("recompute_fn") if frame is not None else None
    return type(descriptor).__module__.startswith("torch_promote.")


def _knows_regions() -> bool:
    builder = _attribute("torch._dynamo.variables.builder", "VariableBuilder")
    kinds = () if builder is None else builder._type_dispatch_impl(False)
    return any(kind.__module__.startswith("torch_promote.") for kind in kinds)


def _replaces_forwards() -> bool:
    return _is_ours(torch.fx.Tracer.trace)


#: The changes, those of the import first.
SIDE_EFFECTS: tuple[SideEffect, ...] = (
    SideEffect(
        f"dispatcher, key {AUTOCAST_KEY}",
        "Registers a kernel for each op of the op table, and for ops that copy data.",
        "At import.",
        "They make the casts. The key is off outside of regions, where they never run.",
        NEVER_UNDONE,
        True,
        lambda: _has_kernel("aten::mm", AUTOCAST_KEY),
    ),
    SideEffect(
        "higher-order operators",
        f"Makes cond, flex_attention and the others fall through on {AUTOCAST_KEY}, also those that are defined later.",
        "At import. crosscheck, trace and find_nonfinite add the key TESTING_ONLY_GenericMode.",
        "PyTorch raises for a key that such an operator does not know.",
        NEVER_UNDONE,
        True,
        _falls_through,
    ),
    SideEffect(
        "torch.utils._pytree",
        "Registers Policy as a constant.",
        "At import.",
        "Without this, torch.compile would not take a policy as an argument of a compiled function.",
        NEVER_UNDONE,
        True,
        lambda: Policy in _pytree.SUPPORTED_NODES,
    ),
    SideEffect(
        "torch.optim.Optimizer",
        "Adds a hook that runs after each step of an optimizer.",
        "At import.",
        "Fused optimizers write weights without increasing their versions; the hook drops the weights' casts.",
        NEVER_UNDONE,
        True,
        lambda: bool(_hooks(optimizer._global_optimizer_post_hooks)),
    ),
    SideEffect(
        "torch.clear_autocast_cache",
        "Ends our casts too. It takes 0.2 us longer; torch.autocast calls it when its outermost region ends.",
        "At import.",
        "Without this, casts of weights would live longer than under PyTorch's own autocast.",
        NEVER_UNDONE,
        True,
        lambda: _is_ours(torch.clear_autocast_cache),
    ),
    SideEffect(
        "sys.meta_path",
        "Adds finders that wait for torch._dynamo, AOTAutograd, FSDP2 and torch.distributed, unless they are there.",
        "At import.",
        "The changes of these modules (below) are made when somebody else imports them, so that they cost nothing.",
        "The import of its module: a finder then removes itself.",
        True,
        lambda: bool(waiting_for()),
    ),
    SideEffect(
        "fork",
        "Adds os.register_at_fork and pthread_atfork handlers.",
        "At import.",
        "Without this, a process that is forked while another thread holds a lock of this package would wait forever.",
        NEVER_UNDONE,
        True,
        lambda: True,
    ),
    SideEffect(
        "entry point torch_promote of the group torch.backends",
        "PyTorch imports the module torch_promote_autoload, which returns if TORCH_PROMOTE_AUTOCAST is unset.",
        "At the end of `import torch` in an environment in which the package is installed.",
        "TORCH_PROMOTE_AUTOCAST=1 installs the package in programs that you do not edit.",
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0, or uninstall the package.",
        False,
        lambda: "torch_promote_autoload" in sys.modules,
    ),
    SideEffect(
        "entry point torch_promote_pytest of the group pytest11",
        "pytest imports the module torch_promote_pytest, which declares the option --torch-promote-crosscheck.",
        "When pytest starts in an environment in which the package is installed.",
        "pytest knows only the options that are declared when it starts.",
        "`pytest -p no:torch_promote_pytest`.",
        False,
        lambda: "torch_promote_pytest" in sys.modules,
    ),
    SideEffect(
        "torch._dynamo",
        "Registers my_autocast, promotion and the functions that enter and leave regions in graphs.",
        "When torch._dynamo is imported.",
        "Without this, regions in compiled functions would break the graph.",
        NEVER_UNDONE,
        False,
        _knows_regions,
    ),
    SideEffect(
        "torch._dynamo TorchCtxManagerClassVariable.call_function",
        "Traces regions of stock_autocast as PyTorch's.",
        "After the first install or stock_autocast, once torch._dynamo is imported.",
        "Without this, Dynamo would take them for regions that are ours.",
        NEVER_UNDONE,
        False,
        lambda: _is_ours(_attribute("torch._dynamo.variables.torch", "TorchCtxManagerClassVariable.call_function")),
    ),
    SideEffect(
        "torch._functorch AOTAutogradCacheDetails.__init__",
        "Adds the policy in force to the keys of AOTAutograd's cache on disk, if it is not PyTorch's.",
        "When torch.compile first uses AOTAutograd.",
        "Without this, a process would load code that another one compiled under another policy.",
        NEVER_UNDONE,
        False,
        lambda: _is_ours(
            _attribute("torch._functorch._aot_autograd.autograd_cache", "AOTAutogradCacheDetails.__init__")
        ),
    ),
    SideEffect(
        "torch.autograd._unsafe_preserve_version_counter",
        "Makes its end report the tensors that were written.",
        "When FSDP2 is imported, or in the first region with cache='all' or 'persistent'.",
        "FSDP2 and DDP write weights under it, and without this, the cache would return casts of old weights.",
        NEVER_UNDONE,
        False,
        lambda: _is_ours(torch.autograd.grad_mode._unsafe_preserve_version_counter.__exit__),
    ),
    SideEffect(
        "torch.distributed _update_default_pg",
        "Notes when the default process group is initialised.",
        "At import, if PyTorch has imported torch.distributed, as it does where that is available; otherwise when that "
        "is imported.",
        "The ranks of a job compare their policies in their first region; see set_check_ranks.",
        NEVER_UNDONE,
        torch.distributed.is_available(),
        lambda: _is_ours(_attribute("torch.distributed.distributed_c10d", "_update_default_pg")),
    ),
    SideEffect(
        "DistributedDataParallel.__init__, FSDPState.init",
        "Notes the models that are wrapped.",
        "When a process group of several ranks is initialised.",
        "The ranks of a job compare the policies of their modules.",
        NEVER_UNDONE,
        False,
        lambda: _is_ours(DistributedDataParallel.__init__),
    ),
    SideEffect(
        "asyncio.Handle._run",
        "Suspends a task's open regions while other tasks run.",
        "When a region is entered while an event loop runs.",
        "Without this, a region that a task holds open across an await would apply to other tasks. Python "
        "has no hook for this.",
        NEVER_UNDONE,
        False,
        lambda: _is_ours(asyncio.Handle._run),  # type: ignore[attr-defined]
    ),
    SideEffect(
        "torch.utils.checkpoint",
        "Stores the policy and the cache mode of the forward with the function to recompute.",
        "Before the first region with a policy, rule or cache mode that is not PyTorch's.",
        "Without this, the recomputation in the backward would run under another policy than the forward.",
        NEVER_UNDONE,
        False,
        _keeps_policies,
    ),
    SideEffect(
        "dispatcher, ops outside the table",
        f"Registers a kernel on {AUTOCAST_KEY} for an op.",
        "When you first give the op a policy, or use a promotion rule (then for each op that promotes).",
        "PyTorch calls this package only for ops with such a kernel. Without a policy, the kernel falls through.",
        NEVER_UNDONE,
        False,
        _has_other_ops,
    ),
    SideEffect(
        "torch.cuda.CUDAGraph",
        "Wraps capture_begin and replay.",
        "capture_begin: when a cast is first kept during a capture. replay: in the first region with cache='all' or "
        "'persistent'.",
        "A captured graph holds the addresses of casts, and a replay writes weights without increasing their versions.",
        NEVER_UNDONE,
        False,
        lambda: any(_is_ours(getattr(torch.cuda.CUDAGraph, name)) for name in ("capture_begin", "replay")),
    ),
    SideEffect(
        "torch.optim.Optimizer, more hooks",
        "Adds another hook after each step of an optimizer; compare and tune add one before each step, too.",
        "In blocks of trace and find_nonfinite, and during compare and tune.",
        "They count steps, and restore the state of optimizers.",
        "The end of the block or the function.",
        False,
        lambda: (
            bool(_hooks(optimizer._global_optimizer_pre_hooks))
            or len(_hooks(optimizer._global_optimizer_post_hooks)) > 1
        ),
    ),
    SideEffect(
        "torch.autocast.__enter__, __exit__",
        "Runs regions of torch.autocast as regions of this package.",
        "When you call install(), set TORCH_PROMOTE_AUTOCAST=1 or use `torch-promote run`.",
        "Regions that a framework opens have your policy.",
        "uninstall(). __exit__ stays until the last such region has ended.",
        False,
        lambda: _is_ours(torch.amp.autocast_mode.autocast.__enter__),
    ),
    SideEffect(
        "nn.Module.forward of single modules",
        "Sets an instance attribute forward and a forward pre-hook.",
        "When you call set_module_policy, Policy.apply_to or my_autocast(model=...).",
        "It runs the forward of the class in a nested region.",
        "remove_module_policy, or the handle's remove().",
        False,
        _replaces_forwards,
    ),
    SideEffect(
        "torch.fx.Tracer.trace, nn.Module._replicate_for_data_parallel, torch.ao.quantization swap_module",
        "Wraps them.",
        "Before the first policy of a module.",
        "Without this, they would copy or trace a module without its policy, or with that of another module.",
        NEVER_UNDONE,
        False,
        _replaces_forwards,
    ),
    SideEffect(
        "dispatcher, key TESTING_ONLY_GenericMode",
        "Registers a fallback that shows each op call to an observer.",
        "At the first crosscheck, trace, find_nonfinite, compare or tune.",
        "They see each op with its arguments. The key is off outside of their blocks.",
        NEVER_UNDONE,
        False,
        lambda: bool(torch._C._dispatch_has_backend_fallback(torch._C._dispatch_key_parse(_C.dispatch_observer_key()))),
    ),
)
