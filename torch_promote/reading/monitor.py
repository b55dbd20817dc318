"""`monitor`: traces one step in so many with values, and writes figures of it to TensorBoard, for weeks.

NOTE [ A look ]
A step is what runs between two steps of the first optimizer that updates the model; one that GradScaler skips counts. A
look is a `Tracer` around one step, without the calls of optimizers. Between looks, there is a hook of optimizers, and
one of `GradScaler.update`. With every=100, looks are at the steps 100, 200, ... (from 1), so that what programs do
after every so many steps, such as an evaluation, is outside of them.

NOTE [ Sums ]
A look becomes lists of numbers, by kind and name. The first of a list is a maximum, all others are sums, and so are
lists of several ranks added up. The norm of a tensor, replicated (DDP) or sharded (FSDP2), is the root of the squares
that the ranks have, over the number of elements that they have, times the number of all its elements. Ranks pass sums
through the store of the process group, not through a collective: a rank without a monitor stops no other.

    forward, backward   by module: `Values.counts` of results, with those of the modules inside
    own                 by module: the amax of the results of its own forward
    casts               by module: 0, the casts made
    gradients           by group of parameters: `Values.counts`
    parameters          by group and name: elements, the gradient's squares and elements, the weight's squares, and in a
                        sample of the elements the squares of the update and of the weight before
    scale               GradScaler's
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
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
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from torch_promote.errors import MissingPackageError, OptionError, say, shown
from torch_promote.observe.call import Call
from torch_promote.observe.ops import facts_of, unnoticed
from torch_promote.observe.places import check_model
from torch_promote.observe.surroundings import watch_scalers, watch_steps
from torch_promote.policy.overrides import selects
from torch_promote.reading.explanation import explain
from torch_promote.reading.trace import Tracer
from torch_promote.reading.trace_report import TraceReport
from torch_promote.recording.file import SUFFIX
from torch_promote.recording.program_state import Searched
from torch_promote.recording.values import COUNTED
from torch_promote.reference.dtypes import LOWER_DTYPES
from torch_promote.report.base import ancestors, module_name, short_line
from torch_promote.report.block import block

#: Set by `torch-promote run --monitor`: `to`, `every`, and whether a process is a child of the program, as JSON.
VARIABLE = "TORCH_PROMOTE_MONITOR"
Sums: TypeAlias = dict[str, dict[str, list[float]]]
_log = logging.getLogger("torch_promote.monitor")

#: The calls that a look has one by one, and the elements of a tensor in which its update is measured.
_MOST_CALLS, _SAMPLED = 200_000, 1 << 16
#: The recordings on disk, those that alarms keep beside them, and how many looks there are to one that is written even
#: if nothing happens. The last two are in memory.
_ON_DISK, _FOR_ALARMS, _WRITTEN = 8, 8, 10
#: The seconds in which other ranks have to add their sums. One that does not is not waited for again.
_PATIENCE = 60
#: The looks that are a figure's past, and how many there have to be.
_PAST, _LEAST = 8, 3
#: An amax that is so many times that of its past is an alarm. Growth over several looks is one from the second number
#: on: below, it is that of a training that begins. Beyond the third, it is a mask's.
_GROWTH, _LARGE, _MASK = 8.0, 32.0, 1e30
#: So many looks in a row in which a gradient is 0, or the scale has fallen, are an alarm.
_ZEROS, _FALLS = 2, 3
_FIND_NAN = "What this step has does not tell the cause: torch-promote find-nan names the call."


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


def _check(model: object, every: object, start: object, **_: object) -> None:
    check_model(model, "monitor")
    for name, value, least in (("every", every, 1), ("start", start, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise OptionError(f"`{name}` must be an int of at least {least}, got {shown(value)}.")


@block(_check)
def monitor(
    model: nn.Module | None = None,
    *,
    to: Any,
    every: int = 100,
    looks: str | os.PathLike[str] | None = None,
    start: int = 0,
) -> Iterator[Monitor]:
    """Looks at one step of a training in `every`, as `trace(values=True)` does, and writes figures of it.

    Between looks nothing observes the training. Figures that leave their own past become alarms: a line in the log
    ("torch_promote.monitor"), a text in TensorBoard, and an entry of `alarms`. Open it on all ranks; the first writes.

    Args:
        model: The module that the paths of modules start from, which optimizers of the training update. None: the first
            module that is called in a look outside of other modules; the first optimizer that steps counts then.
        to: A `SummaryWriter`, the path of a folder for TensorBoard, or a function `f(step, {"module/figure": number})`.
        every: The number of steps from one look to the next.
        looks: The folder for recordings of looks, 16 at most. By default "looks" in the folder of TensorBoard; none for
            a function.
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
        >>> with tp.monitor(model, every=2, to=lambda step, figures: print(step, figures["weight/gradient"])):
        ...     for _ in range(4):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(3, 3)).sum().backward()
        ...         optimizer.step()
        2 10.39...
        4 10.39...
    """
    one = Monitor(model, to, every, looks, start)
    del model  # it may be destroyed before the block ends
    _open.add(one)
    try:
        with watch_steps(one._stepped, one._before), watch_scalers(one._updated):
            yield one
    finally:
        _open.discard(one)
        one._close()


class Monitor:
    """The monitor of a block of `monitor`.

    Attributes:
        alarms: What it noticed so far: a list of `Alarm`, in the first of several ranks.
        steps: The number of steps so far, with those that GradScaler skipped.
        skipped_steps: The number of steps of optimizers that GradScaler skipped. It lets fused optimizers skip
            themselves, which does not count.
        looks: The number of looks so far.
    """

    def __init__(
        self, model: nn.Module | None, to: Any, every: int, looks: str | os.PathLike[str] | None, start: int
    ) -> None:
        self.alarms: list[Alarm] = []
        self.steps: int = start
        self.skipped_steps: int = 0
        self.looks: int = 0
        self._start = start
        self._every = every
        self._model: Callable[[], nn.Module | None] = (lambda: None) if model is None else weakref.ref(model)
        self._sink = _Sink(to)
        folder = looks if looks is not None or self._sink.folder is None else os.path.join(self._sink.folder, "looks")
        self._recordings = None if folder is None else _Recordings(Path(folder).absolute())
        self._clock: Callable[[], torch.optim.Optimizer | None] = lambda: None  # the optimizer whose steps count
        self._stepped_ones: set[int] = set()  # optimizers, by id, since GradScaler was updated
        self._scaler: Callable[[], torch.amp.GradScaler | None] = lambda: None
        self._look: _Look | None = None
        self._past = _Past()
        self._searched: Searched = weakref.WeakKeyDictionary()
        self._absent: set[int] = set()  # ranks
        self._number = next(_numbers)
        self._is_inert = False  # in a forked process
        self._warned: set[str] = set()

    def _close(self) -> None:
        if self._is_inert:
            return
        look, self._look = self._look, None
        with self._safely("the last look"):
            if look is not None:  # the step has not ended
                look.tracer.__exit__(None, None, None)
                if self._recordings is not None and look.tracer.report.total.calls:
                    self._recordings.last.append((self.steps + 1, look.tracer.report))
        if self.steps > self._start and not self.looks:
            text = "tp.monitor has looked at no step of %d: looks are at %d, %d, ... Pass a smaller `every` (--every)."
            _log.warning(text, self.steps - self._start, self._every, 2 * self._every)
        with self._safely("recordings"):
            if self._recordings is not None and self.looks:
                self._recordings.write()
        with self._safely("to"):
            self._sink.close()

    def _forget(self) -> None:
        """Called in a forked process, to which the parent's look, writer and recordings do not belong."""
        look, self._look, self._is_inert = self._look, None, True
        if look is not None:
            with contextlib.suppress(Exception):
                look.tracer._block.close()

    @contextlib.contextmanager
    def _safely(self, what: str) -> Iterator[None]:
        """Lets the training go on if PyTorch, a disk or the user's function raises. It warns once of each of these."""
        try:
            yield
        except Exception as error:
            text = f"tp.monitor goes on without {what}, which raised {type(error).__name__}: {error}"
            if what not in self._warned:
                self._warned.add(what)
                try:
                    warnings.warn(text, RuntimeWarning, stacklevel=2)
                except RuntimeWarning:  # warnings are errors here
                    _log.warning(text)

    # --- steps

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        if self._look is not None:
            with self._safely("updates"):
                self._look.before(optimizer)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_inert:
            return
        self._stepped_ones.add(id(optimizer))
        if self._look is not None:
            with self._safely("updates"):
                self._look.stepped(optimizer)
        if self._clock() is None and self._updates_model(optimizer):
            self._clock = weakref.ref(optimizer)
        if self._clock() is optimizer:
            self._end_step()

    def _updates_model(self, optimizer: torch.optim.Optimizer) -> bool:
        model = self._model()
        own = {id(one) for one in (model.parameters() if model is not None else ())}
        return model is None or any(id(one) in own for group in optimizer.param_groups for one in group["params"])

    def _updated(self, scaler: torch.amp.GradScaler) -> None:
        """Called before GradScaler updates its scale: an optimizer that it has not let step was skipped."""
        if self._is_inert:
            return
        self._scaler = weakref.ref(scaler)
        scaled = set(getattr(scaler, "_per_optimizer_states", ()))
        skipped, self._stepped_ones = scaled - self._stepped_ones, self._stepped_ones - scaled
        self.skipped_steps += len(skipped)
        clock = self._clock()
        if skipped and (clock is None or id(clock) in skipped):
            if self._look is not None:
                self._look.is_skipped = True
            self._end_step()

    def _end_step(self) -> None:
        self.steps += 1
        look, self._look = self._look, None
        with self._safely("a look"):
            if look is not None:
                look.tracer.__exit__(None, None, None)
                self._finish(look)
        with self._safely("a look"):
            if (self.steps + 1) % self._every == 0:
                tracer = Tracer(
                    self._model(), True, False, _MOST_CALLS, None, searched=self._searched, skips_optimizers=True
                )
                tracer.__enter__()
                self._look = _Look(tracer)

    def _finish(self, look: _Look) -> None:
        self.looks += 1
        sums = look.sums()
        scaler = self._scaler()
        if scaler is not None and scaler.is_enabled():
            sums["scale"][""] = [float(scaler.get_scale())]
        if not self._add_up(sums):
            return
        alarms = self._past.alarms_of(self.steps, sums, look)
        self.alarms += alarms
        files = ""
        with self._safely("recordings"):
            if self._recordings is not None:
                self._recordings.last.append((self.steps, look.tracer.report))
                if alarms:
                    self._recordings.write(keep=True)
                elif (self.looks - 1) % _WRITTEN == 0:
                    self._recordings.write(1)
                files = self._recordings.pair()
        with self._safely("to"):
            counted = {"training/skipped_steps": self.skipped_steps, "training/alarms": len(self.alarms)}
            self._sink.write(self.steps, _figures(sums) | {tag: float(number) for tag, number in counted.items()})
        for alarm in alarms:
            text = f"{alarm.text} The looks before and after: torch-promote diff {files}" if files else alarm.text
            _log.warning("tp.monitor, step %d: %s", self.steps, text)
            with self._safely("to"):
                self._sink.mark(self.steps, text)

    def _add_up(self, sums: Sums) -> bool:
        """Adds the sums of the other ranks, in the first rank; returns whether this is it."""
        if not (dist.is_available() and dist.is_initialized()):
            return int(os.environ.get("RANK") or 0) == 0
        of_job: Any = dist.distributed_c10d
        store = of_job.PrefixStore(f"torch_promote.monitor.{self._number}", of_job._get_default_store())
        if dist.get_rank():
            key = f"{dist.get_rank()}.{{}}"
            store.set(key.format(self.looks), zlib.compress(json.dumps(sums).encode()))
            store.delete_key(key.format(self.looks - 2))  # if the first rank has not read it
            return False
        keys = {f"{rank}.{self.looks}": rank for rank in range(1, dist.get_world_size()) if rank not in self._absent}
        with contextlib.suppress(RuntimeError):  # one is late
            store.wait([*keys], datetime.timedelta(seconds=_PATIENCE))
        late = [rank for key, rank in keys.items() if not store.check([key])]
        for key in (key for key, rank in keys.items() if rank not in late):
            for kind, named in json.loads(zlib.decompress(store.get(key))).items():
                for name, numbers in named.items():
                    _add(sums[kind], name, numbers)
            store.delete_key(key)
        self._absent.update(late)
        with self._safely(f"the figures of the ranks {late}"):
            if late:
                raise TimeoutError(f"no look at step {self.steps} in {_PATIENCE} s. Open tp.monitor on all ranks.")
        return True


