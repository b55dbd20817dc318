"""A policy as HTML, for a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable

from torch_promote.policy.cast_policy import spell_policy
from torch_promote.policy.module_tables import Tables, entries_of
from torch_promote.policy.named import Change, stock_policy
from torch_promote.text_layout import html_table

__all__ = ["policy_html"]

_SHOWN = 300


def policy_html(name: str | None, changes: Iterable[Change], modules: Tables) -> str:
    """Returns the table of a policy's differences from stock.

    Args:
        name: The policy's name, if it has one.
        changes: Its changes.
        modules: Its tables for modules.
    """
    rows = [
        [op.removeprefix("aten::"), device, spell_policy(value), _spell_stock(op, device)]
        for op, device, value in changes
    ]
    rows += [
        [op.removeprefix("aten::"), section, value if isinstance(value, str) else spell_policy(value), ""]
        for (op, section), value in entries_of(modules).items()
    ]
    title = f"Policy{f' {name}' if name else ''}: {len(rows)} differences from stock"
    if not rows:
        return html.escape(f"Policy {name or ''}".rstrip()).join(("<p>", ": no differences from stock</p>"))
    note = f"... and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return html_table(["op", "device", "policy", "stock"], rows[:_SHOWN], title, note)


def _spell_stock(op: str, device: str) -> str:
    value = stock_policy(op, device)
    return "no entry" if value is None else spell_policy(value)
