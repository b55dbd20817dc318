"""Runs a step under policies, each time from the same state, and measures the distance of its results."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_promote import _C
from torch_promote.errors import OptionError, RegionError, StepError, TuningError, shown
from torch_promote.numerics.step_state import StepState
from torch_promote.policy.op_table import DEVICE_TYPES
from torch_promote.policy.policy import Policy
from torch_promote.regions.defaults import default_policy, set_default_policy
from torch_promote.regions.installation import install, installed
from torch_promote.regions.module_forward import without_module_policies

#: Runs change global state: the default policy, the installation and the random number generators.
_one_at_a_time = threading.Lock()

#: The results of a run: for each batch, named tensors.
Results = list[dict[str, torch.Tensor]]


class StepRuns:
    """Runs a step under policies. A context manager that restores the state at its end."""

    # A run calls `step()`, or `step(i)` with the number of the batch, `batches` times. `restore` is state besides the
    # model's. `dtype` is that of regions without one; None leaves it unchanged.

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        *,
        batches: int = 1,
        restore: Iterable[Any] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        if not callable(step):
            got = f"a {type(step).__name__}. Pass the function itself" if isinstance(step, torch.Tensor) else repr(step)
            raise OptionError(f"step must be a function that runs a step and returns its loss, got {got}.")
        if not isinstance(model, nn.Module):
            raise OptionError(f"model must be the nn.Module that the step runs, got {shown(model)}.")
        if not isinstance(batches, int) or isinstance(batches, bool) or batches < 1:
            raise OptionError(
                f"batches (the number of times a run calls step) must be 1 or more, got {shown(batches)}."
            )
        if dtype is not None and dtype not in (torch.float16, torch.bfloat16):
            raise OptionError(f"dtype must be torch.float16, torch.bfloat16 or None, got {shown(dtype)}.")
        if not isinstance(restore, Iterable) or isinstance(restore, torch.Tensor):
            raise OptionError(
                f"restore must be a tuple or list of objects that the step changes, got {type(restore).__name__}. For "
                f"one object, write restore=(...,) with a comma."
            )
        self.step = step
        self.model = model
        self.batches = batches
        self.takes_number: bool = _takes_number(step)
        self.count: int = 0  # how many runs have begun; each has called the step at most `batches` times
        self.on_step: Callable[[int], None] | None = None  # gets the number of calls of the step so far, after each
        self._steps = 0
        self._restore = tuple(restore)
        self._dtype = dtype
        self.state: StepState  # before the step, in the block
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> StepRuns:
        if _C.depth() or any(map(torch.is_autocast_enabled, DEVICE_TYPES)):
            raise RegionError(
                "the runs of a step cannot begin inside of an open region: the step's regions would follow that "
                "region's policy. Open the regions in the step, and call compare() or tune() outside of them."
            )
        if not _one_at_a_time.acquire(blocking=False):
            raise StepError(
                "another compare() or tune() is running, and each run changes state of the whole process, such as the "
                "default policy. Wait for its end: compare() and tune() cannot be nested."
            )
        with contextlib.ExitStack() as stack:
            stack.callback(_one_at_a_time.release)
            self.state = StepState(self.model, self._restore, self.step)
            stack.callback(self.state.watch_optimizers().remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        with self._stack:
            self.state.restore()
            if kind is None:
                self.state.check()
            del self.state

    def run(
        self,
        policy: Policy,
        *,
        around: contextlib.AbstractContextManager[Any] | None = None,  # a block around the calls of the step
        # Gets the number of the batch and the step's result, before the result is copied, inside of `around`.
        on_result: Callable[[int, Any], None] | None = None,
        held_out: int = 0,
        eager: bool = True,  # whether compiled functions run uncompiled
    ) -> Results:
        """Runs the step for each batch, restores the state, and returns for each batch the result as named tensors."""
        # `held_out` 0: the first batches; 1, 2, ...: those with the next numbers, or the same with other random ones.
        # StepError: it returned nothing to compare, left a region open, or reached the end of an iterator.
        self.count += 1
        first = self.batches * held_out
        results: Results = []
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(use_policy(policy, self.model, self._dtype))
                # If the module has not been imported, nothing has been compiled. Importing it takes seconds.
                if eager and "torch._dynamo" in sys.modules:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                if held_out and not self.takes_number:
                    self.state.use_other_random_numbers(held_out)
                if around is not None:
                    stack.enter_context(around)
                for number in range(first, first + self.batches):
                    result = self._call(number)
                    if on_result is not None:
                        on_result(number, result)
                    results.append(read_result(result))
                    del result
                    self._steps += 1
                    if self.on_step is not None:
                        self.on_step(self._steps)
        finally:
            self.state.restore()
        return results

    def _call(self, number: int) -> Any:
        depth = _C.depth()
        try:
            result = self.step(number) if self.takes_number else self.step()
        except StopIteration as error:
            raise StepError(
                "step() has reached the end of an iterator, which does not restart for the next run. Take the batches "
                "from a list, and let step(i) use batch i."
            ) from error
        if _C.depth() != depth:
            raise StepError("step() has left a region open. Open regions with `with`.")
        return result


def _takes_number(step: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [
        one for one in parameters if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if len(needed) > 1 or any(one.kind is one.KEYWORD_ONLY for one in needed):
        raise OptionError(
            f"step is called as step(), or as step(i) with the number of the batch, but this one needs "
            f"{', '.join(one.name for one in needed)}. Bind its arguments, with functools.partial or a lambda."
        )
    return bool(needed)


# --- ranks


class Ranks:
    """The ranks of the default process group, which agree on each verdict. Without one, there is one rank."""

    def __init__(self) -> None:
        active = dist.is_available() and dist.is_initialized()
        self.count: int = dist.get_world_size() if active else 1
        self.rank: int = dist.get_rank() if active else 0

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def all(self, here: bool) -> bool:
        """Whether a condition is true on all ranks."""
        return all(self.gather(here))

    def raise_together(self, error: Exception | None) -> None:
        """Raises this rank's error, or an error about another rank's, so that no rank waits for one that has raised."""
        texts = self.gather("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        if raised := [f"rank {rank} raised {text}" for rank, text in enumerate(texts) if text]:
            raise TuningError(raised[0])

    def same_order(self, names: list[str]) -> list[str]:
        """Returns rank 0's order of names."""
        orders = self.gather(names)
        for rank, order in enumerate(orders):
            if differ := sorted(set(order) ^ set(orders[0])):
                raise TuningError(
                    f"ranks 0 and {rank} run different ops in a lower dtype: {', '.join(differ[:5])} on only one of "
                    f"them. All ranks must run the same model to be tuned together."
                )
        return list(orders[0])