_numbers = itertools.count()
_open: weakref.WeakSet[Monitor] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: list(map(Monitor._forget, list(_open))))


class _Look:
    """A step that is traced, and what is measured of its updates."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.is_skipped = False  # by GradScaler, whose scale is then too large
        self.expected: set[str] = set()  # the parameters of the optimizers that have stepped
        self._samples: dict[int, torch.Tensor] = {}  # of parameters before the step, by id
        self._optimizers: dict[int, int] = {}  # their numbers, by id
        self._sums: Sums = defaultdict(dict)

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before a step of an optimizer."""
        with unnoticed():
            self._samples = {
                id(one): _sample(one).clone()
                for group in optimizer.param_groups
                for one in group["params"]
                if one.grad is not None
            }

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        return {
            id(one): f"{path}.{name}".removeprefix(".").replace("_orig_mod.", "")
            for module, path in self.tracer._modules.named()
            for name, one in module._parameters.items()
        }

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after it, and after the tracer."""
        ends, place = self.tracer.report.ends, self._optimizers.setdefault(id(optimizer), len(self._optimizers))
        numbers = itertools.count()
        for index, group in enumerate(optimizer.param_groups if ends else ()):
            label = str(group.get("name", f"group_{index}")) + f"_of_optimizer_{place}" * (place > 0)
            for one in group["params"]:
                number = next(numbers)
                name = self._names.get(id(one)) or f"parameter {number}"  # as the recording calls it
                if one.requires_grad:
                    self.expected.add(name)
                before = self._samples.pop(id(one), None)
                gradient, weight = ends[-1].gradients.get(name), ends[-1].parameters.get(name)
                if before is None or gradient is None or weight is None or not gradient.count:
                    continue
                squares = [
                    (values.l2 if values.l2 is not None and values.is_finite else math.inf) ** 2
                    for values in (gradient, weight)
                ]
                with unnoticed():
                    norms = [float(torch.linalg.vector_norm(part.float())) for part in (_sample(one) - before, before)]
                of_one = [one.numel(), squares[0], gradient.count, squares[1], *(norm**2 for norm in norms)]
                self._sums["parameters"][f"{label}\n{name}"] = of_one
                for whole in (label, ""):
                    _add(self._sums["gradients"], whole, gradient.counts())

    def sums(self) -> Sums:
        """What is in the look; see NOTE [ Sums ]."""
        by_module: dict[tuple[str, str], list[float]] = {}
        for number, call in enumerate(self.tracer.report.calls):
            if call.casts:
                _add(by_module, ("casts", call.module), [0.0, sum(not cast.reused for cast in call.casts)])
            if call.own and call.phase in ("forward", "backward") and not facts_of(call.name).is_view:
                for values in self.tracer.report.values.get(number, ()):
                    _add(by_module, (call.phase, call.module), values.counts())
        for (kind, module), numbers in by_module.items():
            for path in ancestors(module):
                _add(self._sums[kind], path, numbers)
            if kind == "forward":
                self._sums["own"][module] = numbers[:1]
        return self._sums

    def largest(self, module: str) -> Call | None:
        """The call of a module's own forward with the largest result."""
        report = self.tracer.report
        calls = (call for call in report.calls if (call.module, call.phase, call.own) == (module, "forward", True))
        own = (call for call in calls if report.values_of(call))
        return max(own, key=lambda call: max(one.amax or 0.0 for one in report.values_of(call)), default=None)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of the part of a tensor that this process has. Their distance is odd: they are not of one column."""
    elements: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if elements.numel() <= _SAMPLED or not elements.is_contiguous():
        return elements
    return elements.view(-1)[:: -(-elements.numel() // _SAMPLED) | 1]


def _add(sums: dict[Any, list[float]], name: Any, numbers: Sequence[float] | None) -> None:
    if numbers is not None:
        known = sums.get(name) or [0.0] * len(numbers)
        sums[name] = [max(known[0], numbers[0]), *map(sum, zip(known[1:], numbers[1:], strict=True))]


def _tag(name: str) -> str:
    """A name as TensorBoard has it."""
    return re.sub(r"[^-\w.]", "_", name)


def _figures(sums: Sums) -> dict[str, float]:
    """The figures by tag. Groups are "training.NAME": no module is called `training`, which is an attribute."""
    found: dict[str, float] = {}
    for kind, prefix in (("forward", ""), ("backward", "backward_"), ("gradients", "gradient_")):
        for name, (amax, count, *counts) in sums[kind].items():
            tag = _tag(f"training.{name}".rstrip(".") if kind == "gradients" else module_name(name))
            found[f"{tag}/{prefix}amax"] = amax
            found |= {f"{tag}/{prefix}{what}": number / count for what, number in zip(COUNTED, counts, strict=True)}
    found |= {f"{_tag(module_name(module))}/casts": made for module, (_, made) in sums["casts"].items()}
    norms: dict[str, list[float]] = {}
    for key, (elements, gradient, there, weight, change, before) in sums["parameters"].items():
        group, _, name = key.partition("\n")
        for whole in (name, f"training.{group}", "training"):
            _add(norms, whole, [0.0, gradient / there * elements, weight / there * elements, change, before])
    for name, (_, gradient, weight, change, before) in norms.items():
        found |= {f"{_tag(name)}/gradient": math.sqrt(gradient), f"{_tag(name)}/weight": math.sqrt(weight)}
        if before:
            found[f"{_tag(name)}/update"] = math.sqrt(change / before)
    for (scale,) in sums["scale"].values():
        found["training/scale"] = scale
    return found


_Found: TypeAlias = tuple[str, str, Call | None]  # a module, a sentence, and the call that it is about


class _Past:
    """The past of figures, and what leaves it."""

    def __init__(self) -> None:
        self._amax: dict[str, deque[float]] = {}
        self._gradients: dict[str, deque[bool]] = {}  # whether there was one
        self._scales: deque[float] = deque(maxlen=_FALLS + 1)
        self._was_nonfinite = False

    def alarms_of(self, step: int, sums: Sums, look: _Look) -> list[Alarm]:
        """Returns the alarms of a look, one of a kind at most, and adds the look to the past."""
        found = {
            "loss": None if look.is_skipped else self._loss(look.tracer.report),
            "scale": self._scale(sums["scale"], look.tracer.report),
            "amax": self._growth(sums["own"], look),
            "gradient": self._zero(sums, look),
        }
        return [
            Alarm(step, module_name(alarm[0]), figure, alarm[1] + _advice(look.tracer.report, *alarm))
            for figure, alarm in found.items()
            if alarm is not None
        ]

    def _loss(self, report: TraceReport) -> _Found | None:
        about, first, was = report.nonfinite.about_losses(0), report.first_nonfinite, self._was_nonfinite
        self._was_nonfinite = bool(about)
        if not about or was:
            return None
        before = [one.name for one in report.sources if one.kind == "parameter" and not one.values.is_finite]
        if before:
            return "", f"{about}, and so was {before[0]} before this step. {_FIND_NAN}", None
        return (first.module, f"{about}, first in {_place(first)}.", first) if first else ("", f"{about}.", None)

    def _scale(self, scales: dict[str, list[float]], report: TraceReport) -> _Found | None:
        self._scales.extend(scale for (scale,) in scales.values())
        past, first = list(self._scales), report.first_nonfinite
        enough = len(past) > (_FALLS if past and past[-1] >= 1 else 1)
        if not scales or not enough or any(a <= b for a, b in itertools.pairwise(past)):
            return None
        self._scales.clear()
        text = f"GradScaler's scale keeps falling: {', '.join(f'{one:g}' for one in past)} in the last looks."
        if first is None:
            return "", f"{text} {_FIND_NAN}", None
        return first.module, f"{text} What overflowed first in this step: {_place(first)}.", first

    def _growth(self, own: dict[str, list[float]], look: _Look) -> _Found | None:
        grown: dict[str, tuple[float, float]] = {}
        for module, (amax,) in own.items():
            past = self._amax.setdefault(module, deque(maxlen=_PAST))
            usual = max(past) if len(past) >= _LEAST else 0.0
            if len(past) == _PAST and amax >= _LARGE:
                usual = statistics.median(past)
            if usual and (module or len(own) == 1) and _GROWTH * usual <= amax < _MASK:
                grown[module] = amax, usual
        for module, (amax,) in own.items():
            past = self._amax[module]
            if module in grown or (grown and past and amax > 2 * max(past)):  # told of once, with what grew with it
                past.clear()
            past.append(amax)
        if not grown:
            return None
        module, (amax, usual) = next(iter(grown.items()))  # the one that ran first
        call = look.largest(module)
        at = "" if call is None else f", in {_place(call)}"
        also = f" Modules after it that grew so, too: {len(grown) - 1}." if len(grown) > 1 else ""
        text = f"the amax of {module_name(module)} is {amax:.3g}{at}: {amax / usual:.1f} times that of the looks before"
        return module, f"{text} ({usual:.3g}).{also}", call

    def _zero(self, sums: Sums, look: _Look) -> _Found | None:
        there = {key.partition("\n")[2] for key, numbers in sums["parameters"].items() if numbers[1] > 0}
        zero = []
        for name in sorted(look.expected | there):
            if name not in there and name.rpartition(".")[0] not in sums["own"]:
                continue  # its module has not run, such as an expert without a token
            past = self._gradients.setdefault(name, deque(maxlen=_PAST))
            past.append(name in there)
            before, now = list(past)[:-_ZEROS], list(past)[-_ZEROS:]
            if not any(now) and len(before) >= _LEAST and all(before):
                zero.append(name)
        if not zero:
            return None
        # Of the modules without any gradient, the nearest to the loss.
        some = {name.rpartition(".")[0] for name in there}
        places = {module: place for place, module in enumerate(sums["own"])}
        last = max(zero, key=lambda name: ((path := name.rpartition(".")[0]) not in some, places.get(path, -1)))
        also = f" Others that became 0 with it: {len(zero) - 1}." if len(zero) > 1 else ""
        text = f"the gradient of {last} is 0 in {_ZEROS} looks, and was not before.{also}"
        return last.rpartition(".")[0], text, None


def _place(call: Call) -> str:
    """Where a call is, and in what it ran."""
    return ", ".join(filter(None, (call.op, call.phase, module_name(call.module), short_line(call.line), call.dtypes)))


def _advice(report: TraceReport, module: str, text: str, call: Call | None) -> str:
    """The overrides to try in a module, after the text of an alarm."""
    if text.endswith(_FIND_NAN):
        return ""
    if call is not None and call.phase == "forward" and any(one.dtype in LOWER_DTYPES for one in call.outputs):
        key = call.op.removeprefix("aten::")
        if selects(key, "fp32", call.name):
            own = f'tp.set_module_policy(model, {{"{module}": {{"{key}": "fp32"}}}}), or ' * bool(module)
            return f' Try: {own}my_autocast(overrides={{"{key}": "fp32"}}).'
    with contextlib.suppress(OptionError):
        advice = explain(report, f"module={module_name(module)}").advice
        tried = [one for one in advice if one.startswith(("To run", "The policy of")) and "instead" not in one]
        if tried:
            return f" Try: {' '.join(tried)}"
    return " No override gives it more range: autocast lowers no op there."


class _Sink:
    """Writes figures and marks to TensorBoard, or passes figures to a function."""

    def __init__(self, to: Any) -> None:
        self._to, self._is_ours = to, isinstance(to, str | os.PathLike)
        self.folder: str | None = getattr(to, "log_dir", None) or getattr(to, "logdir", None)
        if self._is_ours:
            self.folder = check_folder(to)
        elif not (hasattr(to, "add_scalar") or callable(to)):
            raise OptionError(
                "`to` is a SummaryWriter, the path of a folder for TensorBoard, or a function f(step, figures), got "
                f"{shown(to)}."
            )

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Writes the figures of a step."""
        writer = self._writer
        if hasattr(writer, "_get_file_writer"):  # PyTorch's: one event for all figures, in a tenth of the time
            from tensorboard.compat.proto.summary_pb2 import Summary

            summary = Summary(value=[Summary.Value(tag=tag, simple_value=one) for tag, one in figures.items()])
            writer._get_file_writer().add_summary(summary, step)
        elif hasattr(writer, "add_scalar"):
            for tag, one in figures.items():
                writer.add_scalar(tag, one, step)
        else:
            writer(step, figures)

    def mark(self, step: int, text: str) -> None:
        """Writes an alarm, if it goes to TensorBoard."""
        if hasattr(self._writer, "add_text"):
            self._writer.add_text("alarms", text, step)
            self._writer.flush()

    @functools.cached_property
    def _writer(self) -> Any:
        if not self._is_ours:
            return self._to
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self.folder)  # in the first rank alone

    def close(self) -> None:
        """Closes what it has opened."""
        if self._is_ours and "_writer" in vars(self):
            self._writer.close()


