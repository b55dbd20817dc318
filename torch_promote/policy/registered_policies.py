"""The ops that `register_policy` was called for. regions/defaults.py writes them, and `Policy.named` reads them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["registered_ops", "replace_registered_ops"]

_ops: tuple[tuple[str, str], ...] = ()


def registered_ops() -> tuple[tuple[str, str], ...]:
    """Returns the ops that were given a policy, as pairs of an overload's full name and a device type, sorted."""
    return _ops


def replace_registered_ops(ops: Iterable[tuple[str, str]]) -> None:
    """Replaces what `registered_ops` returns."""
    global _ops
    _ops = tuple(sorted(ops))
