"""`make_rule`: a user's own promotion rule, made from a table or a function of two dtypes, and checked."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_promote.errors import RuleDefinitionError, explains_arguments, shown
from torch_promote.policy.dtype_names import operand_of_name, parse_dtype
from torch_promote.reference.dtypes import ALL_DTYPES, dtype_name, is_complex, is_floating, kind
from torch_promote.reference.promotion import CODES
from torch_promote.reference.promotion_rules.named_rules import RULE_NAMES, RuleName, promotion_rule
from torch_promote.reference.promotion_rules.rule import NUMBER_TYPES, PromotionRule

Pairs = Mapping[tuple[torch.dtype, torch.dtype], torch.dtype | None]
PairFunction = Callable[[torch.dtype, torch.dtype], torch.dtype | None]

#: The dtypes for which a function is called, in all pairs.
PAIR_DTYPES: tuple[torch.dtype, ...] = tuple(CODES.values())


#: The builders of the rules that `make_rule` has made and somebody holds, by the rules' content.
_builds: weakref.WeakValueDictionary[tuple[Any, ...], Callable[[torch.dtype], PromotionRule]] = (
    weakref.WeakValueDictionary()
)


@explains_arguments
def make_rule(
    name: str,
    tensors: Pairs | PairFunction,
    *,
    over: RuleName | PromotionRule = "strict",
    numbers: Mapping[tuple[type, torch.dtype], torch.dtype | None] | None = None,
    floats: Mapping[torch.dtype, torch.dtype | None] | None = None,
    default_dtype: torch.dtype | None = None,
) -> PromotionRule:
    """Makes a promotion rule.

    Args:
        name: The rule's name, for errors. It must not be in `RULE_NAMES`. Wherever a dtype is expected below, its name
            is accepted, too.
        tensors: The common dtype of two tensors' dtypes: a table of pairs, in either order or both, which may be
            partial; or a function of two dtypes, which is called for every pair of `PAIR_DTYPES`. None: the pair has no
            common dtype.
        over: The rule for whatever `tensors`, `numbers` and `floats` do not define. Over "strict", a pair that is
            missing in the table has no common dtype.
        numbers: Maps a type of Python number (bool, int, float, complex) and the tensors' dtype to the common dtype.
        floats: Maps common dtypes to their dtypes in true division.
        default_dtype: The default dtype for `over`. None: the current one.

    Returns:
        The rule. `make_rule` determines whether it is associative. If it is not, more than two dtypes have a common
        dtype only if folding them in every order gives the same one.

    Raises:
        RuleDefinitionError: An argument has another type than the above; or the table has two results for a pair,
            promotes a dtype with itself to another one, or has a result that is not a dtype. The message names the
            pair.
        DtypeError: The default dtype does not exist, or is none that `torch.set_default_dtype` takes.

    Example:
        >>> rule = make_rule("careful", {(torch.int32, torch.float32): torch.float64}, over="torch")
        >>> rule.common([torch.float32, torch.int32]), rule.common([torch.int8, torch.float32])
        (torch.float64, torch.float32)
        >>> make_rule("odd", {(torch.int8, torch.int8): torch.int16})
        Traceback (most recent call last):
        ...
        torch_promote.errors.RuleDefinitionError: rule 'odd': int8 with itself is int16. It must be int8.
    """
    _check_arguments(name, tensors, over, numbers, floats)
    pairs = _of_function(name, tensors) if callable(tensors) else _both_ways(name, tensors)
    numbers = {_named(key): _named(answer) for key, answer in (numbers or {}).items()}
    floats = {_named(source): _named(answer) for source, answer in (floats or {}).items()}
    default = torch.get_default_dtype() if default_dtype is None else parse_dtype(default_dtype, "default_dtype")
    _check_numbers_and_floats(name, numbers, floats)

    @functools.cache
    def build(default: torch.dtype) -> PromotionRule:
        base = promotion_rule(over, default)
        return _built(name, base, pairs, numbers, floats, build)

    # Two rules of one content are one object. `build` holds `over`, so that its address is not used again.
    content = tuple(frozenset(table.items()) for table in (pairs, numbers, floats))
    known = _builds.setdefault((name, *content, over if isinstance(over, str) else id(over)), build)
    return known(default)


def _check_arguments(name: object, tensors: object, over: object, numbers: object, floats: object) -> None:
    """Raises if an argument of `make_rule` has the wrong type. What is in the tables is checked later."""
    if not isinstance(name, str) or not name:
        raise RuleDefinitionError(f"the name of a rule is a str that is not empty, got {shown(name)}.")
    if name in RULE_NAMES:
        raise RuleDefinitionError(f"{name!r} is the name of an existing rule. Choose another.")
    if not (callable(tensors) or isinstance(tensors, Mapping)):
        raise _refused(
            name,
            f"tensors is a mapping of pairs of dtypes to dtypes, or a function of two dtypes, got "
            f"{tensors!r} of type {type(tensors).__name__}.",
        )
    if not isinstance(over, PromotionRule):
        promotion_rule(over)  # type: ignore[arg-type]  # it raises if there is no such rule
    for what, table in (("numbers", numbers), ("floats", floats)):
        if not (table is None or isinstance(table, Mapping)):
            raise _refused(name, f"{what} is a mapping, or None, got {shown(table)} of type {type(table).__name__}.")


def _named(value: Any) -> Any:
    """A dtype for its name, also in a pair. What is not the name of one is left for the checks."""
    return tuple(map(_named, value)) if isinstance(value, tuple) else operand_of_name(value)


def _built(
    name: str,
    base: PromotionRule,
    pairs: Pairs,
    numbers: Mapping[tuple[type, torch.dtype], torch.dtype | None],
    floats: Mapping[torch.dtype, torch.dtype | None],
    build: Callable[[torch.dtype], PromotionRule],
) -> PromotionRule:
    known = list(dict.fromkeys(d for d in ALL_DTYPES if (d, d) in base.tensors or (d, d) in pairs))
    table = {(a, b): pairs.get((a, b), base.of_pair(a, b)) for a in known for b in known}
    associative = _is_associative(table, known)

    def reason(a: torch.dtype | type, b: torch.dtype) -> str:
        if isinstance(a, type):
            return f"the rule has no entry for a Python {a.__name__} with {dtype_name(b)}"
        if table.get((a, b)) is not None:
            return "the result would depend on the order of the operands"
        return f"the rule has no common dtype for {dtype_name(a)} and {dtype_name(b)}"

    changed = {pair for pair, answer in pairs.items() if answer is not base.of_pair(*pair)}
    zero_dims = {
        pair: (pair[0] if kind(pair[1]) <= kind(pair[0]) else pairs[pair]) if pair in changed else found
        for pair, found in base.zero_dims.items()
    }
    return PromotionRule(
        name=name,
        tensors=table,
        numbers={**base.numbers, **numbers},
        floats={**base.floats, **floats},
        zero_dim_is_weak=base.zero_dim_is_weak,
        associative=associative,
        zero_dims=zero_dims,
        default_dtype=base.default_dtype,
        over=base,
        reason=reason,
        many=None if associative else functools.partial(_of_many, table, base),
        build=build,
    )


def _both_ways(name: str, table: Pairs) -> Pairs:
    """The table with every pair in both orders, and with each dtype paired with itself."""
    found: dict[tuple[torch.dtype, torch.dtype], torch.dtype | None] = {}
    for pair, answer in ((_named(pair), _named(answer)) for pair, answer in table.items()):
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise _refused(name, f"a key of the table is a pair of dtypes, got {shown(pair)}.")
        a, b = pair
        _check_answer(name, f"{_shown(a)} with {_shown(b)}", pair, answer)
        if a is b and answer is not a:
            raise _refused(name, f"{_shown(a)} with itself is {_shown(answer)}. It must be {_shown(a)}.")
        if found.get((a, b), answer) is not answer:
            raise _refused(
                name,
                f"{_shown(b)} with {_shown(a)} is {_shown(found[a, b])}, but {_shown(a)} with "
                f"{_shown(b)} is {_shown(answer)}. The order must not matter.",
            )
        found |= {(a, b): answer, (b, a): answer, (a, a): a, (b, b): b}
    return found


def _of_function(name: str, function: PairFunction) -> Pairs:
    table: dict[tuple[torch.dtype, torch.dtype], torch.dtype | None] = {}
    for a, b in itertools.product(PAIR_DTYPES, repeat=2):
        try:
            table[a, b] = function(a, b)
        except Exception as error:
            raise _refused(
                name,
                f"the function raises for {_shown(a)} with {_shown(b)}: {error!r}. "
                "Return None for two dtypes without a common dtype.",
            ) from error
    return _both_ways(name, table)


def _check_numbers_and_floats(name: str, numbers: Mapping[Any, Any], floats: Mapping[Any, Any]) -> None:
    for key, answer in numbers.items():
        if not (isinstance(key, tuple) and len(key) == 2 and key[0] in NUMBER_TYPES):
            raise _refused(name, f"a key of numbers is bool, int, float or complex with a dtype, got {shown(key)}.")
        _check_answer(name, f"a Python {key[0].__name__} with {_shown(key[1])}", key[1:], answer)
    for source, answer in floats.items():
        words = f"the floating dtype of {_shown(source)}"
        _check_answer(name, words, (source,), answer)
        if answer is not None and not (is_floating(answer) or is_complex(answer)):
            raise _refused(name, f"{words} is {_shown(answer)}, which is not floating.")


def _check_answer(name: str, words: str, dtypes: Sequence[object], answer: object) -> None:
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype):
            raise _refused(name, f"{dtype!r} is not a dtype.")
    if answer is not None and not isinstance(answer, torch.dtype):
        raise _refused(name, f"{words} is {answer!r}. Legal: a torch.dtype, or None for no common dtype.")


def _refused(name: str, text: str) -> RuleDefinitionError:
    return RuleDefinitionError(f"rule {name!r}: {text}")


def _shown(dtype: object) -> str:
    return dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)


def _is_associative(table: Pairs, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether folding gives the same result, or none, in every order."""

    def join(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
        return None if a is None or b is None else table.get((a, b), a if a is b else None)

    # In a table with few promotions, such as one over "strict", most triples fail either way.
    return all(join(join(a, b), c) is join(a, join(b, c)) for a, b, c in itertools.product(dtypes, repeat=3))


def _of_many(table: Pairs, base: PromotionRule, dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """Uses the base rule's `many` if the table changes none of the pairs, and folds in every order otherwise."""
    pairs = itertools.permutations(dtypes, 2)
    if base.many is not None and all(table.get(pair) is base.of_pair(*pair) for pair in pairs):
        return base.many(dtypes)
    return _in_every_order(table, dtypes)


def _in_every_order(table: Pairs, dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """The result of folding in every order. None: two orders differ, or one fails."""
    results: dict[frozenset[torch.dtype], frozenset[torch.dtype | None]] = {
        frozenset({d}): frozenset({d}) for d in dtypes
    }
    for size in range(2, len(dtypes) + 1):
        for chosen in map(frozenset, itertools.combinations(dtypes, size)):
            results[chosen] = frozenset(
                None if found is None else table.get((found, last), found if found is last else None)
                for last in chosen
                for found in results[chosen - {last}]
            )
    found, *others = results[frozenset(dtypes)]
    return None if others else found
