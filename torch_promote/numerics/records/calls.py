"""What a trace records of a call: the tensors, the casts, and where it came from."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torch_promote.policy.cast_policy import CastPolicy
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.elementwise.memory_format import contiguous_strides

__all__ = ["AUTOCAST_OFF", "Call", "Cast", "Kind", "Phase", "TensorInfo", "facts_of"]

#: How `Call.said_by` begins where a region or a module has switched autocast off.
AUTOCAST_OFF = "autocast off by "

Phase = Literal["forward", "backward", "recompute"]
"""When a call ran; "recompute": a checkpoint ran its forward again, inside a backward."""

Kind = Literal["weight", "activation", "gradient"]
"""What a cast tensor is. A weight is a leaf that requires a gradient, or a parameter; a gradient is cast in one."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor among the arguments or the results of a call, without its data.

    Attributes:
        name: The argument: "mat2", "tensors[1]". For a result, its place: "0", "1".
        dtype: Its dtype.
        shape: Its shape; empty for a nested tensor, which has none.
        device: Its device, such as "cpu" or "cuda:0".
        strides: Its strides; None if it is contiguous, or has no strides (sparse, nested).

    Example:
        >>> print(TensorInfo.of("self", torch.ones(2, 3).t()))
        self: float32[3, 2] strides (1, 3)
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorInfo:
        """Describes a tensor."""
        dtype, shape, device, strides = facts_of(tensor)
        return cls(name, dtype, shape, str(device), strides)

    def __str__(self) -> str:
        text = f"{self.name}: {dtype_name(self.dtype)}{list(self.shape)}"
        text += "" if self.strides is None else f" strides {self.strides}"
        return text if self.device == "cpu" else f"{text} on {self.device}"


def facts_of(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], torch.device, tuple[int, ...] | None]:
    """Returns a tensor's dtype, shape, device and strides, as `TensorInfo` has them."""
    if tensor.is_nested:
        return tensor.dtype, (), tensor.device, None
    strided = tensor.layout is torch.strided
    return tensor.dtype, tuple(tensor.shape), tensor.device, tensor.stride() if _is_odd(tensor, strided) else None


