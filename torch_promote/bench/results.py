"""The results of a benchmark, and their JSON."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_promote.bench.cases import Case, Measured, Settings
from torch_promote.bench.figures import Overhead, Spread
from torch_promote.regions.defaults import spell_default_policy
from torch_promote.text_layout import html_table

__all__ = ["Result", "report"]


@dataclass(frozen=True, slots=True, repr=False)
class Result:
    """The figures of one case.

    Attributes:
        case: The case.
        ratio: ours / stock; None if stock has no such feature.
        ratio_to_hand: ours / hand; None if there is no version by hand.
        overheads: (ours - base) / (stock - base), by base.
        overheads_ns: ours - base and stock - base, by base and contender, in nanoseconds.
        times_ns: The time of each contender, in nanoseconds.
        measured: Casts, memory and kernels, by contender.
        instructions: The instructions of one run of each contender, if they were counted.
    """

    case: Case
    ratio: Spread | None = None
    ratio_to_hand: Spread | None = None
    overheads: Mapping[str, Overhead] = field(default_factory=dict)
    overheads_ns: Mapping[str, Mapping[str, Spread]] = field(default_factory=dict)
    times_ns: Mapping[str, Spread] = field(default_factory=dict)
    measured: Mapping[str, Measured] = field(default_factory=dict)
    instructions: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        ratio = "" if self.main_ratio is None else f", {self._base} {_spell(self.main_ratio)}"
        return f"<Result {self.case.suite}: {self.case.name}{ratio}>"

    def _repr_html_(self) -> str:
        rows = [[name, f"{time.median:,.0f} ns", _spell(time)] for name, time in self.times_ns.items()]
        rows += [[name, f"{number:,.0f} instructions", ""] for name, number in self.instructions.items()]
        note = "" if self.main_ratio is None else f"{self._base}: {_spell(self.main_ratio)}"
        return html_table(["contender", "median", "median (quartiles)"], rows, self.case.name, note)

    @property
    def _base(self) -> str:
        return "ours / hand" if self.ratio is None else "ours / stock"

    @property
    def main_ratio(self) -> Spread | None:
        """The ratio to stock; to the version by hand if stock has no such feature."""
        return self.ratio or self.ratio_to_hand

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain data; torch_promote.bench documents the format."""
        return {
            **self.case.as_dict(),
            "ratio": _plain(self.ratio),
            "ratio_to_hand": _plain(self.ratio_to_hand),
            "overheads": {base: _plain(share) for base, share in self.overheads.items()},
            "overheads_ns": {base: _all_plain(costs) for base, costs in self.overheads_ns.items()},
            "times_ns": _all_plain(self.times_ns),
            "casts": {name: dict(measured.casts) for name, measured in self.measured.items() if measured.casts},
            "peak_bytes": {name: measured.peak_bytes for name, measured in self.measured.items()},
            "kernels": {
                name: measured.kernels for name, measured in self.measured.items() if measured.kernels is not None
            },
            "copies": {name: _plain(measured.copies) for name, measured in self.measured.items() if measured.copies},
            "compiled": {
                name: dict(measured.compiled) for name, measured in self.measured.items() if measured.compiled
            },
            "instructions": dict(self.instructions),
            "target": self._target(),
        }

    def _target(self) -> dict[str, Any] | None:
        target = self.case.target
        if target is None or not self.instructions:
            return None
        return {**dataclasses.asdict(target), "measured": target.of(self.instructions)}


def _spell(spread: Spread) -> str:
    return f"{spread.median:.3g} ({spread.low:.3g} to {spread.high:.3g})"


def _plain(value: Any) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)


def _all_plain(values: Mapping[str, Spread]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in values.items()}


def report(results: Sequence[Result], settings: Settings, skipped: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the results of a run and its settings as plain data; torch_promote.bench documents the format."""
    from torch_promote import __version__

    return {
        "torch": torch.__version__,
        "torch_promote": __version__,
        "device": settings.device,
        "device_name": _device_name(settings.device),
        "threads": settings.threads,
        "rounds": settings.rounds,
        "clock": settings.clock,
        "default_policy": spell_default_policy(),
        "skipped": list(skipped),
        "results": [result.as_dict() for result in results],
    }


def _device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
