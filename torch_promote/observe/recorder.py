"""The recorder of `trace(values=True)`: what calls read and wrote, what they computed, and where inf and NaN came from.

NOTE [ Which call wrote it ]
Only the calls that the program made are followed, not the calls inside of them. A call reads what the calls before it
wrote to the memory of its arguments. Memory that no recorded call has written is a `Source`, and so is memory that has
changed without one (its tensor has another version, or NumPy shares it and the values are others), because compiled
code or another library did it. So are the
parameters and buffers of the model when they are first read, even if recorded calls have initialized them: two runs are
compared from there. A call that returns its argument, such as `contiguous()`, does not write. It and views have the
values of what was written, if they have all its elements, and are not measured.

NOTE [ Which call made it ]
A call makes a NaN if nothing that it reads has one, and an infinite value if all that it reads is finite, unless the
program passed an infinite number, as `masked_fill(mask, -inf)` does. A NaN that a call makes of infinite values comes
from the call that made those. Views and uninitialized memory make nothing.

A loss is a tensor on which `backward()` is called without a gradient: autograd then makes a gradient of ones like it.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import platform
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from torch_promote import _C
from torch_promote.extension import fork_safe_lock
from torch_promote.observe.events import (
    COMPILED,
    COMPILED_FUNCTION,
    Call,
    Recording,
    Source,
    Step,
    TensorInfo,
    infos_of,
    records_of,
)
from torch_promote.observe.observer import OpenCall
from torch_promote.observe.ops import asks_for_infinity, facts_of, has_storage, tensors_in, unnoticed, written
from torch_promote.observe.places import RunningModules, innermost_line, is_ours
from torch_promote.observe.recording_file import RecordingFile
from torch_promote.observe.values import EMPTY, Row, Values, ValuesCollector, in_any_order

__all__ = ["Recorder"]

#: The maximum number of calls that count as writers of one tensor, each of a part of it.
_MOST_WRITERS = 16
#: After so many calls without an optimizer step, what is known is written, if that needs no synchronization.
_CALLS_TO_WRITE = 4096
#: Reentrant, because an op that a hook runs meanwhile comes back; and a child must not inherit it locked.
_lock = fork_safe_lock()
_GRADIENT_OF_LOSS = torch.autograd._make_grads.__code__
_Kind = Literal["parameter", "buffer"]


@dataclass(slots=True)
class _Memory:
    """What is known of a storage.

    Attributes:
        reference: A weak reference, which reserves the storage's address.
        written_by: The calls and sources whose values are in it, as in `Call.reads`.
        version: The version of its tensor at that time; -1 for an inference tensor, which has none.
        is_read: Whether it is a parameter or buffer that has been recorded as a source.
        is_compiled: Whether compiled code has written it.
        known: What is known of the tensor that the last of the calls has written.
    """

    reference: StorageWeakRef
    written_by: tuple[int, ...]
    version: int
    is_read: bool = False
    is_compiled: bool = False
    known: _Known | None = None


class _Known(NamedTuple):
    """What is known of a tensor, and so of views that have all of its elements.

    Attributes:
        place: Where it is in its storage, its number of elements, its dtype, and what a lazy view would change.
        is_contiguous: Whether it is contiguous, so that the values are in the order of the memory.
        values: Its values.
    """

    place: tuple[int, int, torch.dtype, bool, bool]
    is_contiguous: bool
    values: Values | Row

    def of_view(self, tensor: torch.Tensor) -> Values | Row | None:
        """What is known of a view; None if it has to be measured."""
        if not self.is_contiguous or self.place != _place_of(tensor):
            return None
        if tensor.is_contiguous():
            return self.values
        return in_any_order(self.values) if _is_dense(tensor) else None


def _is_changed(tensor: torch.Tensor, memory: _Memory) -> bool:
    """Whether a tensor on a CPU has other values than were written, because NumPy has written to its memory."""
    if memory.known is None or memory.is_read or tensor.untyped_storage().resizable():  # not if it is shared
        return False
    known = memory.known.of_view(tensor)
    return isinstance(known, Values) and _C.is_measurable(tensor) and known.digest != _C.digest(tensor)


def _place_of(tensor: torch.Tensor) -> tuple[int, int, torch.dtype, bool, bool]:
    return int(tensor.storage_offset()), tensor.numel(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has each element of a part of its storage once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(slots=True)
class _Open:
    """What is known of an open call of the program.

    Attributes:
        reads: What it reads.
        writes: The storages that it writes to, by its schema.
        inside: What the calls inside of it have written: storages, with the versions of their tensors.
        is_compiled: Whether compiled code makes it.
    """

    reads: tuple[tuple[int, ...], ...] = ()
    writes: frozenset[int] = field(default_factory=frozenset)
    inside: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    is_compiled: bool = False


class Recorder:
    """Records the values of a trace. It holds no tensors.

    Args:
        report: The report, of which it fills `sources`, `ends`, `nonfinite`, `environment`, and the values of `calls`.
        modules: Tracks which module runs.
        file: A file to write as well.
    """

    def __init__(self, report: Recording, modules: RunningModules, file: RecordingFile | None = None) -> None:
        self._report = report
        self._modules = modules
        self._file = file
        self._count = 0  # of calls, also those that the report does not store
        self._collector = ValuesCollector(self._deliver)
        self._keys = itertools.count(-1, -1)
        self._receivers: dict[int, Callable[[tuple[Values, ...]], None]] = {}  # by negative number
        self._waiting: dict[int, tuple[set[int], bool]] = {}  # by call: what it reads, and whether it asked for inf
        self._memory: dict[int, _Memory] = {}  # by storage
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], _Kind, str]] = {}  # of the model's tensors, by id
        self._named_at = -1  # the number of steps when they were looked up
        self._unnamed: dict[int, weakref.ref[torch.Tensor]] = {}  # parameters that were read before the model ran
        self._reads: dict[int, tuple[tuple[int, ...], ...]] = {}  # by call, until its values are delivered
        self._losses: deque[tuple[tuple[int, ...], int]] = deque()  # those not delivered: the writers, and the step
        self._new_losses: list[Values] = []  # since the last step
        self._steps: list[int] = []  # the number of calls at the end of each step
        #: For calls with inf or NaN: whether there is a NaN, and the call that made it; None for a mask.
        self._faults: dict[int, tuple[bool, int | None]] = {}
        self._rng: dict[str, str] | None = None  # when the step first drew random numbers
        report.environment = _environment()

    # --- calls

    def begun(self, call: OpenCall) -> _Open:
        """Called before a call: notes what a call of the program reads, of which some may be new sources."""
        if call.around is not None:
            mine: _Open = call.around.mine
            return mine
        facts = call.facts
        if self._rng is None and facts.is_random:  # by now, a program has set its seed
            self._rng = _generators()
        writes = written(facts.writes, call.args) if facts.writes else ()
        found = _Open(
            writes=frozenset([one.untyped_storage()._cdata for _, one in writes if has_storage(one)]),
            is_compiled=call.said_by == COMPILED,
        )
        tensors = tensors_in(call.args)
        if len(tensors) == len(call.inputs):  # otherwise, an argument is in a container that its record leaves out
            found.reads = tuple(
                self._read(tensor, info, place > 0 or not facts.overwrites, found)
                for place, (tensor, info) in enumerate(zip(tensors, call.inputs, strict=True))
            )
        return found

    def _read(self, tensor: torch.Tensor, info: TensorInfo, counts: bool, of: _Open) -> tuple[int, ...]:
        """Returns what is in a tensor's memory, for a call. `counts`: whether the call depends on what is in it."""
        if not has_storage(tensor):
            return ()
        storage = tensor.untyped_storage()
        known, version = self._memory.get(storage._cdata), _version_of(tensor)
        before: tuple[int, ...] = ()
        if known is not None and known.version == version and not _is_changed(tensor, known):
            before = known.written_by
            is_parameter = isinstance(tensor, nn.Parameter)
            if known.is_read or not (is_parameter or self._known_name(tensor) is not None):
                return before
            if is_parameter and (storage._cdata in of.writes or self._is_initializing()):
                return before
        if not counts:
            return ()
        source = -1 - len(self._report.sources)
        kind, name = self._name_of(tensor)
        self._report.sources.append(Source(kind, name, info, EMPTY, before))
        if kind == "parameter" and not name:
            self._unnamed[source] = weakref.ref(tensor)
        found = self._measure([tensor], lambda values: self._set_source(source, values=values[0]))
        if kind != "input" or not of.is_compiled:  # compiled code may write to it again, without a new version
            memory = _Memory(StorageWeakRef(storage), (source,), version, kind != "input")
            if not of.is_compiled:
                memory.known = _Known(_place_of(tensor), tensor.is_contiguous(), found[0])
            self._memory[storage._cdata] = memory
        return (source,)

    def _is_initializing(self) -> bool:
        """Whether code like that of torch.nn.init runs, which may read what it has written: without grad, no module."""
        return not torch.is_grad_enabled() and self._modules.innermost[0] is None

    def _set_source(self, source: int, **changes: Any) -> None:
        sources = self._report.sources
        sources[-1 - source] = dataclasses.replace(sources[-1 - source], **changes)

    def _name_of(self, tensor: torch.Tensor) -> tuple[Literal["parameter", "buffer", "input"], str]:
        """What a tensor is, and its path if it belongs to the model. The model is searched once a step at most."""
        if self._known_name(tensor) is None and self._named_at != len(self._steps):
            self._name_tensors()
        return self._known_name(tensor) or (("parameter" if isinstance(tensor, nn.Parameter) else "input"), "")

    def _known_name(self, tensor: torch.Tensor) -> tuple[_Kind, str] | None:
        known = self._names.get(id(tensor))  # perhaps of a tensor that has been destroyed
        return known[1:] if known is not None and known[0]() is tensor else None

    def _name_tensors(self) -> None:
        found: dict[int, tuple[weakref.ref[torch.Tensor], _Kind, str]] = {}
        kinds: tuple[tuple[_Kind, str], ...] = (("parameter", "_parameters"), ("buffer", "_buffers"))
        for module, path in self._modules.named():
            for kind, attribute in kinds:
                for name, tensor in getattr(module, attribute).items():
                    if tensor is not None:
                        full = (f"{path}.{name}" if path else name).replace("_orig_mod.", "")  # torch.compile's
                        found.setdefault(id(tensor), (weakref.ref(tensor), kind, full))
        self._names = found
        self._named_at = len(self._steps) if found else -1

    def ended(self, of: OpenCall, call: Call | None, results: list[torch.Tensor]) -> None:
        """Called after a call. It is added here and to the report."""
        if call is not None:
            self._add(of.mine, call, of.args, results)

    def _add(self, of: _Open, call: Call, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        with _lock:  # so that the report counts the calls of several threads in the same order
            self._count_and_add(self._report.add(call) is not None, of, call, args, tensors)

    def _count_and_add(
        self, stored: bool, of: _Open, call: Call, args: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        if self._count % _CALLS_TO_WRITE == 0:
            self._write_so_far()
        number, self._count = self._count, self._count + 1
        reads: tuple[tuple[int, ...], ...] = ()
        computes = False
        memories: Sequence[_Memory | None] = ()
        if call.own:
            loss = self._loss_of(call, args)
            if loss is not None:
                entry = self._calls_in(self._writers_of(loss)), len(self._steps)
                self._measure([loss], lambda values: self._set_loss(values[0], *entry))
            reads = of.reads
            computes, memories = self._follow(number, of, call, args, tensors)
        else:
            for tensor in filter(has_storage, tensors):
                reference = StorageWeakRef(tensor.untyped_storage())
                of.inside[reference.cdata] = reference, _version_of(tensor)
        if self._file is not None:
            self._file.add(number, call, reads, computes)
        if stored or computes:
            self._reads[number] = reads
            facts = facts_of(call.name)
            if facts.is_uninitialized:
                tensors = memories = ()
            known = [self._known_of(tensor, memory) for tensor, memory in zip(tensors, memories, strict=False)]
            found = self._collector.add(number, tensors, facts.is_view, known)
            for tensor, memory, values in zip(tensors, memories, found, strict=False):
                if memory is not None and memory.known is None and memory.written_by[-1:] == (number,):
                    memory.known = _Known(_place_of(tensor), tensor.is_contiguous(), values)

    def _known_of(self, tensor: torch.Tensor, memory: _Memory | None) -> Values | Row | None:
        return None if memory is None or memory.known is None else memory.known.of_view(tensor)

    def begin_compiled(self, function: Any, args: list[Any]) -> Callable[[Any], None]:
        """Called before a call of a compiled function, which reads its arguments and the modules that it refers to.

        Returns:
            To be called with the result. The call is added then, as what has written the result.
        """
        running, path = self._modules.innermost
        tensors = list({id(one): one for one in [*tensors_in(args), *_referred_to(function, running, args)]}.values())
        inputs = _infos_of(tensors)
        of = _Open()
        of.reads = tuple(self._read(one, info, True, of) for one, info in zip(tensors, inputs, strict=True))
        line = innermost_line()

        def end(result: Any) -> None:
            results = tensors_in([result])
            written = [one.untyped_storage()._cdata for one in results if has_storage(one)]
            known = {key for key in written if key in self._memory and not self._memory[key].is_compiled}
            of.writes = frozenset(written) - known
            call = Call(
                COMPILED_FUNCTION, "", path, "forward", line, inputs, inputs, _infos_of(results), (), None, "", True, 0
            )
            self._add(of, call, args, results)

        return end

    def _follow(
        self,
        number: int,
        of: _Open,
        call: Call,
        args: Sequence[Any],
        tensors: Sequence[torch.Tensor],
    ) -> tuple[bool, list[_Memory | None]]:
        """Notes what a call of the program has written.

        Returns:
            Whether it has computed anything, and the memory of each tensor that is not written without a new version.
        """
        # A collective writes after it has returned, and Inductor uses its buffers again without a new version. What
        # they leave is read as a new source.
        is_collective = call.op.startswith("c10d::")
        if is_collective or (of.is_compiled and call.overload.endswith("out")):
            for tensor in filter(has_storage, tensors_in(args) if is_collective else tensors):
                self._memory.pop(tensor.untyped_storage()._cdata, None)
            return not is_collective, []
        memories: list[_Memory | None] = []
        facts, wrote = facts_of(call.name), False
        for tensor in tensors:
            if not has_storage(tensor):
                wrote = wrote or not facts.is_view
                memories.append(None)
                continue
            storage, version = tensor.untyped_storage(), _version_of(tensor)
            reference = StorageWeakRef(storage)
            known = self._memory.get(reference.cdata)
            if known is not None and known.version == version and reference.cdata not in of.writes:
                memories.append(known)  # a view, or the argument itself
                continue
            wrote = True
            is_part = tensor.numel() * tensor.element_size() < storage.nbytes()
            before = known.written_by[1 - _MOST_WRITERS :] if is_part and known is not None else ()
            now = before if facts.is_uninitialized else (*before, number)
            is_read = known is not None and known.is_read
            memory = _Memory(reference, now, version, is_read, of.is_compiled)
            self._memory[reference.cdata] = memory
            memories.append(memory)
        for key, (reference, version) in of.inside.items():  # such as the mask of a dropout
            known = self._memory.get(key)
            if (known is None or known.version != version) and not reference.expired():
                self._memory[key] = _Memory(reference, (number,), version, known is not None and known.is_read)
        if not wrote or facts.is_uninitialized:
            return False, memories
        read = set(self._calls_in(one for read in of.reads for one in read))
        self._waiting[number] = read, not of.reads or asks_for_infinity(args)
        return True, [] if of.is_compiled else memories

    def _writers_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        known = self._memory.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None
        return () if known is None else known.written_by

    def _calls_in(self, written_by: Iterable[int]) -> tuple[int, ...]:
        """The calls among what is in memory, with those that had initialized a source."""
        found: list[int] = []
        for one in written_by:
            found += [one] if one >= 0 else self._report.sources[-1 - one].written_by
        return tuple(found)

    def _loss_of(self, call: Call, args: Sequence[Any]) -> torch.Tensor | None:
        """The loss if a call makes the gradient of one."""
        if call.op != "aten::ones_like":
            return None
        frame: Any = sys._getframe(1)
        while frame is not None and is_ours(frame):
            frame = frame.f_back
        is_loss = frame is not None and frame.f_code is _GRADIENT_OF_LOSS and isinstance(args[0], torch.Tensor)
        return args[0] if is_loss else None

    # --- steps

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of an optimizer."""
        self._end_step([one for group in optimizer.param_groups for one in group["params"]], updated=True)
        self._transfer()

    def _end_step(self, parameters: Iterable[torch.Tensor], updated: bool) -> None:
        self._steps.append(self._count)
        self._named_at = -1
        named = {}
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                named[self._name_of(parameter)[1] or f"parameter {number}"] = parameter
        gradients = [one.grad for one in named.values() if one.grad is not None]
        end, rng = self._count, self._rng or _generators()

        def receive(values: tuple[Values, ...]) -> None:
            losses, self._new_losses = tuple(self._new_losses), []
            new = dict(zip(names, values[len(names) :], strict=True)) if updated else {}
            step = Step(end, losses, dict(zip(names, values[: len(names)], strict=True)), new, rng)
            self._report.ends.append(step)

        names = list(named)
        self._measure([*gradients, *(named.values() if updated else [])], receive)
        self._rng = None
        self._report.environment = _environment()

    def close(self) -> None:
        """Called at the end of the block."""
        if self._count > (self._steps[-1] if self._steps else 0):
            parameters = (one for module, _ in self._modules.named() for one in module._parameters.values())
            self._end_step(dict.fromkeys(one for one in parameters if one is not None), updated=False)
        self._transfer()

    # --- delivery

    def _measure(
        self, tensors: Sequence[torch.Tensor], receive: Callable[[tuple[Values, ...]], None]
    ) -> list[Values | Row]:
        key = next(self._keys)
        self._receivers[key] = receive
        with unnoticed():  # also by modes of torch functions, if a step has ended
            return self._collector.add(key, tensors)

    def _write_so_far(self) -> None:
        if not self._count:
            self._report.environment = _environment()  # the program has set it up by now
        elif not self._collector.has_rows:
            self._name_parameters()
            if not self._unnamed:
                self._transfer()

    def _name_parameters(self) -> None:
        for source, reference in list(self._unnamed.items()):
            tensor = reference()
            kind, name = ("input", "") if tensor is None else self._name_of(tensor)
            if name or tensor is None:
                del self._unnamed[source]
            if name:
                self._set_source(source, kind=kind, name=name)

    def _transfer(self) -> None:
        self._name_parameters()
        self._collector.transfer()
        self._memory = {key: one for key, one in self._memory.items() if not one.reference.expired()}
        if self._file is not None:
            self._file.flush(self._report)

    def _deliver(self, number: int, values: tuple[Values, ...]) -> None:
        """Called with the values of the results of a call, or of other tensors, in the order of `add`."""
        if number < 0:
            self._receivers.pop(number)(values)
            return
        reads = self._reads.pop(number, ())
        if self._file is not None:
            self._file.add_values(number, values)
        if number < len(self._report.calls):  # false for those that are not stored, and for calls of a parent process
            call = self._report.calls[number]
            # The record was made without them. A copy of each record would take as long as the rest of this class.
            object.__setattr__(call, "values", values or (EMPTY,) * len(call.outputs))  # uninitialized memory has none
            object.__setattr__(call, "reads", reads)
            self._find_faults(number, values)

    def _find_faults(self, number: int, values: Sequence[Values]) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is None or all(one.is_finite for one in values):
            return
        has_nan = any(one.nans for one in values)
        reads, asked = waiting
        causes = [self._faults[read] for read in reads if read in self._faults]
        causes = [cause for cause in causes if cause[0]] if has_nan and any(nan for nan, _ in causes) else causes
        made = min((maker for _, maker in causes if maker is not None), default=None)
        if made is None and (has_nan or not (causes or asked)):
            made = number
        self._faults[number] = has_nan, made
        if made is not None:
            self._report.nonfinite.calls += 1
            self._report.nonfinite.nan_calls += has_nan
            if self._report.nonfinite.first_call is None:
                self._name_call(made)

    def _set_loss(self, values: Values, writers: tuple[int, ...], step: int) -> None:
        """Called with the value of the next loss, after the values of the calls before it."""
        self._new_losses.append(values)
        found = self._report.nonfinite
        number = found.losses
        found.losses += 1
        if not (values.nans or values.infs):
            return
        found.nans += bool(values.nans)
        found.infs += bool(values.infs)
        if found.first_loss is None:
            found.first_loss, found.loss_step = number, step
            faults = {one: self._faults[one][1] for one in writers if one in self._faults}
            for writer, made in list(faults.items())[:1]:
                self._name_call(writer if made is None else made)

    def _name_call(self, number: int) -> None:
        self._report.nonfinite.first_call = number
        self._report.nonfinite.call_step = bisect.bisect_right(self._steps, number)


def _referred_to(function: Any, running: nn.Module | None, args: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors, parameters and buffers of a function in a module, other than the tensors among its arguments."""
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    referred = [*args, getattr(function, "__self__", running)]
    referred += [names.get(name) for name in getattr(code, "co_names", ())]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            referred.append(cell.cell_contents)
    found: list[Any] = []
    for one in referred:
        parts: Iterable[Any] = (one,)
        if isinstance(one, list | tuple | dict):
            parts = one.values() if isinstance(one, dict) else one
        elif isinstance(one, functools.partial):
            parts = one.func, *one.args, *one.keywords.values()
        elif not isinstance(one, nn.Module | torch.Tensor | type | types.ModuleType):
            parts = getattr(one, "__dict__", {}).values()  # such as those of a trainer
            parts = [part for part in parts if isinstance(part, nn.Module | torch.Tensor)]
        for part in parts:
            if isinstance(part, nn.Module):
                for module in nn.Module.modules(part):
                    found += [*module._parameters.values(), *module._buffers.values()]
            else:
                found.append(part)
    return tensors_in(found)


def _infos_of(tensors: Sequence[torch.Tensor]) -> tuple[TensorInfo, ...]:
    return records_of(infos_of((str(i), tensor) for i, tensor in enumerate(tensors)))


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _generators() -> dict[str, str]:
    """Returns digests of the states of the random number generators, by device, "python" and "numpy"."""
    with unnoticed():
        states = {"cpu": bytes(torch.get_rng_state().tolist())}
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            for index in range(torch.cuda.device_count()):
                states[f"cuda:{index}"] = bytes(torch.cuda.get_rng_state(index).tolist())
    states["python"] = repr(random.getstate()).encode()
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        states["numpy"] = repr([one.tolist() if hasattr(one, "tolist") else one for one in numpy.get_state()]).encode()
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


#: Those of scaled_dot_product_attention, which their flags name.
_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
#: Environment variables that select kernels.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


@functools.cache
def _cpu() -> str:
    """The model of the CPU, by which libraries select kernels; "" if it is unknown."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _environment() -> dict[str, str]:
    """Returns what the bits of results may depend on, other than the program."""
    backends: Any = torch.backends
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpu capability": backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": backends.mkldnn.is_available() and backends.mkldnn.enabled,
        "sdpa": ", ".join(name for name in _KERNELS if getattr(backends.cuda, f"{name}_sdp_enabled")()),
        "cuda": torch.version.cuda or "none",
    }
    if torch.cuda.is_initialized():
        found |= {
            "gpus": ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
            "cudnn": backends.cudnn.version(),
            "cudnn.deterministic": backends.cudnn.deterministic,
            "cudnn.benchmark": backends.cudnn.benchmark,
            "cudnn.allow_tf32": backends.cudnn.allow_tf32,
            "cuda.matmul.allow_tf32": backends.cuda.matmul.allow_tf32,
            "float16 reduction": backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            "bfloat16 reduction": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        }
    found |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {name: str(value) for name, value in found.items()}
