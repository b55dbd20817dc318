"""Compares 300 random ops outside the op table, under overrides, with the reference's plan."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.override_effects import Policy, by_turns, check_effect, full_name
from helpers.side_by_side import Outcome
from torch_promote.observe.dispatch import observe_dispatch
from torch_promote.observe.ops import tensors_in
from torch_promote.parity.entry_run import Bound, copied
from torch_promote.parity.samples import op_database
from torch_promote.policy.legality import legal_policies
from torch_promote.policy.op_table import CastPolicy, op_table
from torch_promote.reference.autocast import AutocastPlan

#: The number of samples called per entry.
_SAMPLES = 2


class _First:
    """Keeps the first call that it observes: the op as it is dispatched, before autocast sees it."""

    def __init__(self) -> None:
        self.call: tuple[Any, list[Any]] | None = None

    def begin(self, op: Any, args: list[Any]) -> None:
        if self.call is None:
            self.call = op, copied(args)


@functools.cache
def functional_ops() -> dict[str, list[Bound]]:
    """Returns the overloads outside of the table that write nothing, by their full names, with their sample calls."""
    rows = {row.name for row in op_table()}
    found: dict[str, list[Bound]] = {}
    for entry in op_database().values():
        if torch.float32 not in entry.supported_dtypes("cpu"):
            continue
        torch.manual_seed(0)
        random.seed(0)
        # Not through entry.sample_inputs, which walks the stack for each sample to name the test that it is for.
        for sample in itertools.islice(
            entry.sample_inputs_func(entry, "cpu", torch.float32, entry.supports_autograd), _SAMPLES
        ):
            call = _first_call(functools.partial(entry.op, sample.input, *sample.args, **sample.kwargs))
            if call is not None and full_name(call[0]) not in rows and tensors_in(call[1]):
                found.setdefault(full_name(call[0]), []).append(_bound(*call))
    return {name: found[name] for name in sorted(found) if not found[name][0][0]._schema.is_mutable}


def _first_call(run: Callable[[], Any]) -> tuple[Any, list[Any]] | None:
    first = _First()
    with observe_dispatch(first):
        try:
            run()
        except Exception:  # keep the calls dispatched until then
            return first.call
    return first.call


def _bound(op: Any, args: list[Any]) -> Bound:
    """The call, with keyword-only arguments by name."""
    both = list(zip(op._schema.arguments, args, strict=True))
    by_name = {argument.name: value for argument, value in both if argument.kwarg_only}
    return op, tuple(value for argument, value in both if not argument.kwarg_only), by_name


BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CASTING = (CastPolicy.fp32, CastPolicy.lower_precision_fp, CastPolicy.promote, F64)
OTHERS = (CastPolicy.keep, CastPolicy.banned, CastPolicy.fallthrough, CastPolicy.fp32_set_opt_dtype)

COUNT, PARTS = 300, 10
#: The everyday run has two parts of the ops.
EVERYDAY = (0, 1)
PARAMETERS = [pytest.param(part, marks=[] if part in EVERYDAY else pytest.mark.slow) for part in range(PARTS)]
each_part = pytest.mark.parametrize("part", PARAMETERS)


@functools.cache
def chosen() -> tuple[str, ...]:
    return tuple(random.Random(20).sample(sorted(functional_ops()), COUNT))


def calls(name: str) -> list[tuple[str, Bound]]:
    """A sample of float32 tensors, and one whose tensors alternate between the lower dtype and float32."""
    first, last = functional_ops()[name][0], functional_ops()[name][-1]
    op, args, kwargs = last
    mixed_args, mixed_kwargs = by_turns((args, kwargs), (BF16, F32))
    return [("float32", first), ("mixed", (op, mixed_args, mixed_kwargs))]


def policies(name: str) -> list[Policy]:
    legal = legal_policies(name)
    return [p for p in (*CASTING, *OTHERS) if (CastPolicy.fp32 if isinstance(p, torch.dtype) else p) in legal]


def outcomes(part: int) -> dict[Policy, list[tuple[AutocastPlan, Outcome]]]:
    found: dict[Policy, list[tuple[AutocastPlan, Outcome]]] = {policy: [] for policy in (*CASTING, *OTHERS)}
    for name in chosen()[part::PARTS]:
        for kind, bound in calls(name):
            for policy in policies(name):
                found[policy].append(check_effect(kind, bound, policy))
    return found


@pytest.mark.filterwarnings("ignore")
@each_part
def test_on_the_cpu_in_bits(part: int) -> None:
    for policy, made in outcomes(part).items():
        cast = [outcome for plan, outcome in made if plan.casts]
        with_gradients = [outcome for outcome in cast if outcome.gradients]
        if policy is CastPolicy.banned:
            assert all(outcome.error is not None for _, outcome in made)
        elif policy in CASTING:
            # Of one tensor alone there is nothing to promote.
            least = 2 if policy is CastPolicy.promote else 15
            assert len([outcome for outcome in cast if outcome.error is None]) >= least, policy
            assert with_gradients, policy
        else:
            assert not cast
