"""The certificate: sentences about what the runs of a search have proved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch_promote.numerics.tuning.search import MOST_FOR_MINIMUM, prove
from torch_promote.numerics.tuning.tuning import Certificate

__all__ = ["certify", "violations"]

#: The maximum number of violations listed.
_SHOWN = 20
#: The maximum number of members listed per set.
_NAMED = 6


def violations(known: Mapping[frozenset[str], bool]) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Returns the pairs of a set that passed and a larger one that failed.

    Example:
        >>> violations({frozenset(): True, frozenset("a"): False})
        [(frozenset(), frozenset({'a'}))]
    """
    passed = [subset for subset, good in known.items() if good]
    failed = [subset for subset, good in known.items() if not good]
    pairs = [(small, large) for small in passed for large in failed if small < large]
    return sorted(pairs, key=lambda pair: (len(pair[1]) - len(pair[0]), sorted(pair[0]), sorted(pair[1])))


def certify(
    found: frozenset[str],
    order: Sequence[str],
    known: Mapping[frozenset[str], bool],
    *,
    direction: str,
    budget: int,
    ended: str = "",
) -> Certificate:
    """Returns the certificate of a set.

    Args:
        found: The names of the candidates that keep or get float32.
        order: The names of all candidates.
        known: The sets that ran, and whether they passed.
        direction: "accuracy" or "speed".
        budget: The maximum number of runs.
        ended: Why the search ended early; "".
    """
    kind = prove(found, order, known)
    if direction == "speed" and kind == "minimum":
        kind = "1-minimal"  # a minimum of bytes was not proved
    pairs = violations(known)
    count = f"{len(found)} override{'' if len(found) == 1 else 's'}"
    number = sum(math.comb(len(order), size) for size in range(len(found)))
    if ended and kind == "passes":
        text = f"It passed. {ended}"
    elif direction == "speed" and not found:
        text = "It is 1-maximal: all candidates are lowered."
    elif direction == "speed":
        text = {
            "1-minimal": "It is 1-maximal: with "
            f"{'the other one' if len(found) == 1 else f'any one of the other {len(found)}'} lowered as well it fails.",
            "passes": "It passed. Whether more can be lowered is unknown.",
        }[kind]
    else:
        text = {
            "minimum": "It is a minimum: without an override it fails."
            if number == 1
            else f"It is a minimum: all {number} smaller sets of overrides were run and failed.",
            "1-minimal": f"It is 1-minimal: without any one of the {count} it fails.",
            "passes": "It passed. Whether fewer overrides are sufficient is unknown.",
        }[kind]
    if direction == "accuracy" and kind == "1-minimal":
        ran = sum(1 for subset in known if len(subset) < len(found))
        text += f" {ran} of {number} smaller sets were run."
        if len(order) <= MOST_FOR_MINIMUM and number - ran > 0 and not pairs:
            text += f" For a proof of the minimum, allow a budget of {budget + number - ran} runs."
    shown = [
        f"{_spell(small, order, direction)} passed, and {_spell(large, order, direction)} failed"
        for small, large in pairs[:_SHOWN]
    ]
    shown += [f"{len(pairs) - _SHOWN} more pairs"] if len(pairs) > _SHOWN else []
    return Certificate(kind=kind, text=text, violations=tuple(shown))  # type: ignore[arg-type]


def _spell(subset: frozenset[str], order: Iterable[str], direction: str) -> str:
    names = [name for name in order if name in subset]
    what = "float32 for" if direction == "accuracy" else "float32 kept for"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{what} {', '.join(names[:_NAMED]) or 'nothing'}{more}"
