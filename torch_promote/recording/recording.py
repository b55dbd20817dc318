"""`Recording`: the calls of a block, what they read and computed, and their sums by op, module and line."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import torch

from torch_promote.errors import OptionError, did_you_mean, explains_arguments, shown
from torch_promote.extension import fork_safe_lock
from torch_promote.observe.call import FALLBACK, Argument, Call, Cast, Phase, TensorInfo, Unseen
from torch_promote.policy.op_names import closest_ops
from torch_promote.recording.values import NonfiniteValues, Values
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import Column, Table, load_renderer, module_name, table_html

#: The name in `Recording.environment` of the optimizer steps that were asked for: "3:5", "3:".
STEPS = "optimizer steps"

#: Held while a recording changes. An op that a hook runs meanwhile comes back, and a child must not inherit it locked.
recording_lock: threading.RLock = fork_safe_lock()


class Read(NamedTuple):
    """What a call of the program reads from the memory of one of its tensors.

    Attributes:
        written_by: What wrote that memory: numbers of calls, oldest first, or -1 - i for `TraceReport.sources[i]`.
            Empty if it is unknown.
        digest: The digest of the elements that the call reads, as `Values.digest`; "" if it is unknown.
    """

    written_by: tuple[int, ...] = ()
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that calls of the program read, and that none of the recorded calls made as it is.

    A parameter, buffer or gradient is one again in each step in which it has changed without a recorded call.

    Attributes:
        kind: "parameter" or "buffer" of the model, "gradient" of a parameter, "state" of an optimizer or GradScaler,
            "input" for any other tensor.
        name: The path of a parameter or buffer in the model, "blocks.3.attn.q.weight", of a gradient's parameter, or
            the name of a state, "exp_avg of 0.weight"; "" for an input.
        info: Its name among the arguments of the first call that read it, its dtype, shape, device and strides.
        values: Its values at that time.
        written_by: Numbers of the recorded calls that had written its memory before: to initialize a parameter, or
            before other code changed it.
        step: The number of optimizer steps before.
        projections: Of the parameters and buffers of the first step, what tells their rows from others, and their
            columns: products with random numbers, as float32 in Base64.
    """

    kind: Literal["parameter", "buffer", "gradient", "state", "input"]
    name: str
    info: TensorInfo
    values: Values
    written_by: tuple[int, ...] = ()
    step: int = 0
    projections: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer, of the schedulers of its learning rate, and of the GradScalers of the program.

    Attributes:
        step: The number of optimizer steps before.
        tensors: The values of its tensors, by names such as "exp_avg of 0.weight".
        numbers: The other entries: "lr of group 0", "last_epoch of StepLR", "growth_interval of GradScaler".
    """

    step: int
    tensors: Mapping[str, Values] = field(default_factory=dict)
    numbers: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """The end of an optimizer step, or of the block.

    Attributes:
        calls: The number of calls so far.
        losses: The values of the losses since the step before.
        gradients: The values of the gradients by the names of the parameters.
        parameters: The values of the parameters that the optimizer has updated, by name.
        rng: Digests of the states of the random number generators at that time: "cpu", "cuda:0", "python", "numpy".
    """

    calls: int
    losses: tuple[Values, ...] = ()
    gradients: Mapping[str, Values] = field(default_factory=dict)
    parameters: Mapping[str, Values] = field(default_factory=dict)
    rng: Mapping[str, str] = field(default_factory=dict)


@dataclass
class CallGroup:
    """The sums over the calls of an op, a module or a line.

    Attributes:
        key: The op's name with its overload, the module's path or the line.
        calls: The number of calls, including those of composite ops.
        dtypes: The number of calls by dtypes, such as "float32 -> bfloat16 -> bfloat16" (inputs, cast inputs, outputs).
        policies: The number of calls by policy and its source, such as "lower_precision_fp: PyTorch's table".
        phases: The number of calls by phase.
        rules: The number of calls without a policy, by what applied instead: "promotion rule torch", a library's
            kernel.
        casts: The number of casts made.
        reused: The number of casts reused.
        bytes: The size of the casts that were made, in bytes.
        repeated: The number of casts made of a tensor that had been cast to that dtype before.
        repeated_bytes: Their size in bytes.
        cast_time: The time of the casts on the host, in nanoseconds.
        duration: The time of the calls on the host, in nanoseconds. A composite op's call includes those of its ops.
        errors: The number of calls of the program that raised, without those inside of another one.
    """

    key: str
    calls: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    policies: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    casts: int = 0
    reused: int = 0
    bytes: int = 0
    repeated: int = 0
    repeated_bytes: int = 0
    cast_time: int = 0
    duration: int = 0
    errors: int = 0

    def add(self, call: Call) -> None:
        """Adds a call."""
        self.calls += 1
        self.dtypes[call.dtypes] += 1
        self.phases[call.phase] += 1
        if call.policy is not None:
            self.policies[f"{call.policy_name}: {call.reason}"] += 1
        elif call.policy_source:
            self.rules[call.policy_source] += 1
        self.cast_time += call.cast_time
        self.duration += call.duration
        self.errors += call.error and call.own
        for cast in call.casts:
            if cast.reused:
                self.reused += 1
                continue
            self.casts += 1
            self.bytes += cast.bytes
            if cast.earlier:
                self.repeated += 1
                self.repeated_bytes += cast.bytes

    def merge(self, other: CallGroup) -> None:
        """Adds the sums of another group."""
        for one in fields(self)[1:]:
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, one.name, mine + theirs)


@dataclass
class CastGroup:
    """The sums over the casts of one argument of an op at one line of one module.

    Attributes:
        op: The op's name with its overload.
        module: The module's path.
        line: The line.
        argument: The argument, "weight".
        kind: "weight", "activation" or "gradient".
        from_dtype: The name of the dtype that the caller passed.
        to_dtype: The name of the dtype that the op got.
        made: The number of casts made.
        reused: The number of casts reused.
        bytes: The size of those that were made, in bytes.
        repeated: The number of these casts of a tensor that had been cast to that dtype before, here or elsewhere.
        repeated_bytes: Their size in bytes.
    """

    op: str
    module: str
    line: str
    argument: str
    kind: str
    from_dtype: str
    to_dtype: str
    made: int = 0
    reused: int = 0
    bytes: int = 0
    repeated: int = 0
    repeated_bytes: int = 0

    def add(self, cast: Cast) -> None:
        """Adds a cast."""
        if cast.reused:
            self.reused += 1
            return
        self.made += 1
        self.bytes += cast.bytes
        if cast.earlier:
            self.repeated += 1
            self.repeated_bytes += cast.bytes


_Row = TypeVar("_Row")


class _TableList(list[_Row]):
    """A list that is printed as a table, and that a notebook shows as one."""

    _nothing = "no calls"

    def _table(self) -> Table:
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(load_renderer("terminal").to_text(self._table())) if self else self._nothing

    def _repr_html_(self) -> str:
        return table_html(self._table()) if self else f"<p>{self._nothing}</p>"


class GroupTable(_TableList[CallGroup]):
    """The result of `by_op()`, `by_module()` and `by_line()`: a list that is printed and shown as a table.

    Args:
        groups: The groups.
        nameless: What the table shows for the key "".

    Example:
        >>> groups = GroupTable([CallGroup("aten::mm", calls=2, casts=1, bytes=1536, duration=2_000_000)])
        >>> print(groups)
                  calls  casts  reused    bytes    ms
        aten::mm      2      1       0  1.5 KiB  2.00
        >>> groups == list(groups)
        True
    """

    def __init__(self, groups: Iterable[CallGroup] = (), nameless: str = "(none)") -> None:
        super().__init__(groups)
        self._nameless = nameless

    def _table(self) -> Table:
        numbers = "calls", "casts", "reused", Column("bytes", "bytes")
        rows = [
            (one.key or self._nameless, one.calls, one.casts, one.reused, one.bytes, one.dtypes, one.duration / 1e6)
            for one in self
        ]
        return Table("", ("", *numbers, Column("dtypes", "code"), Column("ms", "ms")), rows, most=40)


class CastTable(_TableList[CastGroup]):
    """The result of `casts()`: a list that is printed and shown as a table."""

    _nothing = "no casts"

    def _table(self) -> Table:
        columns = (
            *("argument", "kind", Column("dtypes", "dtypes"), Column("op", "name"), Column("module", "name")),
            *(Column("line", "line"), "made", "reused", Column("bytes", "bytes"), "repeated"),
        )
        rows = [
            (
                *(one.argument, one.kind, f"{one.from_dtype} -> {one.to_dtype}", one.op, module_name(one.module)),
                *(one.line, one.made, one.reused or None, one.bytes, one.repeated or None),
            )
            for one in self
        ]
        return Table("", columns, rows, most=40)


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended a block or a program.

    Attributes:
        text: Its class and its text.
        function: The method of a torch.autograd.Function in which it was raised: "Scale.backward"; "" if in none.
        in_call: Whether the last call that raised has raised it.
        told: What its traceback tells: of a call, only that a step of one of PyTorch's optimizers made it; or "".
        called_at: ", called at FILE:LINE" of the program's own code, if a line of an installed library made the call.
    """

    text: str
    function: str = ""
    in_call: bool = True
    told: str = ""
    called_at: str = ""


