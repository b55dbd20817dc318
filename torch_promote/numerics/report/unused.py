"""`TraceReport.unused_overrides`: overrides of regions, modules and the default policy that no call used."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = ["UnusedOverride", "unused_overrides"]


@dataclass(frozen=True, slots=True)
class UnusedOverride:
    """An override that no call used: it names the wrong op, or the op ran outside of the region or module.

    Attributes:
        op: The op as it was written: "softmax", "linalg_*". "*" stands for a named policy.
        device: Its device types: "cpu", "cpu, cuda".
        policy: The cast policy's name, "float16" for a dtype, or 'policy "cuda"'.
        said_by: Its source: "region at FILE:LINE", 'module policy "NAME"', "install" or "the default policy".

    Example:
        >>> print(UnusedOverride("exp", "cpu", "fp32", 'module policy "blocks.3"'))
        exp: fp32, asked for by module policy "blocks.3"
    """

    op: str
    device: str
    policy: str
    said_by: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the override as JSON-compatible values."""
        return asdict(self)

    def __str__(self) -> str:
        what = self.policy if self.op == "*" else f"{self.op}: {self.policy}"
        return f"{what}, asked for by {self.said_by}"


def unused_overrides(report: TraceRecords) -> list[UnusedOverride]:
    """Returns the overrides that were set in a traced block and that no call in it used.

    An override that repeats the op's existing policy counts as unused. See NOTE [ What one override is ].

    Args:
        report: The report of a block that has ended.
    """
    names = ("op", "device", "policy", "said_by")
    return [UnusedOverride(*(one[name] for name in names)) for one in report.asked if not one["used"]]
