"""The record of a call in a trace: tensors, casts, and origin."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torch_promote.policy.op_table import CastPolicy
from torch_promote.reference.dtypes import dtype_name
from torch_promote.reference.strides import contiguous_strides

__all__ = ["AUTOCAST_OFF", "Call", "Cast", "Kind", "Phase", "TensorInfo", "facts_of"]

#: The start of `Call.said_by` if a region or a module has switched autocast off.
AUTOCAST_OFF = "autocast off by "

Phase = Literal["forward", "backward", "recompute"]
"""The phase of a call. "recompute": a checkpoint reran its forward inside a backward."""

Kind = Literal["weight", "activation", "gradient"]
"""The kind of a cast tensor. A weight is a parameter or a leaf that requires a gradient."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor among the arguments or the results of a call, without its data.

    Attributes:
        name: The argument: "mat2", "tensors[1]". For a result, its index: "0", "1".
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
    """Returns a tensor's dtype, shape, device and strides in the form of `TensorInfo`."""
    if tensor.is_nested:
        return tensor.dtype, (), tensor.device, None
    strided = tensor.layout is torch.strided
    return tensor.dtype, tuple(tensor.shape), tensor.device, tensor.stride() if _is_odd(tensor, strided) else None


def _is_odd(tensor: torch.Tensor, strided: bool) -> bool:
    return strided and not tensor.is_contiguous() and tensor.stride() != contiguous_strides(tuple(tensor.shape))


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
            itself. In a backward, the module whose forward recorded the node.
        phase: The phase in which it ran.
        line: "path:number" of the innermost line of the program (not of PyTorch or this package); in a backward, that
            of the forward if it is known; "" if there is none.
        inputs: The tensors among the arguments that the caller passed.
        ran_with: The same tensors after the casts.
        outputs: The tensors among the results; empty if the call raised.
        casts: The casts of the arguments.
        policy: The policy that applied. None: autocast was off, or has no policy for the op.
        said_by: The source of the policy: "PyTorch's table", "register_policy", "the default policy",
            "region at FILE:LINE", 'module policy "NAME"', "install, region at FILE:LINE". Without a policy: "autocast
            off by" one of the last three, if it has switched autocast off for an op with a policy; "promotion rule
            NAME" if the op promotes inputs of several dtypes; "a kernel on PyTorch's autocast key" if a library has
            registered one; or "".
        composite: Whether the op calls other ops, which follow.
        thread: The native id of its thread.
        error: Whether the call raised.
        autocast: The device types for which autocast was on, with their dtypes.
        dtype_arguments: The arguments that are dtypes, such as softmax's `dtype`, by name.
        start: Its start, in nanoseconds since 1970.
        duration: Its time on the host in nanoseconds, including the trace's own work on inner calls.
        cast_time: The part of that time for its casts.
        values: With `values=True`, a `Values` for each tensor in `outputs`.
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
        """The dtypes of inputs, of cast inputs if they differ, and of outputs: "float32 -> bfloat16 -> bfloat16"."""
        inputs, ran_with, outputs = (_dtypes(infos) for infos in (self.inputs, self.ran_with, self.outputs))
        return " -> ".join([inputs, *([] if ran_with == inputs else [ran_with]), outputs])

    @property
    def name(self) -> str:
        """The overload's full name: "aten::softmax.int"."""
        return f"{self.op}.{self.overload}" if self.overload else self.op

    def to_dict(self) -> dict[str, Any]:
        """Returns the call as JSON-compatible values."""
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
        """Returns the call from the data of `to_dict`, except for `values`, which stay a dict."""
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