Place: TypeAlias = tuple[str, str, str]
"""An op's name with its overload, a module's path, a line."""


class Calls(_TableList[Call]):
    """A list of calls that can be filtered, and that is printed and shown as a table."""

    @explains_arguments
    def where(
        self,
        *,
        op: str | None = None,
        module: str | None = None,
        line: str | None = None,
        phase: Phase | None = None,
        policy: str | None = None,
        casting: bool | None = None,
    ) -> Calls:
        """Returns the calls that meet all conditions.

        Args:
            op: The op with or without its overload: "aten::softmax", "aten::softmax.int", "softmax".
            module: The module's path. Submodules are included.
            line: The end of "path:number": "train.py:41".
            phase: "forward", "recompute", "backward" or "optimizer".
            policy: The policy's name: "fp32", "lower_precision_fp", "float16".
            casting: Whether casts were made or reused.

        Raises:
            OptionError: A condition is not a str, or there is no such phase. It is a ValueError.

        Example:
            >>> import torch_promote as tp
            >>> with tp.trace() as report, tp.my_autocast("cpu"):
            ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).exp()
            >>> [call.op for call in report.calls.where(policy="lower_precision_fp")]
            ['aten::mm']
        """
        for name, asked in {"op": op, "module": module, "line": line, "phase": phase, "policy": policy}.items():
            if not isinstance(asked, str | None):
                raise OptionError(f"{name} is a str or None, got {shown(asked)} of type {type(asked).__name__}.")
        phases = get_args(Phase)
        if phase is not None and phase not in phases:
            hint = did_you_mean(phase, phases, 1)
            raise OptionError(f"there is no phase {phase!r}.{hint} Legal: {', '.join(map(repr, phases))}.")

        def meets(call: Call) -> bool:
            return (
                (op is None or op in (call.op, call.name, call.op.partition("::")[2]))
                and (module is None or call.module == module or call.module.startswith(f"{module}."))
                and (line is None or call.line.endswith(line))
                and (phase is None or call.phase == phase)
                and (policy is None or call.policy_name == policy)
                and (casting is None or bool(call.casts) == casting)
            )

        found = Calls(call for call in self if meets(call))
        asked, known = (op or "").rpartition("::")[2].partition(".")[0], {call.op.partition("::")[2] for call in self}
        close = [] if found or asked in known else closest_ops(asked, known)
        if close:  # no error: a program may ask whether an op ran
            found._nothing = f"no calls; closest op: {', '.join(close)}"
        return found

    def _table(self) -> Table:
        columns = (
            Column("op", "name"),
            Column("module", "name"),
            "phase",
            Column("line", "line"),
            Column("dtypes", "dtypes"),
            Column("policy", "policy"),
            Column("casts", "count"),
        )
        rows = [
            (
                call.name,
                module_name(call.module),
                call.phase,
                call.line,
                call.dtypes,
                f"{call.policy_name}: {call.reason}" if call.policy_name else None,
                len(call.casts) or None,
            )
            for call in self
        ]
        return Table("", columns, rows, most=40)


