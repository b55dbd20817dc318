"""The recorder of `trace(values=True)`: what calls read and wrote, what they computed, and where inf and NaN came from.

NOTE [ What a call reads ]
Only the calls that the program made are followed, not the calls inside of them. A call reads what the calls before it
wrote to the memory of its arguments, and the digest of the elements that it reads is recorded, of a view as well.
Memory that no recorded call has written is a `Source`, and so is memory that has changed without one: its tensor has
another version, or NumPy shares it and the elements are others.

A parameter, a buffer or a gradient is digested again when it is first read in a step. If it has changed since (through
`.data`, NumPy, DLPack, compiled code, another library), it is a new source. So are the parameters and buffers of the
model when they are first read, even if recorded calls have initialized them: two runs are compared from there. A call
that returns its argument, such as `contiguous()`, does not write.

NOTE [ Which call made it ]
A call makes a NaN if nothing that it reads has one, and an infinite value if all that it reads is finite, unless the
program passed an infinite number, as `masked_fill(mask, -inf)` does. A NaN that a call makes of infinite values comes
from the call that made those. Views and uninitialized memory make nothing. A call inside of another one, such as `cat`,
may return a view of memory that a kernel has allocated and not written yet: its values are not measured.

A loss is a tensor on which `backward()` is called without a gradient: autograd then makes a gradient of ones like it.

Tensors on other devices are copied to the host, with one synchronization each.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import torch
from torch import nn
from torch.amp import GradScaler
from torch.multiprocessing.reductions import StorageWeakRef

from torch_promote import _C
from torch_promote.observe.call import COMPILED, COMPILED_FUNCTION, Call, TensorInfo, Unseen, infos_of, records_of
from torch_promote.observe.observer import OpenCall
from torch_promote.observe.ops import OpFacts, asks_for_infinity, facts_of, has_storage, tensors_in, written
from torch_promote.observe.places import RunningModules, frames, innermost_line
from torch_promote.recording.file import CALLS_TO_WRITE, RecordingFile
from torch_promote.recording.program_state import (
    OptimizerStates,
    Searched,
    environment,
    generator_states,
    loss_of,
    state_drawn_from,
)
from torch_promote.recording.recording import STEPS, Read, Recording, Source, Step, recording_lock
from torch_promote.recording.values import EMPTY, Measurer, Values

#: The maximum number of calls that count as writers of one tensor, each of a part of it.
_MOST_WRITERS = 16
_UNSCALE = GradScaler._unscale_grads_.__code__
_Kind = Literal["parameter", "buffer", "gradient", "state", "input"]
_Place: TypeAlias = tuple[Any, ...]
_Named: TypeAlias = tuple[weakref.ref[torch.Tensor], _Kind, str]


@dataclass(slots=True)
class _Memory:
    """What is known of a storage."""

    reference: StorageWeakRef  # a weak reference, which reserves the storage's address
    written_by: tuple[int, ...]  # the calls and sources whose values are in it, as in `Read`
    version: int  # the version of its tensor at that time; -1 for an inference tensor, which has none
    is_read: bool = False  # whether it is a parameter or buffer that has been recorded as a source
    is_compiled: bool = False  # whether compiled code or a collective has written it, which do so without a new version
    is_undefined: bool = False  # whether a call has allocated it, and none has written to it since
    step: int = -1  # the number of steps when a parameter, buffer or gradient was digested last
    values: dict[_Place, Values] = field(default_factory=dict)  # the values of tensors in it, by their places
    digests: dict[_Place, str] = field(default_factory=dict)  # those of which only the digest is known


def _place_of(tensor: torch.Tensor) -> _Place:
    """What tells the elements of a tensor in its storage, and their order."""
    if _C.is_measurable(tensor):  # contiguous, without a bit for conjugation or negation
        return tensor.storage_offset(), tensor.numel(), tensor.dtype, False, False
    offset = tensor.storage_offset()
    if tensor.is_contiguous():
        return offset, tensor.numel(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return offset, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


_PLAIN_TYPES = frozenset((torch.Tensor, nn.Parameter))
_UNKNOWN = Read()


@dataclass(slots=True)
class _Open:
    """What is known of an open call of the program."""

    reads: tuple[Read, ...] = ()  # what it reads
    draw: str = ""  # the generator from which it draws, with its state; "" if it draws nothing
    writes: frozenset[int] = field(default_factory=frozenset)  # the storages that it writes to, by its schema
    # What the calls inside of it have written: storages, with the versions of their tensors, and whether they have only
    # allocated it.
    inside: dict[int, tuple[StorageWeakRef, int, bool]] = field(default_factory=dict)
    is_compiled: bool = False  # whether compiled code makes it


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _goes_on(method: Callable[Concatenate[Recorder, _P], _T]) -> Callable[Concatenate[Recorder, _P], _T | None]:
    """Lets the program go on if PyTorch or an optimizer refuses what a method asks for. One thread at a time."""

    @functools.wraps(method)
    def call(self: Recorder, *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        with recording_lock:  # so that calls of several threads are numbered in the order in which they are followed
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._fail(method.__name__, error)
                return None

    return call  # type: ignore[return-value]  # functools.wraps


class Recorder:
    """Records the values of a trace. It holds no tensors."""

    def __init__(
        self,
        report: Recording,
        modules: RunningModules,
        file: RecordingFile | None = None,
        steps: str = "",  # the optimizer steps that were asked for, "3:5"; "" for all
        searched: Searched | None = None,  # what the recorders of several blocks share
        skips_optimizers: bool = False,  # whether their calls are not observed
    ) -> None:
        self._skips_optimizers = skips_optimizers
        self._asked = {STEPS: steps} if steps else {}
        self._report = report
        self._modules = modules
        self._file = file
        self._measurer = Measurer()
        self._memory: dict[int, _Memory] = {}  # by storage
        self._names: dict[int, _Named] = {}  # of the model's tensors, by id
        self._owners: dict[int, int] = {}  # by storage, the id of the model's tensor in it, if there is one alone
        self._named_at = -1, 0  # the numbers of steps and of known modules when they were looked up
        self._unnamed: dict[int, weakref.ref[torch.Tensor]] = {}  # sources that may get a name
        self._sources = 0  # also those that only the file has
        self._source_writers: dict[int, tuple[int, ...]] = {}
        self._losses: list[Values] = []  # since the last step
        self._steps = array.array("q")  # the number of calls at the end of each step; 8 bytes a step
        self._calls = 0
        self._unscaled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that have not stepped since
        self._states = OptimizerStates(lambda one: self._name_of(_local(one))[1], self._values_of, searched)
        #: For calls with inf or NaN: whether there is a NaN, and the call that made it; None for a mask.
        self._faults: dict[int, tuple[bool, int | None]] = {}

    def _fail(self, what: str, error: Exception) -> None:
        """Says what the recording lacks, once for each kind of error: texts may have ever new numbers."""
        start = f"Parts of the recording are unknown ({what}): {type(error).__name__}"
        if not any(one.startswith(start) for one in self._report.not_seen):
            self._report.not_seen.append(Unseen("unknown", 0, f"{start}: {error}."))

    def forget(self) -> None:
        """Begins again, with an empty report: what is known of memory refers to calls of another process."""
        self.__init__(self._report, self._modules, self._file, self._asked.get(STEPS, ""))  # type: ignore[misc]

    # --- what a call reads

    def begun(self, call: OpenCall) -> _Open:
        """Called before a call: notes what a call of the program reads, of which some may be new sources."""
        if call.around is not None:
            mine: _Open = call.around.mine
            return mine
        found = _Open(is_compiled=call.policy_source == COMPILED)
        self._begin(call, found)
        return found

    @_goes_on
    def _begin(self, call: OpenCall, found: _Open) -> None:
        if not self._calls and not self._report.rng:
            self._start()
        facts = call.facts
        if facts.name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            self._note_unscaled()
        elif facts.name == "aten::_amp_update_scale_":
            self._end_skipped()
        if facts.is_random:
            found.draw = state_drawn_from(call.args, call.inputs)
        if facts.writes:
            tensors = [_local(one) for _, one in written(facts.writes, call.args)]  # whose versions a DTensor leaves
            found.writes = frozenset(one.untyped_storage()._cdata for one in tensors if has_storage(one))
        computes, ignored = facts.has_results and not facts.is_view, facts.ignored
        found.reads = tuple(
            [
                self._read(tensor, info, not ignored or info.name.partition("[")[0] not in ignored, found, computes)
                for tensor, info in zip(call.read, call.inputs, strict=True)
            ]
        )

    def _start(self) -> None:
        self._report.environment = environment() | self._asked
        self._report.rng = generator_states()

    def _read(self, tensor: torch.Tensor, info: TensorInfo, counts: bool, of: _Open, computes: bool = True) -> Read:
        """Returns what is in the memory of a tensor that a call reads, and whether the call depends on it."""
        if type(tensor) not in _PLAIN_TYPES:
            tensor = _local(tensor)
        if not has_storage(tensor):
            return _UNKNOWN
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory, version, place = self._memory.get(key), _version_of(tensor), _place_of(tensor)
        step = len(self._steps)
        before: tuple[int, ...] = ()
        if memory is not None and memory.version == version:
            before = memory.written_by
            if not counts or memory.is_undefined:
                return Read(before)
            kind = self._kind_of(tensor, key)
            known = None if memory.is_compiled else memory.digests.get(place)
            found = known
            # What NumPy or another process may share is not resizable.
            if found is None or (computes and (not storage.resizable() or (kind is not None and memory.step != step))):
                found = self._measurer.digest(tensor)
            is_new = kind in ("parameter", "buffer") and not memory.is_read
            if is_new and (self._is_initializing() or (storage._cdata in of.writes and not self._is_running)):
                return Read(before, found)
            if not is_new and (known is None or found == known):
                memory.digests[place] = found
                if computes:
                    memory.step = step
                return Read(before, found)
        elif not counts:
            return _UNKNOWN
        kind, name = self._name_of(tensor)
        values = self._values_of(tensor)
        if memory is not None and not name and memory.digests.get(place) == values.digest:
            memory.version = version  # written through a tensor with another counter, as by FSDP2
            return Read(memory.written_by, values.digest)
        number = -1 - self._sources
        self._sources += 1
        if before:
            self._source_writers[number] = before
        if not name:
            self._unnamed[number] = weakref.ref(tensor)
        projections = "", ""
        if kind in ("parameter", "buffer") and not step:
            projections = self._measurer.projections(tensor)
        self._add_source(Source(kind, name, info, values, before, step, projections))
        if kind != "input" or not of.is_compiled:  # compiled code may write to it again, without a new version
            new = _Memory(StorageWeakRef(storage), (number,), version, kind in ("parameter", "buffer"), step=step)
            if not of.is_compiled:
                new.values[place], new.digests[place] = values, values.digest
            self._memory[storage._cdata] = new
        return Read((number,), values.digest)

    def _is_initializing(self) -> bool:
        """Whether code like that of torch.nn.init runs, which may read what it has written: without grad, no module."""
        return not torch.is_grad_enabled() and not self._is_running

    @property
    def _is_running(self) -> bool:
        """Whether a module runs, which may write to its buffers."""
        return self._modules.innermost[0] is not None

    def _add_source(self, source: Source) -> None:
        if self._is_kept:
            self._report.sources.append(source)
        if self._file is not None:
            self._file.add_source(source)

    @property
    def _is_kept(self) -> bool:
        """Whether the report keeps what is recorded now. Behind its last call, only the file has it."""
        return not self._report.dropped

    def _values_of(self, tensor: torch.Tensor) -> Values:
        return self._measurer.values(_local(tensor))

    # --- names

    def _kind_of(self, tensor: torch.Tensor, key: int) -> _Kind | None:
        """What a named tensor is, or the tensor that has its storage."""
        known = self._named(tensor, key)
        return known[1] if known is not None else "parameter" if isinstance(tensor, nn.Parameter) else None

    def _name_of(self, tensor: torch.Tensor) -> tuple[_Kind, str]:
        """What a tensor is, and its name. The models are searched once a step, and when another module has run."""
        key = tensor.untyped_storage()._cdata if has_storage(tensor) else 0
        known = self._named(tensor, key)
        if known is None and self._named_at != (len(self._steps), self._modules.known):
            self._name_tensors()
            known = self._named(tensor, key)
        if known is not None:
            return known[1:]
        return ("parameter" if isinstance(tensor, nn.Parameter) else "input"), ""

    def _named(self, tensor: torch.Tensor, key: int) -> _Named | None:
        """What is known of a tensor, or of the only named one in its storage, which FSDP2 and NumPy have others of."""
        known = self._names.get(id(tensor)) or self._names.get(self._owners.get(key, 0))
        owner = None if known is None else known[0]()  # None if it has been destroyed
        if owner is None or owner is tensor:
            return known if owner is tensor else None
        return known if key and has_storage(owner) and owner.untyped_storage()._cdata == key else None

    def _name_tensors(self) -> None:
        found: dict[int, _Named] = {}
        owners: dict[int, int] = {}
        kinds: tuple[tuple[_Kind, str], ...] = (("parameter", "_parameters"), ("buffer", "_buffers"))
        for module, path in self._modules.named():
            for kind, attribute in kinds:
                for name, tensor in getattr(module, attribute).items():
                    if tensor is not None:
                        full = (f"{path}.{name}" if path else name).replace("_orig_mod.", "")  # torch.compile's
                        tensor = _local(tensor)
                        if id(tensor) not in found:
                            found[id(tensor)] = weakref.ref(tensor), kind, full
                            key = tensor.untyped_storage()._cdata if has_storage(tensor) else 0
                            owners[key] = 0 if key in owners else id(tensor)
        self._names, self._owners = found, owners
        self._named_at = len(self._steps) if found else -1, self._modules.known

    def _name_sources(self) -> None:
        """Names sources that were read before their model or optimizer was known."""
        states = {id(_local(one)): name for name, one in self._states.tensors()} if self._unnamed else {}
        for number, reference in list(self._unnamed.items()):
            tensor = reference()
            if tensor is None:
                continue
            kind, name = self._name_of(tensor)
            if not name and id(tensor) in states:
                kind, name = "state", states[id(tensor)]
            if not name:
                continue
            del self._unnamed[number]
            if -number <= len(self._report.sources):
                known = self._report.sources[-1 - number]
                self._report.sources[-1 - number] = dataclasses.replace(known, kind=kind, name=name)
            if self._file is not None:
                self._file.name_source(number, kind, name)

    # --- what a call writes

    def ended(self, of: OpenCall, call: Call | None, results: list[torch.Tensor]) -> None:
        """Called after a call. It is added here and to the report."""
        if call is not None:
            self._add(of.mine, of.facts, call, of.args, results)

    @_goes_on
    def _add(self, of: _Open, facts: OpFacts, call: Call, args: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        number = self._report.add(call)
        self._calls = number + 1
        found: tuple[tuple[Read, ...], tuple[Values, ...], str] = (), (), ""
        try:
            found = self._record(number, of, facts, call, args, tensors)
        except Exception as error:  # the number of a call in the file is its place there
            self._fail("_record", error)
        if self._file is not None:
            self._file.add(number, call, *found)
        if number % CALLS_TO_WRITE == CALLS_TO_WRITE - 1:
            self._flush()

    def _record(
        self, number: int, of: _Open, facts: OpFacts, call: Call, args: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[tuple[Read, ...], tuple[Values, ...], str]:
        """Records what a call has read and computed."""
        if not _PLAIN_TYPES.issuperset(map(type, tensors)):
            tensors = [_local(one) for one in tensors]
        reads: tuple[Read, ...] = ()
        draw, computes, copies_undefined = "", False, False
        memories: Sequence[_Memory | None] = ()
        if call.own:
            reads, draw = of.reads, of.draw
            computes, memories = self._follow(number, of, facts, call, args, tensors)
        else:
            copies_undefined = self._copies_undefined(facts, call, args, of)
            for place, tensor in enumerate(tensors):
                if has_storage(tensor):
                    reference = StorageWeakRef(tensor.untyped_storage())
                    # Such as the workspace of an LSTM, which its backward reads.
                    is_undefined = copies_undefined or place in facts.unwritten
                    of.inside[reference.cdata] = reference, _version_of(tensor), is_undefined
        values: tuple[Values, ...] = ()
        is_kept = self._is_kept
        if is_kept or computes:
            values = (EMPTY,) * len(tensors) if copies_undefined else self._measure(facts, tensors, memories)
        if is_kept:
            if values:
                self._report.values[number] = values
            if reads:
                self._report.reads[number] = reads
            if draw:
                self._report.draws[number] = draw
        if call.own:
            loss = loss_of(call, args)
            if loss is not None:
                self._set_loss(self._values_of(loss), self._calls_in(self._writers_of(loss)))
            if computes:
                self._find_faults(number, reads, args, values)
        return reads, values, draw

    def _copies_undefined(self, facts: OpFacts, call: Call, args: Sequence[Any], of: _Open) -> bool:
        """Whether a call copies memory that none has written."""
        if not (facts.is_copy or facts.keeps_elements):
            return False
        for tensor in filter(has_storage, map(_local, tensors_in(args[-2:] if facts.is_copy else args[:1]))):
            key = tensor.untyped_storage()._cdata
            memory = self._memory.get(key)
            if key in of.inside:
                is_undefined = of.inside[key][2]
            elif memory is None:  # a kernel has made it, such as the workspace of an LSTM, which a hook saves
                is_undefined = not call.own
            else:
                is_undefined = memory.is_undefined
            if is_undefined:
                return True
        return False

    def _measure(
        self, facts: OpFacts, tensors: Sequence[torch.Tensor], memories: Sequence[_Memory | None]
    ) -> tuple[Values, ...]:
        """The values of what a call has computed or returned."""
        if facts.is_uninitialized or facts.communicates:  # a collective writes after it has returned
            return (EMPTY,) * len(tensors)
        found = []
        for number, (tensor, memory) in enumerate(zip(tensors, memories or (None,) * len(tensors), strict=True)):
            if number in facts.unwritten or (memory is not None and memory.is_undefined):
                found.append(EMPTY)
                continue
            place = None if memory is None else _place_of(tensor)
            values = None if memory is None or place is None else memory.values.get(place)
            if values is None:
                values = self._values_of(tensor)
            if memory is not None and place is not None and not memory.is_compiled:
                memory.values[place], memory.digests[place] = values, values.digest
            found.append(values)
        return tuple(found)

    @_goes_on
    def begin_compiled(self, function: Any, args: list[Any]) -> Callable[[Any], None]:
        """Called before a compiled function reads what it refers to. Returns what gets its result and adds the call."""
        running, path = self._modules.innermost
        tensors = list({id(one): one for one in [*tensors_in(args), *_referred_to(function, running, args)]}.values())
        inputs = _infos_of(tensors)
        of = _Open(draw=state_drawn_from(args, inputs))
        of.reads = tuple(self._read(one, info, True, of) for one, info in zip(tensors, inputs, strict=True))
        return functools.partial(self._end_compiled, of, args, inputs, path, innermost_line())

    @_goes_on
    def _end_compiled(
        self, of: _Open, args: list[Any], inputs: tuple[TensorInfo, ...], path: str, line: str, result: Any
    ) -> None:
        results = tensors_in([result])
        written = [one.untyped_storage()._cdata for one in results if has_storage(one)]
        known = {key for key in written if key in self._memory and not self._memory[key].is_compiled}
        of.writes = frozenset(written) - known
        of.draw = "" if of.draw == state_drawn_from(args, inputs) else of.draw
        here = threading.get_native_id()
        call = Call(
            COMPILED_FUNCTION, "", path, "forward", line, inputs, inputs, _infos_of(results), (), None, "", True, here
        )
        self._add(of, facts_of(call.name), call, args, results)

    def _follow(
        self, number: int, of: _Open, facts: OpFacts, call: Call, args: Sequence[Any], tensors: Sequence[torch.Tensor]
    ) -> tuple[bool, Sequence[_Memory | None]]:
        """Notes what a call has written; whether it computed anything, and memory written without a new version."""
        if of.is_compiled and call.overload.endswith("out"):
            # Inductor uses its buffers again without a new version. What it leaves is read as a new source.
            for tensor in filter(has_storage, tensors):
                self._memory.pop(tensor.untyped_storage()._cdata, None)
            return True, ()
        if call.op.startswith("c10d::"):  # a collective writes after it has returned
            for tensor, info in zip(map(_local, tensors_in(args)), call.inputs, strict=False):
                if has_storage(tensor) and not info.name.startswith("input"):
                    storage = tensor.untyped_storage()
                    reference, version = StorageWeakRef(storage), _version_of(tensor)
                    self._memory[storage._cdata] = _Memory(reference, (number,), version, is_compiled=True)
            return False, ()
        memories: list[_Memory | None] = []
        uninitialized = facts.is_uninitialized or self._copies_undefined(facts, call, args, of)
        wrote = False
        for tensor in tensors:
            if not has_storage(tensor):
                wrote = True
                memories.append(None)
                continue
            storage, version = tensor.untyped_storage(), _version_of(tensor)
            key = storage._cdata
            known = self._memory.get(key)
            if known is not None and known.version == version and key not in of.writes:
                memories.append(known)  # a view, or the argument itself
                continue
            wrote = True
            is_part = tensor.numel() * tensor.element_size() < storage.nbytes()
            before = known.written_by[1 - _MOST_WRITERS :] if is_part and known and not known.is_undefined else ()
            is_read, step = (False, -1) if known is None else (known.is_read, known.step)
            memory = _Memory(
                StorageWeakRef(storage) if known is None or known.reference.expired() else known.reference,
                (*before, number),
                version,
                is_read,
                of.is_compiled,
                uninitialized,
                step,
            )
            self._memory[key] = memory
            memories.append(memory)
        for key, (reference, version, is_undefined) in of.inside.items():  # such as the mask of a dropout
            known = self._memory.get(key)
            if (known is None or known.version != version) and not reference.expired():
                is_read = known is not None and known.is_read
                self._memory[key] = _Memory(reference, (number,), version, is_read, is_undefined=is_undefined)
        return wrote and not uninitialized, () if of.is_compiled else memories

    def _writers_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        known = self._memory.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None
        return () if known is None else known.written_by

    def _calls_in(self, written_by: Iterable[int]) -> tuple[int, ...]:
        """The calls among what is in memory, with those that had initialized a source."""
        found: list[int] = []
        for one in written_by:
            found += [one] if one >= 0 else self._source_writers.get(one, ())
        return tuple(found)

    # --- steps

    @_goes_on
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step of an optimizer: records its state, and names gradients."""
        state = self._states.at_step(optimizer, len(self._steps))
        if state is not None:
            if self._is_kept:
                self._report.states.append(state)
            if self._file is not None:
                self._file.add_state(state)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    gradient, name = _local(gradient), self._name_of(_local(parameter))[1]
                    self._names[id(gradient)] = weakref.ref(gradient), "gradient", name

    @_goes_on
    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after a step of an optimizer."""
        self._unscaled.discard(optimizer)
        parameters: list[torch.Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
        written = [one for parameter in parameters for one in (parameter, parameter.grad) if one is not None]
        for one in map(_local, written) if self._skips_optimizers else ():
            if has_storage(one):  # a fused optimizer, and FSDP's shards, may keep their versions
                self._memory.pop(one.untyped_storage()._cdata, None)
        self._end_step(parameters, updated=True)

    def _note_unscaled(self) -> None:
        frame = next((one for one in frames() if one.f_code is _UNSCALE), None)
        optimizer = None if frame is None else frame.f_locals["optimizer"]
        if isinstance(optimizer, torch.optim.Optimizer):
            self._unscaled.add(optimizer)

    def _end_skipped(self) -> None:
        """Ends a step that GradScaler has skipped, as one that it has not: two runs are compared step by step."""
        for optimizer in list(self._unscaled):
            self.before_step(optimizer)
            self._end_step([one for group in optimizer.param_groups for one in group["params"]], updated=False)
        self._unscaled.clear()

    def _end_step(self, parameters: Iterable[torch.Tensor], updated: bool) -> None:
        named = {}
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                named[self._name_of(_local(parameter))[1] or f"parameter {number}"] = parameter
        gradients = {name: self._known_values(one.grad) for name, one in named.items() if one.grad is not None}
        after = {name: self._known_values(one) for name, one in named.items()} if updated else {}
        step = Step(self._calls, tuple(self._losses), gradients, after, generator_states())
        self._losses = []
        if self._is_kept:
            self._report.ends.append(step)
        self._name_sources()
        if not self._steps:  # the program has set it up by now
            self._report.environment = environment() | self._asked
        if self._file is not None:
            self._file.add_step(step)
        self._steps.append(self._calls)
        self._named_at = -1, 0
        self._flush()

    def _known_values(self, tensor: torch.Tensor) -> Values:
        """The values of a tensor, which the call that wrote it has measured in most cases."""
        tensor = _local(tensor)
        memory = self._memory.get(tensor.untyped_storage()._cdata) if has_storage(tensor) else None
        if memory is not None and memory.version == _version_of(tensor) and not memory.is_compiled:
            known = memory.values.get(_place_of(tensor))
            if known is not None:
                return known
        return self._values_of(tensor)

    @_goes_on
    def close(self) -> None:
        """Called at the end of the block."""
        if self._calls > (self._steps[-1] if self._steps else 0) and (self._losses or not self._steps):
            parameters = (one for module, _ in self._modules.named() for one in module._parameters.values())
            self._end_step(dict.fromkeys(one for one in parameters if one is not None), updated=False)
        state = self._states.at_end(len(self._steps))
        if state is not None:
            self._report.states.append(state)
            if self._file is not None:
                self._file.add_state(state)
        if self._file is not None:
            self._file.flush(self._report)

    def _flush(self) -> None:
        self._memory = {key: one for key, one in self._memory.items() if not one.reference.expired()}
        self._names = {key: one for key, one in self._names.items() if one[0]() is not None}
        self._unnamed = {number: one for number, one in self._unnamed.items() if one() is not None}
        # What no memory comes from any more is no cause of a later inf or NaN.
        written_by = {one for memory in self._memory.values() for one in memory.written_by}
        self._source_writers = {one: calls for one, calls in self._source_writers.items() if one in written_by}
        written_by.update(self._calls_in(written_by))
        self._faults = {one: fault for one, fault in self._faults.items() if one in written_by}
        if self._file is not None:
            self._file.flush(self._report)

    # --- inf and NaN

    def _find_faults(self, number: int, reads: Sequence[Read], args: Sequence[Any], values: Sequence[Values]) -> None:
        if all(one.is_finite for one in values):
            return
        has_nan = any(one.nans for one in values)
        before = set(self._calls_in(one for read in reads for one in read.written_by))
        causes = [self._faults[one] for one in before if one in self._faults]
        causes = [cause for cause in causes if cause[0]] if has_nan and any(nan for nan, _ in causes) else causes
        made = min((maker for _, maker in causes if maker is not None), default=None)
        if made is None and (has_nan or not (causes or not reads or asks_for_infinity(args))):
            made = number
        self._faults[number] = has_nan, made
        if made is not None:
            self._report.nonfinite.calls += 1
            self._report.nonfinite.nan_calls += has_nan
            if self._report.nonfinite.first_call is None:
                self._name_call(made)

    def _set_loss(self, values: Values, writers: tuple[int, ...]) -> None:
        """Called with the values of the next loss."""
        self._losses.append(values)
        if self._report.nonfinite.add_loss(bool(values.nans), bool(values.infs), len(self._steps)):
            faults = {one: self._faults[one][1] for one in writers if one in self._faults}
            for writer, made in list(faults.items())[:1]:
                self._name_call(writer if made is None else made)

    def _name_call(self, number: int) -> None:
        self._report.nonfinite.first_call = number
        self._report.nonfinite.call_step = bisect.bisect_right(self._steps, number)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process has; another tensor itself."""
    if type(tensor) in _PLAIN_TYPES:
        return tensor
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


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