def check_folder(path: str | os.PathLike[str]) -> str:
    """Returns the absolute path of a folder for TensorBoard, or raises if that is missing, or it is a file."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            f"TensorBoard's files need tensorboard, which cannot be imported ({error}): pip install tensorboard. "
            "tp.monitor(to=FUNCTION) needs no package."
        ) from error
    if os.path.exists(path) and not os.path.isdir(path):
        raise OptionError(f"a folder for TensorBoard is asked for, and {os.fspath(path)!r} is a file. Name a folder.")
    return os.path.abspath(path)


class _Recordings:
    """The recordings of the last looks: two in memory, and some of them on disk."""

    def __init__(self, folder: Path) -> None:
        self.last: deque[tuple[int, TraceReport]] = deque(maxlen=2)
        self._folder = folder
        self._kept: dict[Path, bool] = {}  # the files, the oldest first, and whether an alarm keeps them

    def write(self, number: int = 2, keep: bool = False) -> None:
        """Writes the last ones in memory; `keep` them for an alarm, if there is room."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for step, report in list(self.last)[-number:]:
            path = self._path(step)
            if path not in self._kept:
                report.save(path)
            self._kept[path] = self._kept.get(path, False) or (keep and sum(self._kept.values()) < _FOR_ALARMS)
        for path in [path for path, kept in self._kept.items() if not kept][:-_ON_DISK]:
            path.unlink(missing_ok=True)
            del self._kept[path]

    def pair(self) -> str:
        """The files of the last two looks, if they are written."""
        paths = [self._path(step) for step, _ in self.last]
        return " ".join(map(os.path.relpath, paths)) if len(paths) == 2 and all(one.exists() for one in paths) else ""

    def _path(self, step: int) -> Path:
        return self._folder / f"step{step:08d}{SUFFIX}"


