"""The op table, which gives each op a cast policy, and the ops that the running PyTorch registers for autocast.

The op table, `op_policies.def`, describes PyTorch 2.13; C++ expands the same file. Other versions register other ops. A
row falls through on a device type for which the running PyTorch does not register the op. An op that PyTorch registers,
and for which the table has no policy on that device type, is left to stock.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from torch_promote.errors import UnsupportedDeviceError
from torch_promote.policy.cast_policy import DEVICE_TYPES as DEVICE_TYPES
from torch_promote.policy.cast_policy import POLICY_ALIASES as POLICY_ALIASES
from torch_promote.policy.cast_policy import CastPolicy as CastPolicy
from torch_promote.policy.cast_policy import CastPolicyName as CastPolicyName
from torch_promote.policy.cast_policy import DeviceType as DeviceType

#: The policy of an op as an argument; any str, since names of dtypes are accepted, too.
OpPolicy = CastPolicy | torch.dtype | CastPolicyName | str

#: The policies that multiply in float8.
FLOAT8_POLICIES = (CastPolicy.float8_tensorwise, CastPolicy.float8_rowwise, CastPolicy.float8_rowwise_with_gw_hp)

#: The names of policies, for errors.
LEGAL_NAMES = ", ".join(policy.value for policy in CastPolicy if policy not in FLOAT8_POLICIES).replace(
    "lower_precision_fp", "lower_precision_fp (or lower, or fp16: all three mean the region's dtype)"
)


def spell_policy(policy: CastPolicy | torch.dtype) -> str:
    """Returns the name of a policy, as users write it: `fp32`, `float64`."""
    return policy.value if isinstance(policy, CastPolicy) else str(policy).removeprefix("torch.")


#: A device type, or a sequence of them, as arguments. They take any str, since `torch.device.type` is one.
DeviceTypes = DeviceType | str | Sequence[DeviceType | str]

#: The PyTorch version whose registrations the table describes. Other versions register other ops.
TABLE_VERSION = "2.13"
#: Ops that PyTorch registers and the table leaves to stock: stock's wrapper of this one re-flattens the weights.
LEFT_TO_STOCK = frozenset({"aten::_cudnn_rnn"})

_DEF_FILE = Path(__file__).with_name("op_policies.def")
_ROW = re.compile(r"^ROW\((\w+), +(\w*), +(\w+), +(\w+), +(\w+), +(\w+)(?:, (\w+))?\)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the op table: an overload and its stock policy on each device type in PyTorch 2.13."""

    index: int  # the position in the table, which is the op's number in C++
    op: str  # without its namespace, such as `softmax`
    overload: str  # "" for the default one
    cpu: CastPolicy
    cuda: CastPolicy
    xpu: CastPolicy
    mps: CastPolicy
    redispatch_overload: str = ""  # what `fp32_append_dtype` calls; "" if there is none

    @property
    def name(self) -> str:
        """The qualified name: `aten::mm`, `aten::softmax.int`."""
        return f"aten::{self.op}" + (f".{self.overload}" if self.overload else "")

    def policy(self, device_type: str) -> CastPolicy:
        """The row's policy for one of `DEVICE_TYPES`."""
        policy: CastPolicy = getattr(self, device_type)
        return policy


@functools.cache
def op_table() -> tuple[Row, ...]:
    """Returns the rows of `op_policies.def`, in file order."""
    rows = _ROW.findall(_DEF_FILE.read_text(encoding="utf-8"))
    return tuple(
        Row(index, op, overload, CastPolicy(cpu), CastPolicy(cuda), CastPolicy(xpu), CastPolicy(mps), redispatch)
        for index, (op, overload, cpu, cuda, xpu, mps, redispatch) in enumerate(rows)
    )


@functools.cache
def rows_by_name() -> Mapping[str, Row]:
    """Returns the rows of the table by full name."""
    return MappingProxyType({row.name: row for row in op_table()})


def schema_of(op: Row | str) -> torch._C.FunctionSchema | None:
    """Returns the schema of a row, or of the overload with a full name. None: this PyTorch has no such overload."""
    name, _, overload = (op.name if isinstance(op, Row) else op).partition(".")
    try:
        return torch._C._get_schema(name, overload)
    except (RuntimeError, TypeError):  # the latter for a name that is no UTF-8
        return None


def registered(device_type: str) -> frozenset[str]:
    """Returns the ops that now have a kernel on the stock autocast key of a device type; libraries may add some."""
    key, has_kernel = f"Autocast{device_type.upper()}", torch._C._dispatch_has_kernel_for_dispatch_key
    try:
        ops = frozenset(name for name in torch._C._dispatch_get_all_op_names() if has_kernel(name, key))
    except RuntimeError:  # there is no such key
        ops = frozenset()
    if not ops:
        raise UnsupportedDeviceError(
            f"this PyTorch registers no op for autocast on device type {device_type!r}. Legal: 'cpu', 'cuda', 'xpu', "
            "'mps', 'maia', 'mtia', and those of backends that register theirs."
        )
    return ops


def missing_rows(device_type: str) -> tuple[Row, ...]:
    """Returns the rows with a policy on one of `DEVICE_TYPES` that the running PyTorch does not register there."""
    names = registered(device_type)
    return tuple(row for row in _rows_with_a_policy(device_type) if row.name not in names)


def unlisted_ops(device_type: str) -> tuple[str, ...]:
    """Returns the ops, also of libraries, that stock registers on one of `DEVICE_TYPES` and the table leaves to it."""
    return tuple(sorted(registered(device_type) - {row.name for row in _rows_with_a_policy(device_type)}))


def _rows_with_a_policy(device_type: str) -> list[Row]:
    return [row for row in op_table() if row.policy(device_type) is not CastPolicy.fallthrough]
