"""Events and recordings: the record of a call, its sums by op, module and line, and the recording of a block."""

from __future__ import annotations

import contextlib
import functools
import html
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from torch_promote.errors import OptionError
from torch_promote.observe.values import NonfiniteValues, Values
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.strides import contiguous_strides
from torch_promote.report.base import Column, Table, load_renderer, module_name
from torch_promote.report.codec import decode_fields, decode_record, encode

__all__ = [
    "AUTOCAST_OFF",
    "COMPILED",
    "COMPILED_FUNCTION",
    "Argument",
    "Call",
    "CallGroup",
    "Calls",
    "Cast",
    "CastGroup",
    "GroupTable",
    "Kind",
    "OptimizerState",
    "Phase",
    "Place",
    "Read",
    "Recording",
    "Source",
    "Step",
    "TensorInfo",
    "Unseen",
    "arguments_of",
    "infos_of",
    "records_of",
]


#: The start of `Call.said_by` if a region or a module has switched autocast off.
AUTOCAST_OFF = "autocast off by "
#: `Call.said_by` of the calls that code of AOTAutograd and Inductor makes.
COMPILED = "compiled code"
#: `Call.op` of a call of a compiled function, with values. Its `inputs` are its arguments, parameters and buffers.
COMPILED_FUNCTION = "torch.compile"

Phase = Literal["forward", "recompute", "backward", "optimizer"]
"""The phase of a call.

- "recompute": a checkpoint reran its forward inside a backward.
- "optimizer": an optimizer, a learning rate scheduler, GradScaler or `torch.nn.utils.clip_grad_norm_` made it, also
  inside a backward. The scaling of the loss, and the forward and backward of a closure, keep their own phases.
"""

Kind = Literal["weight", "activation", "gradient"]
"""The kind of a cast tensor. A weight is a parameter or a leaf that requires a gradient."""


Argument: TypeAlias = Any
"""An argument that is no tensor, as JSON has it: a number, a bool, a text or None, or a tuple of these. Dtypes,
devices, layouts and memory formats are texts, and so are infinite numbers and NaN."""


