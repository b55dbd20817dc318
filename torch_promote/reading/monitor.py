"""`monitor`: traces one step in so many with values, and writes what is in it to TensorBoard, for weeks.

NOTE [ A step that is looked at ]
A step is what runs between two steps of the first optimizer that updates the model, or what GradScaler skipped of one.
A look is a `Tracer` around one step; between looks there is a hook of optimizers, and one of `GradScaler.update`. With
every=100, looks are at the steps 100, 200, ... (from 1): what programs do after every so many steps, such as an
evaluation, is outside of them.

NOTE [ Sums of a look ]
A look becomes lists of numbers, by kind and name, of which ranks are added up: the first number of a list is a maximum,
all others are sums. So a norm is that of the whole tensor, be it replicated (DDP) or sharded (FSDP2): the sum of the
squares that ranks have, over the number of elements that they have, times the number of all elements. Ranks pass them
through the store of the process group, not through a collective: a rank that has no monitor stops no other.

    forward, backward   by module: `Values.counts` of the results, with those of the modules inside
    own                 by module: the amax of its own results with more than one element
    casts               by module: 0, the casts made
    gradients           by group of parameters: `Values.counts`
    parameters          by group and name: elements, the gradient's squares and elements, the weight's squares, and in a
                        sample of its elements the squares of the update and of the weight before
    scale               GradScaler's
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import json
import logging
import math
import os
import re
import statistics
import warnings
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from torch_promote.errors import MissingPackageError, OptionError
from torch_promote.observe.call import Call
from torch_promote.observe.ops import facts_of, unnoticed
from torch_promote.observe.surroundings import watch_scalers, watch_steps
from torch_promote.reading.explanation import explain
from torch_promote.reading.trace import Tracer
from torch_promote.reading.trace_report import TraceReport
from torch_promote.recording.file import SUFFIX
from torch_promote.recording.program_state import Searched
from torch_promote.recording.values import COUNTED
from torch_promote.report.base import module_name, short_line
from torch_promote.report.block import block

__all__ = ["VARIABLE", "Alarm", "Monitor", "check_tensorboard", "monitor", "use_environment"]

#: Set by `torch-promote run --monitor`: the arguments of `monitor` as JSON, and the process id of the program.
VARIABLE = "TORCH_PROMOTE_MONITOR"
Sums: TypeAlias = dict[str, dict[str, list[float]]]
_log = logging.getLogger("torch_promote.monitor")

#: A look has at most so many calls one by one.
_MOST_CALLS = 200_000
#: One look in so many is written to disk at once, others if there is an alarm, and the last at the end.
_WRITTEN = 10
#: Updates are measured in at most so many elements of a tensor, evenly spaced.
_SAMPLED = 1 << 16
#: After so many steps of other optimizers without one of the optimizer that counts, another counts.
_FORGOTTEN = 1000
#: The seconds in which another rank has to add its sums. One that does not is not asked again.
_PATIENCE = 60

#: The looks that are a figure's past, and how many there have to be.
_PAST, _LEAST = 8, 3
#: An amax that is so many times that of its past is told of. Beyond the limit, it is a mask.
_GROWTH, _MASK = 8.0, 1e30
#: The looks in a row in which a gradient is 0, or the scale has fallen, that are told of.
_ZEROS, _FALLS = 2, 3


class Alarm(NamedTuple):
    """What a monitor noticed.

    Attributes:
        step: The step that was looked at.
        module: The module's path; "(model)" for the calls of the model itself and outside of modules.
        figure: The figure that left its past: "amax", "gradient", "scale" or "loss".
        text: A sentence, with what to try.
    """

    step: int
    module: str
    figure: str
    text: str


@block
def monitor(
    model: nn.Module | None = None,
    *,
    to: Any,
    every: int = 100,
    looks: str | os.PathLike[str] | None = None,
    keep: int = 8,
    start: int = 0,
) -> Iterator[Monitor]:
    """Looks at one step of a training in `every`, as `trace(values=True)` does, and writes figures of it.

    Between looks, nothing observes the training. Figures that leave their own past become alarms.

    Args:
        model: The module that the paths of modules start from, which optimizers of the training update. None: the first
            module that is called in a look outside of other modules; any optimizer counts then.
        to: A `SummaryWriter`, the path of a folder for TensorBoard, or a function `f(step, {"module/figure": number})`.
        every: The number of steps from one look to the next.
        looks: The folder for recordings of looks; by default "looks" in the folder of TensorBoard, none for a function.
        keep: The number of recordings in that folder, and of those that alarms keep beside them.
        start: The number of steps that the training has made before, if it is resumed.

    Yields:
        The monitor, with its `alarms`.

    Raises:
        OptionError: An argument is invalid. It is a ValueError.
        MissingPackageError: `to` is a path, and tensorboard is not installed. It is an ImportError.

    Example:
        >>> import torch, torch_promote as tp
        >>> model = torch.nn.Linear(3, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with tp.monitor(model, every=2, to=lambda step, figures: print(step, figures["_model_/amax"])) as monitor:
        ...     for _ in range(4):
        ...         model(torch.ones(2, 3)).sum().mul(0).backward()
        ...         optimizer.step()
        2 ...
        4 ...
        >>> monitor.alarms
        []
    """
    one = Monitor(model, to, every, looks, keep, start)
    del model
    with one._block():
        yield one


class Monitor:
    """The monitor of a block of `monitor`.

    Attributes:
        alarms: What it noticed so far: a list of `Alarm`. Of several ranks, the first has them.
        steps: The number of steps so far, with those that GradScaler skipped.
        skipped_steps: The number of steps of optimizers that GradScaler skipped.
        looks: The number of looks so far.
    """

    def __init__(
        self,
        model: nn.Module | None,
        to: Any,
        every: int,
        looks: str | os.PathLike[str] | None,
        keep: int,
        start: int,
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise OptionError(f"model must be an nn.Module or None, got {model!r}.")
        for name, value, least in (("every", every, 1), ("keep", keep, 1), ("start", start, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"`{name}` must be an int of at least {least}, got {value!r}.")
        self.alarms: list[Alarm] = []
        self.steps = start
        self.skipped_steps = 0
        self.looks = 0
        self._model = None if model is None else weakref.ref(model)
        self._every = every
        self._start = start
        self._sink = _Sink(to)
        folder = self._sink.folder if looks is None else os.fspath(looks)
        self._recordings = None if folder is None else _Recordings(Path(folder, *["looks"] * (looks is None)), keep)
        self._clock: weakref.ref[torch.optim.Optimizer] | None = None  # the optimizer whose steps count
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._since_clock = 0
        self._stepped_ones: set[int] = set()  # optimizers, by id, since GradScaler was updated
        self._scaler: weakref.ref[torch.amp.GradScaler] | None = None
        self._look: _Look | None = None
        self._alarms = _Alarms()
        self._searched: Searched = weakref.WeakKeyDictionary()
        self._ranks = _Ranks()
        self._is_inert = False
        self._said: set[str] = set()

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        _monitors.add(self)
        try:
            with watch_steps(self._stepped, self._before), watch_scalers(self._updated):
                yield
        finally:
            _monitors.discard(self)
            self._end()

    def _end(self) -> None:
        """Ends the look that is open, whose step has not ended, and writes the last recordings."""
        look, self._look = self._look, None
        with self._safely("end"):
            if look is not None:
                look.tracer.__exit__()
        with self._safely("end"):
            if look is not None and self._recordings is not None and look.tracer.report.total.calls:
                self._recordings.add(self.steps + 1, look.tracer.report)
            if self._recordings is not None:
                self._recordings.write()
        if not self._is_inert and not self.looks and self.steps > self._start:
            _log.info("%d steps, and every=%d: the monitor has looked at none.", self.steps, self._every)
        with self._safely("end"):
            self._sink.close()

    def _forget(self, goes_on: bool = False) -> None:
        """Called in a forked process, which has none of the parent's looks."""
        look, self._look = self._look, None
        self._is_inert = not goes_on
        if self._recordings is not None:
            self._recordings.last.clear()
        self._sink.forget()
        with contextlib.suppress(Exception):
            if look is not None:
                look.tracer._block.close()

    @contextlib.contextmanager
    def _safely(self, what: str) -> Iterator[None]:
        """Lets the training go on if PyTorch, a disk or the user's function raises. It warns once of each kind."""
        try:
            yield
        except Exception as error:
            text = f"tp.monitor goes on without what raised ({what}): {type(error).__name__}: {error}"
            kind = f"{what} {type(error).__name__}"
            if kind not in self._said:
                self._said.add(kind)
                try:
                    warnings.warn(text, RuntimeWarning, stacklevel=2)
                except RuntimeWarning:  # warnings are errors here
                    _log.warning(text)

    # --- steps

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        if self._look is not None and not self._is_inert:
            with self._safely("updates"):
                self._look.before(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_inert:
            return
        self._stepped_ones.add(id(optimizer))
        clock = None if self._clock is None else self._clock()
        if (clock is None or self._since_clock > _FORGOTTEN) and self._counts(optimizer):
            clock, self._clock, self._since_clock = optimizer, weakref.ref(optimizer), 0
        if self._look is not None:
            with self._safely("updates"):
                self._look.stepped(optimizer)
        if optimizer is clock:
            self._since_clock = 0
            self._tick()
        else:
            self._since_clock += 1

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer updates the model."""
        model = None if self._model is None else self._model()
        if model is None:
            return self._model is None
        if optimizer in self._others and self._since_clock % _FORGOTTEN:
            return False
        own = {id(one) for one in model.parameters()}
        if any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
            return True
        self._others.add(optimizer)
        return False

    def _updated(self, scaler: torch.amp.GradScaler) -> None:
        """Called before GradScaler updates its scale: an optimizer that it has not let step was skipped."""
        if self._is_inert:
            return
        self._scaler = weakref.ref(scaler)
        scaled = set(getattr(scaler, "_per_optimizer_states", ()))
        skipped, self._stepped_ones = scaled - self._stepped_ones, self._stepped_ones - scaled
        self.skipped_steps += len(skipped)
        clock = None if self._clock is None else self._clock()
        if skipped and (clock is None or id(clock) in skipped):
            self._tick()

    def _tick(self) -> None:
        """A step has ended."""
        self.steps += 1
        look, self._look = self._look, None
        if look is not None:
            with self._safely("look"):
                look.tracer.__exit__()
                self._finish(look)
        if (self.steps + 1) % self._every == 0:
            with self._safely("look"):
                tracer = Tracer(
                    None if self._model is None else self._model(), True, False, _MOST_CALLS, None, self._searched
                )
                tracer.__enter__()
                self._look = _Look(tracer)

    # --- looks

    def _finish(self, look: _Look) -> None:
        report, step = look.tracer.report, self.steps
        self.looks += 1
        sums = look.sums()
        scaler = None if self._scaler is None else self._scaler()
        if scaler is not None and scaler.is_enabled():
            sums["scale"] = {"": [float(scaler.get_scale())]}
        if not self._ranks.add_up(self.looks, sums):
            return
        if self._ranks.missing:
            self._say_missing()
        if report.dropped:
            _log.info("step %d: figures are those of the first %d calls.", step, _MOST_CALLS)
        found = self._alarms.find(step, sums, look)
        self.alarms += found
        if self._recordings is not None:
            with self._safely("recordings"):
                self._recordings.add(step, report)
                if found or self.looks % _WRITTEN == 1 or self._every >= 1000:
                    self._recordings.write(keep=bool(found))
        figures = _figures(sums)
        figures["training/skipped_steps"] = float(self.skipped_steps)
        figures["training/alarms"] = float(len(self.alarms))
        for alarm in found:
            files = self._recordings.pair() if self._recordings is not None else ""
            text = alarm.text + (f" The looks before and after: torch-promote diff {files}" if files else "")
            _log.warning("step %d: %s", step, text)
            with self._safely("to"):
                self._sink.mark(step, text)
        with self._safely("to"):
            self._sink.write(step, figures)

    def _say_missing(self) -> None:
        missing, self._ranks.missing = self._ranks.missing, []
        with self._safely("ranks"):
            raise TimeoutError(
                f"figures do not have those of the ranks {missing}, which did not look at step {self.steps} within "
                f"{_PATIENCE} s. Open tp.monitor on all ranks."
            )


# --- forks

_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()


def _forked() -> None:
    for one in list(_monitors):
        one._forget(goes_on=one is _of_process)


os.register_at_fork(after_in_child=_forked)
_of_process: Monitor | None = None


# --- one look


class _Look:
    """A step that is traced, and what is measured of its updates."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.expected: set[str] = set()  # the parameters of the optimizers that have stepped
        self.order: list[str] = []  # the modules, as they have run
        self._samples: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        self._optimizers: dict[int, int] = {}  # their numbers, by id
        self._sums: Sums = {"gradients": {}, "parameters": {}}

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step of an optimizer."""
        parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        with unnoticed():
            self._samples = {id(one): (one, _sample(one).clone()) for one in parameters}

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after it, and after the tracer."""
        samples, self._samples = self._samples, {}
        if not self._names:
            self._names = {
                id(one): (f"{path}.{name}" if path else name).replace("_orig_mod.", "")
                for module, path in self.tracer._modules.named()
                for name, one in module._parameters.items()
                if one is not None
            }
        ends = self.tracer.report.ends
        if not samples or not ends:
            return
        updates = _updates(samples)
        suffix = self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        number = -1
        for place, group in enumerate(optimizer.param_groups):
            label = str(group.get("name", f"group_{place}")) + (f"_of_optimizer_{suffix}" if suffix else "")
            for one in group["params"]:
                number += 1
                name = self._names.get(id(one)) or f"parameter {number}"
                self.expected |= {name} if one.requires_grad else set()
                gradient, weight = ends[-1].gradients.get(name), ends[-1].parameters.get(name)
                if id(one) not in updates or gradient is None or weight is None or not gradient.count:
                    continue
                squares = [math.inf if values.l2 is None else values.l2**2 for values in (gradient, weight)]
                numbers = [one.numel(), squares[0], gradient.count, squares[1], *updates[id(one)]]
                self._sums["parameters"][f"{label}\n{name}"] = numbers
                for whole in (label, ""):
                    _add(self._sums["gradients"], whole, gradient.counts())

    def sums(self) -> Sums:
        """What is in the look; see NOTE [ Sums of a look ]."""
        report = self.tracer.report
        found: Sums = {"forward": {}, "backward": {}, "own": {}, "casts": {}, **self._sums}
        casts: Counter[str] = Counter()
        by_module: dict[tuple[str, str], list[float]] = {}
        for number, call in enumerate(report.calls):
            if call.casts:
                casts[call.module] += sum(not cast.reused for cast in call.casts)
            if not call.own or call.phase not in ("forward", "backward") or facts_of(call.name).is_view:
                continue
            for info, values in zip(call.outputs, report.values.get(number, ()), strict=False):
                counts = values.counts()
                if counts is None:
                    continue
                sums = by_module.setdefault((call.phase, call.module), [0.0] * len(counts))
                _add_numbers(sums, counts)
                if call.phase == "forward" and math.prod(info.shape) > 1:
                    _add(found["own"], call.module, counts[:1])
        for (phase, module), sums in by_module.items():
            for path in _with_parents(module):
                _add(found[phase], path, sums)
        for module, made in casts.items():
            for path in _with_parents(module):
                _add(found["casts"], path, [0.0, made])
        self.order = list(found["own"])
        return found

    def peak(self, module: str) -> Call | None:
        """The call of a module's forward with the largest result."""
        report, largest, found = self.tracer.report, -1.0, None
        for number, call in enumerate(report.calls):
            if call.own and call.phase == "forward" and call.module == module and not facts_of(call.name).is_view:
                amax = max((values.amax or 0.0 for values in report.values.get(number, ())), default=-1.0)
                if amax > largest:
                    largest, found = amax, call
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process has."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of a tensor. The distance is odd, so that they are not of one column."""
    elements = _local(tensor).detach()
    if elements.numel() <= _SAMPLED or not elements.is_contiguous():
        return elements
    return elements.view(-1)[:: -(-elements.numel() // _SAMPLED) | 1]


def _updates(samples: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> dict[int, tuple[float, float]]:
    """The squares of the updates of samples, and of what they were before."""
    found: dict[int, tuple[float, float]] = {}
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    with unnoticed():
        for key, (tensor, before) in samples.items():
            old = before.double() if before.dtype.itemsize > 4 else before.float()
            norms = [torch.linalg.vector_norm(one) for one in (_sample(tensor).to(old.dtype) - old, old)]
            by_device.setdefault(old.device, []).append((key, torch.stack(norms).double()))
        for found_there in by_device.values():  # one synchronization for each device
            for (key, _), (change, size) in zip(
                found_there, torch.stack([norms for _, norms in found_there]).tolist(), strict=True
            ):
                found[key] = change**2, size**2
    return found


def _with_parents(module: str) -> list[str]:
    parts = module.split(".") if module else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def _add(sums: dict[str, list[float]], name: str, numbers: Sequence[float] | None) -> None:
    if numbers is not None:
        _add_numbers(sums.setdefault(name, [0.0] * len(numbers)), numbers)


def _add_numbers(sums: list[float], numbers: Sequence[float]) -> None:
    sums[:] = [max(sums[0], numbers[0]), *(a + b for a, b in zip(sums[1:], numbers[1:], strict=True))]


# --- ranks


class _Ranks:
    """Adds up the sums of ranks: see NOTE [ Sums of a look ]."""

    _monitors = 0  # in this process

    def __init__(self) -> None:
        self.missing: list[int] = []  # to be told of
        self._absent: set[int] = set()
        self._monitor = _Ranks._monitors
        _Ranks._monitors += 1

    def add_up(self, look: int, sums: Sums) -> bool:
        """Adds those of the other ranks, in the first rank; returns whether this is it."""
        if not (dist.is_available() and dist.is_initialized()):
            return int(os.environ.get("RANK") or 0) == 0
        rank, size = dist.get_rank(), dist.get_world_size()
        if size == 1:
            return True
        of_job: Any = dist.distributed_c10d
        store = of_job.PrefixStore(f"torch_promote.monitor.{self._monitor}", of_job._get_default_store())
        if rank:
            store.set(f"{look}.{rank}", zlib.compress(json.dumps(sums).encode()))
            store.delete_key(f"{look - 2}.{rank}")  # if the first rank has not read it
            return False
        end = datetime.datetime.now() + datetime.timedelta(seconds=_PATIENCE)
        for other in sorted(set(range(1, size)) - self._absent):
            key = f"{look}.{other}"
            try:
                store.wait([key], max(end - datetime.datetime.now(), datetime.timedelta(milliseconds=10)))
            except RuntimeError:  # DistStoreError is one
                self.missing.append(other)
                self._absent.add(other)
                continue
            for kind, named in json.loads(zlib.decompress(store.get(key))).items():
                for name, numbers in named.items():
                    _add(sums.setdefault(kind, {}), name, numbers)
            store.delete_key(key)
        return True


# --- figures


def _figures(sums: Sums) -> dict[str, float]:
    """The figures by tag, from the sums of all ranks."""
    found: dict[str, float] = {}
    kinds = (("forward", "", module_name), ("backward", "backward_", module_name), ("gradients", "gradient_", _group))
    for kind, prefix, spell in kinds:
        for name, (amax, count, *counts) in sums[kind].items():
            tag = f"{_legal(spell(name))}/{prefix}"
            found[f"{tag}amax"] = amax
            found |= {f"{tag}{figure}": number / count for figure, number in zip(COUNTED, counts, strict=True)}
    for module, (_, made) in sums["casts"].items():
        found[f"{_legal(module_name(module))}/casts"] = made
    groups: dict[str, list[float]] = {}
    for key, (elements, squares, there, weight, change, before) in sums["parameters"].items():
        group, _, name = key.partition("\n")
        whole = [squares / there * elements, weight / there * elements, change, before]
        for one in (name, _group(group), _group("")):
            groups[one] = [a + b for a, b in zip(groups.get(one, [0.0] * 4), whole, strict=True)]
    for name, (gradient, weight, change, before) in groups.items():
        tag = _legal(name)
        found[f"{tag}/gradient"], found[f"{tag}/weight"] = math.sqrt(gradient), math.sqrt(weight)
        if before:
            found[f"{tag}/update"] = math.sqrt(change / before)
    for (scale,) in sums.get("scale", {}).values():
        found["training/scale"] = scale
    return found


def _group(name: str) -> str:
    """What tags say of a group of parameters; "": of all. No module is called `training`, an attribute of modules."""
    return f"training.{name}" if name else "training"


def _legal(name: str) -> str:
    """A name as TensorBoard has it."""
    return re.sub(r"[^-\w.]", "_", name)


# --- alarms


class _Alarms:
    """Finds figures that leave their own past."""

    def __init__(self) -> None:
        self._amax: dict[str, deque[float]] = {}
        self._gradients: dict[str, deque[bool]] = {}  # whether there was one
        self._scales: deque[float] = deque(maxlen=_FALLS + 1)
        self._was_nonfinite = False

    def find(self, step: int, sums: Sums, look: _Look) -> list[Alarm]:
        """Returns the alarms of a look, one of a kind at most."""
        scales = [scale for (scale,) in sums.get("scale", {}).values()]
        found = (
            self._find_loss(step, look),
            self._find_scale(step, scales, look),
            self._find_amax(step, sums["own"], look),
            self._find_zero(step, sums["parameters"], look),
        )
        return [one for one in found if one is not None]

    def _find_loss(self, step: int, look: _Look) -> Alarm | None:
        report = look.tracer.report
        about = report.nonfinite.about_losses(0)
        was, self._was_nonfinite = self._was_nonfinite, bool(about)
        if not about or was:
            return None
        call = report.first_nonfinite
        made = "" if call is None else f" The first such value: {_place(call)}."
        module = "" if call is None else call.module
        return Alarm(step, module_name(module), "loss", f"{about}.{made} {_advice(look, module)}")

    def _find_scale(self, step: int, scales: Sequence[float], look: _Look) -> Alarm | None:
        self._scales.extend(scales)
        past = list(self._scales)
        falls = all(b < a for a, b in itertools.pairwise(past))
        if not scales or not falls or len(past) <= (_FALLS if past[-1] >= 1 else 1):
            return None
        self._scales.clear()
        call = look.tracer.report.first_nonfinite
        made = "torch-promote find-nan names the call that overflows." if call is None else f"{_place(call)} overflows."
        module = "" if call is None else call.module
        text = f"GradScaler's scale keeps falling: {', '.join(f'{one:g}' for one in past)} in the last looks. {made}"
        return Alarm(step, module_name(module), "scale", f"{text} {_advice(look, module)}")

    def _find_amax(self, step: int, own: dict[str, list[float]], look: _Look) -> Alarm | None:
        grown: dict[str, tuple[float, float]] = {}
        for module, (amax,) in own.items():
            past = self._amax.setdefault(module, deque(maxlen=_PAST))
            usual = statistics.median(past) if len(past) >= _LEAST else 0.0
            if usual and (module or len(own) == 1) and _GROWTH * usual <= amax < _MASK:
                grown[module] = amax, usual
                past.clear()  # what it is now may become its past
            past.append(amax)
        if not grown:
            return None
        module, (amax, usual) = next(iter(grown.items()))  # the one that ran first
        call = look.peak(module)
        also = f" So did {len(grown) - 1} modules after it." if len(grown) > 1 else ""
        at = "" if call is None else f" The largest is a result of {_place(call)}."
        text = (
            f"the amax of {module_name(module)} is {amax:.3g}, {amax / usual:.1f} times the {usual:.3g} of the looks "
            f"before.{at}{also} {_advice(look, module)}"
        )
        return Alarm(step, module_name(module), "amax", text)

    def _find_zero(self, step: int, parameters: dict[str, list[float]], look: _Look) -> Alarm | None:
        there = {key.partition("\n")[2] for key, numbers in parameters.items() if numbers[1] > 0}
        zero = []
        for name in sorted(look.expected | there):
            past = self._gradients.setdefault(name, deque(maxlen=_PAST))
            past.append(name in there)
            before, now = list(past)[:-_ZEROS], list(past)[-_ZEROS:]
            if not any(now) and len(before) >= _LEAST and all(before):
                zero.append(name)
        if not zero:
            return None
        places = {module: place for place, module in enumerate(look.order)}
        last = max(zero, key=lambda name: places.get(name.rpartition(".")[0], -1))  # the nearest to the loss
        module = last.rpartition(".")[0]
        also = f" So are those of {len(zero) - 1} more parameters." if len(zero) > 1 else ""
        text = (
            f"the gradient of {last} is 0 in the last {_ZEROS} looks, and was not before.{also} {_advice(look, module)}"
        )
        return Alarm(step, module_name(module), "gradient", text)


def _place(call: Call) -> str:
    """Where a call is, and in what it ran."""
    where = [call.op, call.dtypes, *[f"in {call.module}"] * bool(call.module), short_line(call.line)]
    return ", ".join(filter(None, where))


def _advice(look: _Look, module: str) -> str:
    """The overrides to try in a module."""
    with contextlib.suppress(OptionError):
        explained = explain(look.tracer.report, f"module={module_name(module)}").advice
        tried = [one for one in explained if one.startswith(("To run", "The policy of")) and "instead" not in one]
        if tried:
            return f"Try: {' '.join(tried)}"
    return "No override gives it more range: autocast lowers no op there."


# --- where it goes


class _Sink:
    """Writes figures and marks to TensorBoard, or passes figures to a function."""

    def __init__(self, to: Any) -> None:
        self._is_ours = isinstance(to, str | os.PathLike)
        self._to: Any = None if self._is_ours else to
        self.folder: str | None = None
        if self._is_ours:
            check_tensorboard()
            self.folder = os.path.abspath(os.fspath(to))
            if os.path.exists(self.folder) and not os.path.isdir(self.folder):
                raise OptionError(f"`to` is the folder of TensorBoard, and {self.folder!r} is a file.")
        elif hasattr(to, "add_scalar"):
            self.folder = getattr(to, "log_dir", None) or getattr(to, "logdir", None)
        elif not callable(to):
            raise OptionError(
                f"`to` is a SummaryWriter, the path of a folder for TensorBoard, or a function f(step, figures), "
                f"got {to!r}."
            )

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Writes the figures of a step."""
        writer = self._writer()
        if not hasattr(writer, "add_scalar"):
            writer(step, figures)
            return
        if hasattr(writer, "_get_file_writer"):  # of PyTorch: one event of all figures, at a tenth of the time
            from tensorboard.compat.proto.summary_pb2 import Summary

            summary = Summary(value=[Summary.Value(tag=tag, simple_value=one) for tag, one in figures.items()])
            writer._get_file_writer().add_summary(summary, step)
        else:
            for tag, one in figures.items():
                writer.add_scalar(tag, one, step)
        writer.flush()

    def mark(self, step: int, text: str) -> None:
        """Writes an alarm, if it goes to TensorBoard."""
        writer = self._writer()
        if hasattr(writer, "add_text"):
            writer.add_text("alarms", text, step)

    def _writer(self) -> Any:
        if self._to is None:
            from torch.utils.tensorboard import SummaryWriter

            self._to = SummaryWriter(self.folder)
        return self._to

    def close(self) -> None:
        """Closes what it has opened."""
        if self._is_ours and self._to is not None:
            self._to.close()
            self._to = None

    def forget(self) -> None:
        """Called in a forked process: the writer's thread and file are the parent's."""
        if self._is_ours:
            self._to = None


def check_tensorboard() -> None:
    """Raises MissingPackageError if tensorboard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"a folder for TensorBoard needs tensorboard, which cannot be imported ({error}): pip install tensorboard. "
            "A function as `to` needs no package."
        ) from error


class _Recordings:
    """The recordings of the last looks: two in memory, others on disk, and of those so many at most."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.last: deque[tuple[int, TraceReport]] = deque(maxlen=2)
        self._folder, self._keep = folder.absolute(), keep
        self._written: deque[Path] = deque()  # the oldest first
        self._kept: list[Path] = []  # for alarms

    def add(self, step: int, report: TraceReport) -> None:
        """Adds the recording of a look."""
        self.last.append((step, report))

    def write(self, keep: bool = False) -> None:
        """Writes what is in memory; `keep` it for an alarm, if there is room for one more."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for step, report in self.last:
            path = self._path(step)
            if not path.exists():
                report.save(path)
                self._written.append(path)
            if keep and path in self._written and len(self._kept) < self._keep:
                self._written.remove(path)
                self._kept.append(path)
        while len(self._written) > self._keep:
            self._written.popleft().unlink(missing_ok=True)

    def pair(self) -> str:
        """The files of the last two looks."""
        return " ".join(os.path.relpath(self._path(step)) for step, _ in self.last) if len(self.last) == 2 else ""

    def _path(self, step: int) -> Path:
        return self._folder / f"step{step:08d}{SUFFIX}"


# --- a whole process


def use_environment() -> None:
    """Monitors this process, for `torch-promote run --monitor`."""
    global _of_process
    options = json.loads(os.environ[VARIABLE])
    program = options.pop("process")
    folder = options["to"]
    if program not in (os.getpid(), os.getppid()) and "RANK" not in os.environ:
        options["to"] = os.path.join(folder, f"pid{os.getpid()}")
    one = _of_process = Monitor(None, options["to"], options["every"], None, 8, 0)
    running = one._block()
    running.__enter__()
    atexit.register(running.__exit__, None, None, None)