def _is_odd(tensor: torch.Tensor, strided: bool) -> bool:
    return strided and not tensor.is_contiguous() and tensor.stride() != contiguous_strides(tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class Cast:
    """A cast of an argument that autocast made, or took from a cache.

    Attributes:
        argument: The argument: "weight", "tensors[1]".
        from_dtype: The dtype that the caller passed.
        to_dtype: The dtype that the op got.
        bytes: The size of the cast in bytes.
        kind: What was cast.
        reused: Whether the cast was there already; then nothing was computed.
        tensor: A number for the tensor that was cast, in this trace; views have the number of their base.
        earlier: How many casts of this tensor with this content to this dtype the trace saw before.
        cache: Of a reused cast, the mode of the cache that had it: "weights", "persistent", "all", or "PyTorch's".
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
            itself. In a backward it is the module whose forward recorded the node.
        phase: When it ran.
        line: "path:number" of the innermost line that is neither PyTorch's nor this package's; in a backward that of
            the forward, where it is known; "" if there is none.
        inputs: The tensors among the arguments, as the caller passed them.
        ran_with: The same, as the op got them after the casts.
        outputs: The tensors among the results; empty if the call raised.
        casts: The casts of the arguments.
        policy: The policy that applied; None: autocast was off, or has no policy for the op.
        said_by: Whose policy it is: "PyTorch's table", "register_policy", "the default policy", "region at FILE:LINE",
            'module policy "NAME"', "install, region at FILE:LINE". Without a policy: "autocast off by" one of the last
            three, if it has switched autocast off for an op that has a policy; "promotion rule NAME" if the inputs have
            several dtypes and the op promotes them; "a kernel on PyTorch's autocast key" if a library has one; or "".
        composite: Whether the op is made of other ops, whose calls follow.
        thread: The native id of its thread.
        error: Whether the call raised.
        autocast: The device types that autocast was on for, with their dtypes.
        dtype_arguments: The arguments that are dtypes, such as softmax's `dtype`, by name.
        start: When it began, in nanoseconds since 1970.
        duration: How long it took on the host, in nanoseconds, the trace's own work on inner calls included.
        cast_time: How much of that its casts took.
        values: What `values=True` adds: a `Values` for each tensor in `outputs`.
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
    dtype_arguments: tuple[tuple[str, torch.dtype], ...] = ()
    start: int = 0
    duration: int = 0
    cast_time: int = 0
    values: tuple[Any, ...] = ()

    @property
    def policy_name(self) -> str:
        """The policy's name: "lower_precision_fp", "float32" for a dtype; "" without a policy."""
        return "" if self.policy is None else _policy(self.policy) or ""

    @property
    def dtypes(self) -> str:
        """The dtypes of inputs, of what the op got if it differs, and of outputs: "float32 -> bfloat16 -> bfloat16"."""
        inputs, ran_with, outputs = (_dtypes(infos) for infos in (self.inputs, self.ran_with, self.outputs))
        return " -> ".join([inputs, *([] if ran_with == inputs else [ran_with]), outputs])

    @property
    def name(self) -> str:
        """The overload's full name: "aten::softmax.int"."""
        return f"{self.op}.{self.overload}" if self.overload else self.op

    def to_dict(self) -> dict[str, Any]:
        """Returns the call as values that JSON has."""
        return {
            "op": self.op,
            "overload": self.overload,
            "module": self.module,
            "phase": self.phase,
            "line": self.line,
            "inputs": [_tensor(info) for info in self.inputs],
            "ran_with": [_tensor(info) for info in self.ran_with],
            "outputs": [_tensor(info) for info in self.outputs],
            "casts": [_cast(cast) for cast in self.casts],
            "policy": _policy(self.policy),
            "said_by": self.said_by,
            "composite": self.composite,
            "thread": self.thread,
            "error": self.error,
            "autocast": {device: dtype_name(dtype) for device, dtype in self.autocast},
            "dtype_arguments": {name: dtype_name(dtype) for name, dtype in self.dtype_arguments},
            "start": self.start,
            "duration": self.duration,
            "cast_time": self.cast_time,
            "values": [values.to_dict() for values in self.values],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Call:
        """Returns the call of what `to_dict` returned; without `values`, which stay a dict."""
        policy = data["policy"]
        return cls(
            **{
                **data,
                **{name: tuple(_read_tensor(one) for one in data[name]) for name in ("inputs", "ran_with", "outputs")},
                "casts": tuple(
                    Cast(**{**one, "from_dtype": _dtype(one["from_dtype"]), "to_dtype": _dtype(one["to_dtype"])})
                    for one in data["casts"]
                ),
                "policy": policy if policy is None else _read_policy(policy),
                "autocast": tuple((name, _dtype(dtype)) for name, dtype in data["autocast"].items()),
                "dtype_arguments": tuple((name, _dtype(dtype)) for name, dtype in data["dtype_arguments"].items()),
                "values": tuple(data["values"]),
            }
        )


def _read_tensor(data: dict[str, Any]) -> TensorInfo:
    strides = data["strides"]
    return TensorInfo(
        data["name"],
        _dtype(data["dtype"]),
        tuple(data["shape"]),
        data["device"],
        None if strides is None else tuple(strides),
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _read_policy(name: str) -> CastPolicy | torch.dtype:
    return CastPolicy(name) if name in CastPolicy.__members__ else _dtype(name)


def _tensor(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "dtype": dtype_name(info.dtype),
        "shape": list(info.shape),
        "device": info.device,
        "strides": None if info.strides is None else list(info.strides),
    }


def _cast(cast: Cast) -> dict[str, Any]:
    return {
        "argument": cast.argument,
        "from_dtype": dtype_name(cast.from_dtype),
        "to_dtype": dtype_name(cast.to_dtype),
        "bytes": cast.bytes,
        "kind": cast.kind,
        "reused": cast.reused,
        "tensor": cast.tensor,
        "earlier": cast.earlier,
        "cache": cast.cache,
    }


def _dtypes(infos: tuple[TensorInfo, ...]) -> str:
    return _names(tuple(info.dtype for info in infos))


@functools.lru_cache(maxsize=10_000)
def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(dict.fromkeys(map(dtype_name, dtypes))) or "none"


def _policy(policy: CastPolicy | torch.dtype | None) -> str | None:
    if policy is None:
        return None
    return policy.value if isinstance(policy, CastPolicy) else dtype_name(policy)
