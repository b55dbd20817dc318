"""The table of `torch-promote bench --device cuda-stand-in`: kernels, casts and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["FOOTNOTE", "column", "lines_of_counts"]

_HEAD = (
    "            ---- kernels ---- ------------- casts ----------- ------ KiB ------",
    "contender     all copies cast    w    a    g forward backward moved alloc  peak",
)
#: Explains the columns.
FOOTNOTE = """\
kernels: all of one run, after a first one in the same region; of these, those
that copy, and of these, those that cast. casts: of weights, activations and
gradients; narrowing + widening in the forward and in the backward. KiB: moved
by the casts, allocated, and the peak of two runs."""
_PHASES = ("forward", "backward")


def lines_of_counts(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of the table: the head and, under each case, a line for each contender.

    Args:
        results: Results as plain data; torch_promote.bench documents the format.
    """
    lines = list(_HEAD)
    for result in results:
        lines.append(result["case"])
        for name in filter(result["kernels"].__contains__, ("stock", "ours", "hand", "already_cast", "plain")):
            casts, copies = result["casts"][name], result["copies"][name]
            kinds = "".join(f"{casts[kind]:5}" for kind in ("weights", "activations", "gradients"))
            forward, backward = (f"{copies[phase]['narrowing']}+{copies[phase]['widening']}" for phase in _PHASES)
            sizes = (copies["moved_bytes"], copies["allocated_bytes"], result["peak_bytes"][name])
            lines.append(
                f"{column(name):11}{result['kernels'][name]:6}{copies['kernels']:7}{copies['cast_kernels']:5}{kinds}"
                f"{forward:>8}{backward:>9}{''.join(map(_kib, sizes))}"
            )
    return lines


def _kib(size: int) -> str:
    return f"{size / 1024:6.1f}" if size < 100 * 1024 else f"{size / 1024:6.0f}"


def column(contender: str) -> str:
    """Returns the name of a contender for readers."""
    return "cast before" if contender == "already_cast" else contender