class Recording:
    """A recording: the calls of a block and their sums. `TraceReport` describes the attributes."""

    def __init__(self, max_calls: int) -> None:
        self.calls: Calls = Calls()
        self.dropped: int = 0
        self.torch_version: str = str(torch.__version__)
        self.not_seen: list[Unseen] = []
        self.device_names: list[str] = []
        self.steps = 0
        self.asked: list[dict[str, Any]] = []
        self.nonfinite: NonfiniteValues = NonfiniteValues()
        self.values: dict[int, tuple[Values, ...]] = {}
        self.reads: dict[int, tuple[Read, ...]] = {}
        self.draws: dict[int, str] = {}
        self.sources: list[Source] = []
        self.states: list[OptimizerState] = []
        self.ends: list[Step] = []
        self.rng: dict[str, str] = {}
        self.environment: dict[str, str] = {}
        self.failure: Failure | None = None
        self.scaled_step: str = ""
        self.undone: Counter[str] = Counter()
        self._raised: dict[tuple[str, ...], tuple[Call, Call]] = {}  # of equal ones the last; in the order of the last
        self._raising: dict[int, Call] = {}  # by thread, of an open call of the program
        self._max_calls = max_calls
        self._by_place: dict[Place, CallGroup] = {}
        self._casts_by_place: dict[tuple[str, ...], CastGroup] = {}
        self._summed = 0  # the number of stored calls that the groups contain
        self._number_of: dict[int, int] = {}  # of stored calls, by id

    def add(self, call: Call) -> int:
        """Adds a call; for the tracer. Returns its number, which is its index in `calls` if it is stored there."""
        with recording_lock:
            if call.error or self._raising:
                self._note_error(call)
            if len(self.calls) < self._max_calls:
                self.calls.append(call)
                return len(self.calls) - 1
            self._sum_up(call)
            self.dropped += 1
            return self._max_calls + self.dropped - 1

    def _note_error(self, call: Call) -> None:
        """Keeps a call of the program that raised, with the call inside that raised first."""
        first = self._raising.setdefault(call.thread, call) if call.error else call
        if call.own:
            self._raising.pop(call.thread, None)  # of a call that has not raised, too: it has handled the error
        if call.own and call.error:
            key = call.name, call.module, call.line, call.dtypes
            self._raised.pop(key, None)
            self._raised[key] = call, first

    @property
    def raised(self) -> list[tuple[Call, Call]]:
        """The calls that raised, each with the call in it, or itself, that raised first; of equal ones the last."""
        return list(self._raised.values())

    def values_of(self, call: Call) -> tuple[Values, ...]:
        """Returns the values of the results of one of `calls`, in the order of `Call.outputs`; () without values.

        Args:
            call: The call, which is told by its identity.

        Raises:
            OptionError: It is not one of this report's. It is a ValueError.
        """
        if len(self._number_of) < len(self.calls):
            self._number_of = {id(one): number for number, one in enumerate(self.calls)}
        number = self._number_of.get(id(call))
        if number is None:
            raise OptionError(f"values_of() expects one of the calls of this report, got {shown(call)}.")
        return self.values.get(number, ())

    def _sum_up(self, call: Call) -> None:
        """Adds a call to the groups. Their number grows with lines, modules and dtypes, not with steps."""
        place = (call.name, call.module, call.line)
        group = self._by_place.get(place)
        if group is None:
            group = self._by_place[place] = CallGroup("")
        group.add(call)
        for cast in call.casts:
            key = (*place, cast.argument, cast.kind, dtype_name(cast.from_dtype), dtype_name(cast.to_dtype))
            self._casts_by_place.setdefault(key, CastGroup(*key)).add(cast)

    def groups(self) -> dict[Place, CallGroup]:
        """The calls by op, module and line."""
        with recording_lock:  # stored calls are summed up when somebody asks, so that a trace costs less
            for call in self.calls[self._summed :]:
                self._sum_up(call)
            self._summed = len(self.calls)
            return dict(self._by_place)

    def used_policies(self) -> set[tuple[str, str, str]]:
        """Returns the ops of the calls that had a policy, with the policies and their sources; for the tracer."""
        texts = {(op, text) for (op, _, _), group in self._by_place.items() for text in group.policies}
        waiting = (call for call in self.calls[self._summed :] if call.policy is not None)
        texts |= {(call.name, f"{call.policy_name}: {call.reason}") for call in waiting}
        split = ((op, *text.partition(": ")[::2]) for op, text in texts)
        return {(op, policy, reason.partition(FALLBACK)[0]) for op, policy, reason in split}

    def name_devices(self) -> None:
        """Fills `device_names`; for the tracer."""
        devices = {info.device for call in self.calls for info in (*call.inputs, *call.outputs)}
        for device in sorted(devices):
            # Absent in the modules of "cpu", "meta" and "mps", and in a backend's own that names none.
            name_of = getattr(getattr(torch, device.partition(":")[0], None), "get_device_name", None)
            if name_of is not None:
                with contextlib.suppress(RuntimeError, AssertionError):  # fake tensors: this process lacks the device
                    self.device_names.append(name_of(device))

    @property
    def total(self) -> CallGroup:
        """All calls."""
        return next(iter(self._by(lambda place: "")), CallGroup(""))

    @property
    def first_nonfinite(self) -> Call | None:
        """The call that made the inf or NaN that `nonfinite` counts; None without, or without values."""
        number = self.nonfinite.first_call
        return None if number is None or number >= len(self.calls) else self.calls[number]

    def by_op(self) -> GroupTable:
        """Returns the calls by op and overload, most cast bytes first: a list that prints as a table."""
        return self._by(lambda place: place[0])

    def by_module(self) -> GroupTable:
        """Returns the calls by module, most cast bytes first: a list that prints as a table."""
        return GroupTable(self._by(lambda place: place[1]), module_name(""))

    def by_line(self) -> GroupTable:
        """Returns the calls by source line, most cast bytes first: a list that prints as a table."""
        return self._by(lambda place: place[2])

    def _by(self, key_of: Callable[[Place], str]) -> GroupTable:
        found: dict[str, CallGroup] = {}
        for place, group in self.groups().items():
            found.setdefault(key_of(place), CallGroup(key_of(place))).merge(group)
        return GroupTable(sorted(found.values(), key=lambda group: (-group.bytes, -group.calls)))

    def casts(self) -> CastTable:
        """Returns the casts by argument, op, module and line, most bytes first."""
        self.groups()
        groups = self._casts_by_place.values()
        return CastTable(sorted(groups, key=lambda group: (-group.bytes, -group.made, -group.reused)))