def use_environment() -> None:
    """Monitors this process, for `torch-promote run --monitor`. A child that is no rank has a folder of its own."""
    asked = json.loads(os.environ[VARIABLE])
    is_alone = asked["is_child"] and "RANK" not in os.environ
    os.environ[VARIABLE] = json.dumps({**asked, "is_child": True})
    folder = os.path.join(asked["to"], f"pid{os.getpid()}" if is_alone else "")
    running = monitor(to=folder, every=asked["every"])
    of_process = running.__enter__()
    tells = not asked["is_child"] and os.environ.get("RANK", "0") == "0"
    atexit.register(_end, running, of_process, os.getpid() if tells else 0)


def _end(running: contextlib.AbstractContextManager[Monitor], one: Monitor, process: int) -> None:
    """Ends the monitor of a process, and says what the one of `torch-promote run --monitor` has found."""
    running.__exit__(None, None, None)
    if process != os.getpid() or (one.steps and not one.looks):  # of which there is a warning
        return
    folder = os.path.relpath(one._sink.folder or "")
    text = f"looked at {one.looks:,} of {one.steps:,} steps, alarms: {len(one.alarms):,}. To see them: `tensorboard "
    text += f"--logdir {folder}`. Recordings of looks: {os.path.join(folder, 'looks')}"
    text = text if one.steps else "looked at nothing: no optimizer stepped"
    say(f"torch-promote: the monitor {text}.")
