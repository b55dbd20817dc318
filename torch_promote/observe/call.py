"""The record of a call of an op: its tensors, arguments, casts and policy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.codec import decode_fields, decode_record, encode

#: The start of `Call.policy_source` if a region or a module has switched autocast off.
AUTOCAST_OFF = "autocast off by "
#: `Call.policy_source` of the calls that code of AOTAutograd and Inductor makes.
COMPILED = "compiled code"
#: The names of regions that a backward opens: code of the program in it, or custom_bwd.
BY_BACKWARD, BY_CUSTOM_BWD = "region opened in the backward at ", "region of custom_bwd at "
#: What `Call.reason` has between the source of a policy and `Call.fallback`.
FALLBACK = "; in lower precision, not in float8: "
#: `Call.policy_source` of calls without a policy, where the program has set autocast on outside of all regions.
BY_SETTER = "torch.set_autocast_enabled, outside of regions"
#: `Call.op` of a call of a compiled function, with values. Its `inputs` are its arguments, parameters and buffers.
COMPILED_FUNCTION = "torch.compile"


def is_by_backward(source: str) -> bool:
    """Whether the source of a policy names a region that was opened in the backward."""
    return BY_BACKWARD in source or BY_CUSTOM_BWD in source


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
        strides: Its strides; None if it is contiguous or sparse, and () if it is nested.
        owner: Of a call that raised, or that promotes its operands: "buffer blur.kernel", "parameter norm.weight", "a
            view of buffer rope.cos"; "" for other tensors.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    strides: tuple[int, ...] | None = None
    owner: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: {self.dtype_and_shape}" + (f" strides {self.strides}" if self.strides else "")
        return text if self.device == "cpu" else f"{text} on {self.device}"

    @property
    def label(self) -> str:
        """The name, and the owner if that is known: "weight (buffer blur.kernel)"."""
        return f"{self.name} ({self.owner})" if self.owner else self.name

    @property
    def dtype_and_shape(self) -> str:
        """The dtype and the shape: "float32[2, 4]"; "float32 nested" for a nested tensor."""
        return f"{dtype_name(self.dtype)}{' nested' if self.strides == () else list(self.shape)}"


def infos_of(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[tuple[Any, ...], ...]:
    """Returns the names, dtypes, shapes, devices and strides of tensors, as `TensorInfo` has them."""
    found = []
    for name, tensor in named:
        shape: tuple[int, ...] = ()
        strides: tuple[int, ...] | None = ()
        if not tensor.is_nested:
            strides = None
            try:
                shape = tensor.shape
            except RuntimeError:  # of an uninitialized parameter of a lazy module
                shape = (0,)
            if tensor.layout is torch.strided and not tensor.is_contiguous():
                strides = tensor.stride()
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
            not return, such as "self[1]" of a foreach op or "running_mean". Empty if the call raised, also for a
            checkpoint that stops its recomputation there.
        casts: The casts of the arguments.
        policy: The policy that applied. None: autocast was off, or has no policy for the op.
        policy_source: The source of the policy: "PyTorch's table", "register_policy", "the default policy" (of a
            file: "mine.toml, the default policy"), "region at FILE:LINE", 'module policy "NAME"', "install, region at
            FILE:LINE". A region that a backward opens is "region opened in the backward at FILE:LINE" or "region of
            custom_bwd at FILE:LINE", which also follow "PyTorch's table, ". Without a policy: "autocast off by" one of
            these, if it has switched autocast off for an op with a policy; "no region for cpu: region at FILE:LINE is
            for cuda"; "promotion rule NAME" if the op promotes inputs of several dtypes; "a kernel on PyTorch's
            autocast key" if a library has registered one; "compiled code", whose graph contains the casts;
            "torch.set_autocast_enabled, outside of regions" if the program has called that; or "".
        composite: Whether the op calls other ops, which follow.
        thread: The native id of its thread.
        error: Whether the call raised an error.
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
    policy_source: str
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

    def __repr__(self) -> str:
        where = f"{self.name} in {self.module or '(model)'}, {self.phase}, {self.line or 'line unknown'}"
        policy = f", {self.policy_name} ({self.reason})" if self.policy_name else ""
        return f"<Call of {where}: {self.dtypes}{policy}, casts: {len(self.casts)}{', raised' * self.error}>"

    @property
    def reason(self) -> str:
        """The source of the policy, and if the call ran in lower precision instead of float8, why."""
        return f"{self.policy_source}{FALLBACK}{self.fallback}" if self.fallback else self.policy_source

    @property
    def policy_name(self) -> str:
        """The policy's name: "lower_precision_fp", "float32" for a dtype; "" without a policy."""
        policy = self.policy
        return "" if policy is None else policy.value if isinstance(policy, CastPolicy) else dtype_name(policy)

    @property
    def dtypes(self) -> str:
        """The dtypes of inputs, of cast inputs if they differ, and of outputs: "float32 -> bfloat16 -> bfloat16"."""
        infos_of_call = (self.inputs, self.ran_with, self.outputs)
        inputs, ran_with, outputs = (_names(tuple(info.dtype for info in infos)) for infos in infos_of_call)
        return " -> ".join([inputs, *([] if ran_with == inputs else [ran_with]), outputs])

    @property
    def shapes(self) -> str:
        """The shapes of inputs and outputs: "[8, 16], [4, 16] -> [8, 4]"."""
        inputs, outputs = (", ".join(str(list(info.shape)) for info in infos) for infos in (self.inputs, self.outputs))
        return f"{inputs or 'none'} -> {outputs or 'none'}"

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


#: The fields of `Call` that hold tensors.
TENSORS = ("inputs", "ran_with", "outputs")


@functools.lru_cache(maxsize=10_000)
def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(dict.fromkeys(map(dtype_name, dtypes))) or "none"
