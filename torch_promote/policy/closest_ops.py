"""The ops whose names a misspelt name may mean. A wrong suggestion is worse than none, so the limits are narrow."""

from __future__ import annotations

from collections.abc import Iterable

from torch_promote.policy.op_table import rows_by_name

__all__ = ["closest_ops"]

#: What programs call ops, and what the ops are called.
_ALIASES = {
    "conv": ("conv1d", "conv2d", "conv3d"),
    "convolution": ("conv1d", "conv2d", "conv3d"),
    "crossentropy": ("cross_entropy_loss",),
    "sdpa": ("scaled_dot_product_attention",),
}
#: How many names a suggestion has at most.
_SHOWN = 3


def closest_ops(name: str, ops: Iterable[str], namespace: str = "aten") -> list[str]:
    """Returns the ops that a misspelt name is likely to mean, the likeliest first. Often there are none.

    An op is close if its letters are the same but for a few edits: fewer for an op of PyTorch that has no row in the op
    table, since few programs name these. A whole word at an end of a row's name counts, too: "attention".

    Args:
        name: The name, without a namespace and an overload.
        ops: The names of the namespace's ops, without the namespace; or other names.
        namespace: The namespace; "" for names that are not of ops.

    Example:
        >>> closest_ops("sofmax", ["softmax", "fmax", "trace"]), closest_ops("layernorm", ["layer_norm", "log_normal"])
        (['softmax'], ['layer_norm'])
        >>> closest_ops("torch", ["trace", "trunc"])
        []
    """
    rows = {row.partition("::")[2].partition(".")[0] for row in rows_by_name()} if namespace == "aten" else None
    found = []
    name = name.strip()
    asked = _letters(name)
    if rows is not None and asked in _ALIASES:
        ops = set(ops)
        return [op for op in _ALIASES[asked] if op in ops]
    for op in dict.fromkeys(ops):
        known = rows is None or op in rows
        if (op.startswith("_") and not name.startswith("_")) or (op.endswith("_") and not name.endswith("_")):
            continue  # few programs name private ops, or those that write in place
        edits = _edits(asked, _letters(op), _limit(asked, known))
        if edits is not None:
            found.append((edits, not known, op))
        elif known and _is_word_of(name.lower(), op):
            found.append((_SHOWN + 1, not known, op))
    return [op for _, _, op in sorted(found)[:_SHOWN]]


def _letters(name: str) -> str:
    return name.lower().replace("_", "")


def _limit(asked: str, known: bool) -> int:
    """How many edits may lie between a name and an op."""
    steps = (5, 7, 12) if known else (6, 10)
    return sum(len(asked) >= step for step in steps)


def _is_word_of(name: str, op: str) -> bool:
    return len(name) > 2 and name != "forward" and (op.startswith(f"{name}_") or op.endswith(f"_{name}"))


def _edits(a: str, b: str, limit: int) -> int | None:
    """The number of insertions, deletions, replacements and swaps of neighbours between two texts; None: over a limit.

    One swap is always allowed. Texts with different first letters are not close, unless these are swapped.
    """
    if a == b:
        return 0
    if len(a) > 2 and sorted(a) == sorted(b):
        limit = max(limit, 1)
    elif a[:1] != b[:1]:
        return None
    if abs(len(a) - len(b)) > limit:
        return None
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1] if last[-1] <= limit else None