# --- policies


def current_policy() -> Policy:
    """Returns the policy of regions without a `policy`: that of `install` if it has one, or the default."""
    present = installed()
    policy = default_policy() or Policy.stock()
    if present is None:
        return policy
    if present.policy is not None:
        policy = Policy.of(present.policy)
    return policy.override(present.overrides) if present.overrides else policy


@contextlib.contextmanager
def use_policy(policy: Policy, model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Puts a policy in force in all regions that a block opens, unless they have a `policy`. Calls `install`."""
    # Under "off", module policies of the model are suspended, too. `dtype` is that of regions without one.
    present = installed()
    with contextlib.ExitStack() as stack:
        if policy.modules:
            stack.enter_context(policy.apply_to(model))
        if policy == Policy.named("off"):
            stack.enter_context(without_module_policies(model))
        stack.callback(set_default_policy, set_default_policy(policy))
        stack.enter_context(install(policy=policy, cache=None if present is None else present.cache))
        if dtype is not None:
            for device_type in DEVICE_TYPES:
                stack.callback(torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type))
                torch.set_autocast_dtype(device_type, dtype)
        yield


# --- results


def read_result(result: Any) -> dict[str, torch.Tensor]:
    """Converts the result of a step to detached copies of named tensors, as `named_tensors` names them."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(result).items()}


def named_tensors(result: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors of a result: a single one is the "loss" or "output", and names inside are joined by dots."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors("", result):
        if name in found:
            raise StepError(f"step() returned two results with the name {name!r}. Give them different names.")
        found[name] = tensor
    if not found:
        raise StepError(
            f"step() returned {type(result).__name__}, in which there is no tensor or number to compare. Return the "
            f"loss, the outputs, or a dict of metrics."
        )
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        yield name or ("loss" if whole.numel() == 1 else "output"), whole
    elif isinstance(value, bool | int | float):
        yield name or "loss", torch.tensor(float(value), dtype=torch.float64)
    elif type(value).__module__ == "numpy":
        with contextlib.suppress(TypeError, ValueError):  # text, or objects
            yield from _tensors(name, torch.as_tensor(value))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(f"{name}.{key}" if name else str(key), one)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(name, {one.name: getattr(value, one.name) for one in dataclasses.fields(value)})
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", range(len(value)))
        yield from _tensors(name, dict(zip(fields, value, strict=True)))


def distance(candidate: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns the distance of a result from the reference's of the same shape, relative to the reference."""
    # |a - b| / |b| of one number, otherwise the relative L2 norm, in float64; absolute if the reference is zero.
    # Infinite if a non-finite value is in only one of the two, or differs.
    if candidate.shape != reference.shape:
        raise StepError(
            f"step() returned a tensor of shape {list(candidate.shape)}, but of shape {list(reference.shape)} under "
            f"the reference. Only results of the same shape can be compared."
        )
    ours, theirs = _wide(candidate), _wide(reference)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if bool(same.all()):
        return 0.0
    finite = theirs[theirs.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    scale = largest if 0 < largest < math.inf else 1.0  # the square of a large number is not finite
    difference = float(torch.linalg.vector_norm(ours[~same] / scale - theirs[~same] / scale))
    size = float(torch.linalg.vector_norm(finite / scale))
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else difference


def norm_of(tensor: torch.Tensor) -> float:
    """Returns the L2 norm of a result."""
    return float(torch.linalg.vector_norm(_wide(tensor)))


def not_finite(results: Results) -> list[str]:
    """The names of results without a finite number. Single ones may be padded with NaN, or masked with -inf."""
    pairs = [(name, one) for batch in results for name, one in batch.items() if one.numel()]
    return list(dict.fromkeys(name for name, one in pairs if not bool(_wide(one).isfinite().any())))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    dense = dense.dequantize() if dense.is_quantized else dense
    return dense.to("cpu", torch.complex128 if dense.is_complex() else torch.float64).reshape(-1)


def distances(candidate: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Returns `distance` for each name. The names must be the same."""
    if candidate.keys() != reference.keys():
        only = sorted(candidate.keys() ^ reference.keys())
        raise StepError(f"step() returned other names than under the reference: only one side has {', '.join(only)}.")
    return {name: distance(candidate[name], reference[name]) for name in reference}


# --- progress


@contextlib.contextmanager
def show_progress(what: str, total: int, wanted: bool) -> Iterator[Callable[[int, str], None]]:
    """Shows a bar on stderr, if that is a terminal; yields what gets the number of runs so far and a remark."""
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, remark: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[remark]}", markup=False), console=Console(stderr=True)) as shown:
        task = shown.add_task(what, total=total, remark="")
        yield lambda done, remark: shown.update(task, total=max(total, done), completed=done, remark=remark)
