"""`TraceRecords`: the calls of a trace, and their sums."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from torch_promote.numerics.records.calls import Call, Phase
from torch_promote.numerics.records.groups import CallGroup, CastGroup, Totals

__all__ = ["Calls", "TraceRecords"]


class Calls(list[Call]):
    """A list of calls that can be filtered."""

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
            phase: "forward", "backward" or "recompute".
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


class TraceRecords:
    """The records of `trace`.

    Attributes:
        calls: The first `max_calls` calls, in the order in which they ended: an op after the ops that it calls.
        dropped: The number of calls after those. Sums and tables include them.
        device_names: The names of the GPUs that were used.
        torch_version: PyTorch's version.
        not_seen: Computations of the block that are not in the report, one sentence each.
        steps: The number of optimizer steps that ended in the block.
        asked: The overrides that were set in the block, one dict each, for `unused_overrides`. Filled at the end of the
            block.
    """

    def __init__(self, max_calls: int) -> None:
        self.calls = Calls()
        self.dropped = 0
        self.torch_version = str(torch.__version__)
        self.not_seen: list[str] = []
        self.device_names: list[str] = []
        self.steps = 0
        self.asked: list[dict[str, Any]] = []
        self._max_calls = max_calls
        self._totals = Totals()
        self._lock = threading.Lock()

    def add(self, call: Call) -> int | None:
        """Adds a call; for the tracer. Returns its index in `calls`, or None if it is not stored there."""
        with self._lock:
            self._totals.add(call)
            if len(self.calls) < self._max_calls:
                self.calls.append(call)
                return len(self.calls) - 1
            self.dropped += 1
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def name_devices(self) -> None:
        """Fills `device_names`; for the tracer."""
        devices = {info.device for call in self.calls for info in (*call.inputs, *call.outputs)}
        for device in sorted(device for device in devices if device.startswith("cuda")):
            with contextlib.suppress(RuntimeError, AssertionError):  # fake tensors: this process lacks the device
                self.device_names.append(torch.cuda.get_device_name(device))

    @property
    def total(self) -> CallGroup:
        """All calls."""
        return self._totals.all()

    def by_op(self) -> list[CallGroup]:
        """Returns the calls by op and overload, most cast bytes first."""
        return self._totals.by(0)

    def by_module(self) -> list[CallGroup]:
        """Returns the calls by module, most cast bytes first."""
        return self._totals.by(1)

    def by_line(self) -> list[CallGroup]:
        """Returns the calls by source line, most cast bytes first."""
        return self._totals.by(2)

    def casts(self) -> list[CastGroup]:
        """Returns the casts by argument, op, module and line, most bytes first."""
        return self._totals.casts()