class Unseen(str):
    """A kind of computation that a report does not contain, as a sentence.

    Attributes:
        kind: "compiled" functions, "threads" and "processes" that were started, "unknown" numbers of these, a "model"
            that was not called, the "unfinished" rest of a run that was killed, calls of "other processes".
        number: How many; 0 if it is unknown.
    """

    kind: str
    number: int

    def __new__(cls, kind: str, number: int, text: str) -> Unseen:
        """Makes a sentence of a kind."""
        found = super().__new__(cls, text)
        found.kind, found.number = kind, number
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return Unseen, (self.kind, self.number, str(self))

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-compatible values."""
        return {"kind": self.kind, "count": self.number, "text": str(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Unseen:
        """Returns the sentence from the data of `to_dict`."""
        read = decode_record({"kind": str, "count": int, "text": str}, data)
        return cls(read["kind"], read["count"], read["text"])


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor among the arguments or the results of a call, without its data.

    Attributes:
        name: The argument: "mat2", "tensors[1]". For a result, its index: "0", "1".
        dtype: Its dtype.
        shape: Its shape; empty for a nested tensor, which has none.
        device: Its device, such as "cpu" or "cuda:0".
        strides: Its strides; None if it is contiguous, or has no strides (sparse, nested).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    strides: tuple[int, ...] | None = None

    def __str__(self) -> str:
        text = f"{self.name}: {dtype_name(self.dtype)}{list(self.shape)}"
        text += "" if self.strides is None else f" strides {self.strides}"
        return text if self.device == "cpu" else f"{text} on {self.device}"


def infos_of(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[tuple[Any, ...], ...]:
    """Returns the names, dtypes, shapes, devices and strides of tensors, as `TensorInfo` has them."""
    found = []
    for name, tensor in named:
        shape: tuple[int, ...] = ()
        strides = None
        if not tensor.is_nested:
            try:
                shape = tensor.shape
            except RuntimeError:  # of an uninitialized parameter of a lazy module
                shape = (0,)
            if tensor.layout is torch.strided and not tensor.is_contiguous():
                strides = tensor.stride()
                if strides == contiguous_strides(tuple(shape)):
                    strides = None
        found.append((name, tensor.dtype, shape, tensor.device, strides))
    return tuple(found)


def records_of(infos: Iterable[tuple[Any, ...]]) -> tuple[TensorInfo, ...]:
    """Returns the records of what `infos_of` returned."""
    return tuple(TensorInfo(name, dtype, tuple(shape), str(at), strides) for name, dtype, shape, at, strides in infos)


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast of an argument that autocast made or took from a cache.

    Attributes:
        argument: The argument: "weight", "tensors[1]".
        from_dtype: The dtype that the caller passed.
        to_dtype: The dtype that the op got.
        bytes: The size of the cast in bytes.
        kind: The kind of the cast tensor.
        reused: Whether the cast came from a cache, without a computation.
        tensor: The number of the cast tensor in this trace; views have the number of their base.
        earlier: The number of earlier casts of this tensor to this dtype with unchanged content.
        cache: For a reused cast, the mode of the cache: "weights", "persistent", "all", or "PyTorch's".
        avoidable: The cache mode, "persistent" for weights or "all" for activations, in which an earlier cast would
            have been reused instead. "": none, or the mode is set already.
    """

    argument: str
    from_dtype: torch.dtype
    to_dtype: torch.dtype
    bytes: int
    kind: Kind
    reused: bool = False
    tensor: int = 0
    earlier: int = 0
    cache: str = ""
    avoidable: Literal["", "persistent", "all"] = ""

    def __str__(self) -> str:
        text = f"{self.argument}: {dtype_name(self.from_dtype)} -> {dtype_name(self.to_dtype)}, {self.bytes:,} bytes"
        return f"{text}, reused from {self.cache or 'a cache'}" if self.reused else text


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op.

    Attributes:
        op: The op: "aten::linear".
        overload: Its overload: "", "int".
        module: The path of the module that called it: "blocks.0.q"; "" outside of the model's modules, and in the model
            itself, which reports name "(model)". In a backward, the module whose forward recorded the node.
        phase: The phase in which it ran.
        line: "path:number" of the innermost line of the program (not of PyTorch or this package); in a backward, that
            of the forward if it is known; "" if there is none.
        inputs: The tensors among the arguments that the caller passed.
        ran_with: The same tensors after the casts.
        outputs: The tensors that the call produced: its results by index, then the arguments that it wrote to and did
            not return, such as "self[1]" of a foreach op or "running_mean". Empty if the call raised.
        casts: The casts of the arguments.
        policy: The policy that applied. None: autocast was off, or has no policy for the op.
        said_by: The source of the policy: "PyTorch's table", "register_policy", "the default policy",
            "region at FILE:LINE", 'module policy "NAME"', "install, region at FILE:LINE". Without a policy: "autocast
            off by" one of the last three, if it has switched autocast off for an op with a policy; "promotion rule
            NAME" if the op promotes inputs of several dtypes; "a kernel on PyTorch's autocast key" if a library has
            registered one; "compiled code", whose graph contains the casts; or "".
        composite: Whether the op calls other ops, which follow.
        thread: The native id of its thread.
        error: Whether the call raised.
        autocast: The device types for which autocast was on, with their dtypes.
        arguments: The arguments that are no tensors, with their names, defaults included: numbers, texts, sizes, dtypes
            and None. A list of more than 64 entries, or a text of more than 200 characters, is a text with its digest.
        start: Its start, in nanoseconds since 1970.
        duration: Its time on the host in nanoseconds, including the trace's own work on inner calls.
        cast_time: The part of that time for its casts.
        own: Whether the program made it. False for a call inside of another one.
        fallback: Under a float8 policy, why the call ran in lower precision instead; "" if it did not.
    """

    op: str
    overload: str
    module: str
    phase: Phase
    line: str
    inputs: tuple[TensorInfo, ...]
    ran_with: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    casts: tuple[Cast, ...]
    policy: CastPolicy | torch.dtype | None
    said_by: str
    composite: bool
    thread: int
    error: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    arguments: tuple[tuple[str, Argument], ...] = ()
    start: int = 0
    duration: int = 0
    cast_time: int = 0
    own: bool = True
    fallback: str = ""

    @property
    def reason(self) -> str:
        """The source of the policy, and if the call ran in lower precision instead of float8, why."""
        return f"{self.said_by}; ran as lower_precision_fp: {self.fallback}" if self.fallback else self.said_by

    @property
    def policy_name(self) -> str:
        """The policy's name: "lower_precision_fp", "float32" for a dtype; "" without a policy."""
        return "" if self.policy is None else str(encode(self.policy))

    @property
    def dtypes(self) -> str:
        """The dtypes of inputs, of cast inputs if they differ, and of outputs: "float32 -> bfloat16 -> bfloat16"."""
        infos_of_call = (self.inputs, self.ran_with, self.outputs)
        inputs, ran_with, outputs = (_names(tuple(info.dtype for info in infos)) for infos in infos_of_call)
        return " -> ".join([inputs, *([] if ran_with == inputs else [ran_with]), outputs])

    @property
    def name(self) -> str:
        """The overload's full name: "aten::softmax.int"."""
        return f"{self.op}.{self.overload}" if self.overload else self.op

    def to_dict(self, tensor: Callable[[TensorInfo], Any] = encode) -> dict[str, Any]:
        """Returns the call as JSON-compatible values.

        Args:
            tensor: Returns the value of a tensor among the arguments or results.
        """
        pairs = {name: {key: encode(value) for key, value in getattr(self, name)} for name in ("autocast", "arguments")}
        tensors = {name: [tensor(info) for info in getattr(self, name)] for name in TENSORS}
        plain = {name: encode(getattr(self, name)) for name in self.__slots__ if name not in (*pairs, *tensors)}
        return {**plain, **pairs, **tensors}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], tensor: Callable[[Any], Any] = lambda data: data) -> Call:
        """Returns the call from the data of `to_dict`.

        Args:
            data: The data.
            tensor: Returns a tensor, or its dict, from its value.
        """
        kinds = dict.fromkeys(TENSORS, list[Any]) | dict.fromkeys(("autocast", "arguments"), Mapping[str, Any])
        read = decode_record(kinds, data)
        tensors = {name: list(map(tensor, read[name])) for name in TENSORS}
        arguments = arguments_of(read["arguments"])
        call: Call = decode_fields(
            cls, {**data, **tensors, "autocast": list(read["autocast"].items()), "arguments": arguments}
        )
        return call


