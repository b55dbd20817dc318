"""`TraceReport.unused_overrides`: what regions, modules and the default policy asked for and no call used."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_promote.numerics.records.trace_records import TraceRecords

__all__ = ["UnusedOverride", "unused_overrides"]


@dataclass(frozen=True, slots=True)
class UnusedOverride:
    """An override that no call used: a misspelt target, an op that the model does not call, or one that ran elsewhere.

    Attributes:
        op: The op as it was written: "softmax", "linalg_*". "*" is all of a policy that has a name.
        device: The device types that it is for: "cpu", "cpu, cuda".
        policy: The cast policy's name, "float16" for a dtype, or 'policy "cuda"'.
        said_by: Who asked for it: "region at FILE:LINE", 'module policy "NAME"', "install" or "the default policy".

    Example:
        >>> print(UnusedOverride("exp", "cpu", "fp32", 'module policy "blocks.3"'))
        exp: fp32, asked for by module policy "blocks.3"
    """

    op: str
    device: str
    policy: str
    said_by: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the override as values that JSON has."""
        return asdict(self)

    def __str__(self) -> str:
        what = self.policy if self.op == "*" else f"{self.op}: {self.policy}"
        return f"{what}, asked for by {self.said_by}"


def unused_overrides(report: TraceRecords) -> list[UnusedOverride]:
    """Returns the overrides that were asked for in a traced block and that no call in it used.

    An override that gives an op the policy that it has anyway counts as one. See NOTE [ What one override is ].

    Args:
        report: The report of a block that has ended.
    """
    names = ("op", "device", "policy", "said_by")
    return [UnusedOverride(*(one[name] for name in names)) for one in report.asked if not one["used"]]
