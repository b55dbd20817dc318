"""Draws docs/images/performance.svg from the tables of docs/performance.md.

`python docs/generators/performance_plot.py` rewrites the picture. With `--check`, it only reports whether the picture
is up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["draw", "main"]

_DOCS = Path(__file__).parents[1]
_PICTURE = _DOCS / "images" / "performance.svg"

#: Each bar: its group, its label, and the first cell of the row that has its figure, the row's second cell.
BARS = (
    ("Regions", "construct, enter, exit", "construct, enter, exit"),
    ("Regions", "enter and exit of one object", "enter and exit of one object"),
    ("Regions", "call of a decorated function", "call of a decorated function"),
    ("Ops with nothing to cast", "mm", "`mm`, `linear`, `cat`, `mse_loss`"),
    ("Ops with nothing to cast", "exp on the CPU, without a policy", "`exp` on the CPU, a row of CUDA only"),
    ("Ops with casts", "mm 4 x 4, two casts", "`mm`, two activations, 4 x 4"),
    ("Ops with casts", "mm 64 x 64, two casts", "64 x 64"),
    ("Ops with casts", "mm 256 x 256, two casts", "256 x 256"),
    ("Ops with casts", "linear, three casts", "`linear`, three casts (lower_precision_fp)"),
    ("Models", "MLP, forward", "MLP, 20 layers of 32, forward"),
    ("Models", "MLP, forward and backward", "MLP, forward and backward"),
    ("Models", "LSTM, forward", "LSTM, forward"),
    ("Models", "MLP, evaluation, persistent casts", "MLP, evaluation loop, `cache=&quot;persistent&quot;`"),
)

_WIDTH, _LABELS, _STEP, _TOP = 760, 250, 22, 58
_SCALE = 400  # pixels for the time of stock


def _figures(page: str, row: str) -> tuple[float, float, float]:
    """Ours / stock in the first row with a first cell: the median and quartiles, which may be missing."""
    cell = re.escape(row.replace("&quot;", '"'))
    found = re.search(rf"^\| {cell} \| (\d\.\d+)(?: \((\d\.\d+) to (\d\.\d+)\))?", page, re.MULTILINE)
    if found is None:
        raise ValueError(f"performance.md has no row {row!r} with a figure.")
    median, low, high = found.groups()
    return float(median), float(low or median), float(high or median)


def draw(page: str) -> str:
    """Returns the picture as SVG.

    Args:
        page: The page with the figures, as Markdown.
    """
    parts, y, group = [], _TOP, ""
    for name, label, row in BARS:
        if name != group:
            y += 8 if group else 0
            parts.append(f'<text x="12" y="{y + 15}" class="group">{name}</text>')
            y, group = y + _STEP, name
        median, low, high = _figures(page, row)
        width = round(median * _SCALE)
        parts.append(f'<text x="{_LABELS - 10}" y="{y + 14}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{_LABELS}" y="{y + 3}" width="{width}" height="{_STEP - 7}" class="bar"/>')
        if low < high:
            left, right = (_LABELS + round(value * _SCALE) for value in (low, high))
            parts.append(f'<path d="M{left} {y + 10}H{right}" class="spread"/>')
        parts.append(f'<text x="{_LABELS + round(max(high, 1) * _SCALE) + 8}" y="{y + 14}">{median:.2f}</text>')
        y += _STEP
    stock = _LABELS + _SCALE
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 14}" width="{_WIDTH}" role="img">',
            "<title>Time under my_autocast, relative to torch.autocast</title>",
            "<style>text{font:13px sans-serif;fill:#1f2328}.title{font-weight:bold;font-size:15px}"
            ".group{font-weight:bold}.bar{fill:#5b7fc7}.spread{stroke:#1f2328;stroke-width:1.5}"
            ".stock{stroke:#b3402e;stroke-width:1.5;stroke-dasharray:4 3}.note{fill:#b3402e}</style>",
            f'<rect width="{_WIDTH}" height="{y + 14}" fill="#ffffff"/>',
            '<text x="12" y="22" class="title">Time under my_autocast, relative to torch.autocast</text>',
            '<text x="12" y="42">PyTorch 2.13.0, CPU, one thread; shorter is faster</text>',
            f'<text x="{stock}" y="42" text-anchor="middle" class="note">torch.autocast = 1</text>',
            *parts,
            f'<path d="M{stock} {_TOP - 8}V{y + 4}" class="stock"/>',
            "</svg>",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites or checks the picture. Returns 1 if `--check` finds it out of date, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the picture is out of date")
    picture = draw((_DOCS / "performance.md").read_text(encoding="utf-8"))
    if not parser.parse_args(argv).check:
        _PICTURE.write_text(picture, encoding="utf-8")
    elif not _PICTURE.exists() or _PICTURE.read_text(encoding="utf-8") != picture:
        print(f"{_PICTURE} is out of date. Run python docs/generators/performance_plot.py.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