def arguments_of(data: Mapping[str, Any]) -> tuple[tuple[str, Argument], ...]:
    """Returns arguments as `Call` has them from a dict, with tuples for lists."""
    return tuple((name, _frozen(value)) for name, value in data.items())


def _frozen(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return tuple(map(_frozen, data))
    if data is None or isinstance(data, bool | int | float | str):
        return data
    raise TypeError(f"expected an argument, got {data!r}")


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
    """

    kind: Literal["parameter", "buffer", "gradient", "state", "input"]
    name: str
    info: TensorInfo
    values: Values
    written_by: tuple[int, ...] = ()
    step: int = 0


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


#: The fields of `Call` that hold tensors.
TENSORS = ("inputs", "ran_with", "outputs")


@functools.lru_cache(maxsize=10_000)
def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(dict.fromkeys(map(dtype_name, dtypes))) or "none"


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
        errors: The number of calls that raised.
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
        elif call.said_by:
            self.rules[call.said_by] += 1
        self.cast_time += call.cast_time
        self.duration += call.duration
        self.errors += call.error
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


class GroupTable(list[CallGroup]):
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

    def __repr__(self) -> str:
        numbers = "calls", "casts", "reused", Column("bytes", "bytes")
        rows = [
            (one.key or self._nameless, one.calls, one.casts, one.reused, one.bytes, one.dtypes, one.duration / 1e6)
            for one in self
        ]
        table = Table("", ("", *numbers, Column("dtypes", "code"), Column("ms", "ms")), rows, most=40)
        return str(load_renderer("terminal").to_text(table)) if self else "no calls"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


Place: TypeAlias = tuple[str, str, str]
"""An op's name with its overload, a module's path, a line."""


class Calls(list[Call]):
    """A list of calls that can be filtered, and that is printed and shown as a table."""

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

        Example:
            >>> import torch_promote as tp
            >>> with tp.trace() as report, tp.my_autocast("cpu"):
            ...     _ = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).exp()
            >>> [call.op for call in report.calls.where(policy="lower_precision_fp")]
            ['aten::mm']
        """

        def meets(call: Call) -> bool:
            return (
                (op is None or op in (call.op, call.name, call.op.partition("::")[2]))
                and (module is None or call.module == module or call.module.startswith(f"{module}."))
                and (line is None or call.line.endswith(line))
                and (phase is None or call.phase == phase)
                and (policy is None or call.policy_name == policy)
                and (casting is None or bool(call.casts) == casting)
            )

        return Calls(call for call in self if meets(call))

    def __repr__(self) -> str:
        if not self:
            return "no calls"
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
        return str(load_renderer("terminal").to_text(Table("", columns, rows, most=40)))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


class Recording:
    """A recording: the calls of a block and their sums. `TraceReport` describes the attributes.

    Args:
        max_calls: The number of calls to store.
    """

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
        self._max_calls = max_calls
        self._by_place: dict[Place, CallGroup] = {}
        self._casts_by_place: dict[tuple[str, ...], CastGroup] = {}
        self._summed = 0  # the number of stored calls that the groups contain
        self._number_of: dict[int, int] = {}  # of stored calls, by id
        self._lock = threading.Lock()

    def add(self, call: Call) -> int:
        """Adds a call; for the tracer. Returns its number, which is its index in `calls` if it is stored there."""
        with self._lock:
            if len(self.calls) < self._max_calls:
                self.calls.append(call)
                return len(self.calls) - 1
            self._sum_up(call)
            self.dropped += 1
            return self._max_calls + self.dropped - 1

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
            raise OptionError(f"values_of() expects one of the calls of this report, got {call!r}.")
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
        with self._lock:  # stored calls are summed up when somebody asks, so that a trace costs less
            for call in self.calls[self._summed :]:
                self._sum_up(call)
            self._summed = len(self.calls)
            return dict(self._by_place)

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

    def casts(self) -> list[CastGroup]:
        """Returns the casts by argument, op, module and line, most bytes first."""
        self.groups()
        return sorted(self._casts_by_place.values(), key=lambda group: (-group.bytes, -group.made, -group.reused))
