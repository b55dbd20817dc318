"""The parts of examples/train_gpt.py: the comparison detects differences; the text and the model are correct."""

from __future__ import annotations

import doctest
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_promote as tp

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import gpt.model
import gpt.train
import train_gpt
from gpt.data import SYMBOLS, Batches, Corpus, encode, stdlib_corpus
from gpt.model import GPT, Config
from gpt.train import CastCounter, Comparison, names_that_differ, start_runs, train

TINY = Config(symbols=len(SYMBOLS), context=8, width=8, heads=2, layers=1)

# --- the comparison


def test_a_step_that_differs_is_found_where_it_is() -> None:
    """One region differs: the losses before that step are equal, those from that step on are not."""
    calls = iter(range(1, 100))

    def turns_at_3() -> Any:
        return nullcontext() if next(calls) < 3 else tp.stock_autocast("cpu")

    runs = start_runs({"plain": nullcontext, "turns": turns_at_3}, TINY, device="cpu", seed=0, scale_loss=False)
    batches = Batches(stdlib_corpus(1000), 2, TINY.context, 0, "cpu")
    steps = list(train(list(runs.values()), runs["plain"], batches, 4))
    assert steps == [1, 2, 3, 4]
    assert runs["turns"].comparison.steps_that_differ == [3, 4]
    assert runs["turns"].comparison.first == "loss"
    assert runs["plain"].comparison.tensors == 0


@pytest.mark.parametrize(
    "planted",
    [
        torch.tensor([1.0, 0.0, 0.5 + 2**-24]),
        torch.tensor([1.0, -0.0, 0.5]),
        torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64),
        torch.tensor([[1.0, 0.0, 0.5]]),
        torch.tensor([1.0, 0.0, math.nan]),
        None,
    ],
    ids=["one bit", "sign of zero", "dtype", "shape", "NaN", "no gradient"],
)
def test_comparison_sees_a_planted_difference(planted: Tensor | None) -> None:
    stock = {"loss": torch.tensor(2.0), "a": torch.tensor([1.0, 0.0, 0.5]), "b": torch.tensor([1.0, 0.0, 0.5])}
    same = {name: tensor.clone() for name, tensor in stock.items()}
    assert names_that_differ(same, stock) == []
    assert names_that_differ({**same, "b": planted}, stock) == ["b"]
    assert names_that_differ(stock, {**same, "b": planted}) == ["b"]
    comparison = Comparison()
    comparison.add(1, same, stock)
    assert (comparison.same, comparison.tensors) == (True, 3)
    comparison.add(2, {**same, "b": planted}, stock)
    comparison.add(3, same, stock)
    assert (comparison.same, comparison.steps_that_differ, comparison.first) == (False, [2], "b")


def test_comparison_of_nothing_is_no_proof() -> None:
    assert not Comparison().same


def test_comparison_takes_a_nan_for_itself() -> None:
    assert names_that_differ({"a": torch.tensor([math.nan])}, {"a": torch.tensor([math.nan])}) == []


def test_comparison_sees_a_tensor_too_many() -> None:
    assert names_that_differ({"a": torch.ones(1), "b": torch.ones(1)}, {"a": torch.ones(1)}) == ["b"]


# --- the parts


def test_only_copies_that_change_the_dtype_are_casts() -> None:
    x = torch.ones(2)
    with CastCounter() as counter:
        x.to(torch.bfloat16)
        x.to(torch.float64)
        x.to(torch.float32)
        x.to(torch.float32, copy=True)
        x.clone()
    assert counter.casts == 2


def test_counting_casts_leaves_no_trace() -> None:
    runs = start_runs(train_gpt.regions("cpu", torch.bfloat16), TINY, device="cpu", seed=0, scale_loss=False)
    batches = Batches(stdlib_corpus(1000), 2, TINY.context, 0, "cpu")
    for run in runs.values():
        before = {name: weight.clone() for name, weight in run.model.state_dict().items()}
        run.count_casts(*batches.next())
        assert (run.losses, run.milliseconds) == ([], [])
        assert names_that_differ(run.model.state_dict(), before) == []


def test_all_runs_start_alike() -> None:
    fp32, *others = start_runs(
        train_gpt.regions("cpu", torch.bfloat16), TINY, device="cpu", seed=3, scale_loss=False
    ).values()
    for run in others:
        assert names_that_differ(run.model.state_dict(), fp32.model.state_dict()) == []
    other_seed = start_runs({"fp32": nullcontext}, TINY, device="cpu", seed=4, scale_loss=False)["fp32"]
    assert names_that_differ(other_seed.model.state_dict(), fp32.model.state_dict()) != []


def test_batches_are_windows_and_what_follows() -> None:
    corpus = Corpus(torch.arange(1000), 1)
    ids, targets = Batches(corpus, 5, 8, 0, "cpu").next()
    assert ids.shape == targets.shape == (5, 8)
    assert torch.equal(ids + 1, targets)
    assert torch.equal(ids, ids[:, :1] + torch.arange(8))
    assert torch.equal(ids, Batches(corpus, 5, 8, 0, "cpu").next()[0])
    assert not torch.equal(ids, Batches(corpus, 5, 8, 1, "cpu").next()[0])


def test_what_is_not_ascii_is_one_symbol() -> None:
    assert encode("a\nüa€").tolist() == [SYMBOLS.index("a"), SYMBOLS.index("\n"), 0, SYMBOLS.index("a"), 0]
    assert len(set(SYMBOLS)) == len(SYMBOLS)


def test_a_character_sees_none_that_follow() -> None:
    model = GPT(TINY)
    ids = torch.randint(len(SYMBOLS), (1, TINY.context))
    changed = ids.clone()
    changed[0, 5] = (ids[0, 5] + 1) % len(SYMBOLS)
    logits, others = model(ids), model(changed)
    assert torch.equal(logits[:, :5], others[:, :5])
    assert not torch.equal(logits[:, 5:], others[:, 5:])


@pytest.mark.parametrize("module", [gpt.model, gpt.train], ids=lambda module: module.__name__)
def test_examples_in_the_docstrings_hold(module: ModuleType) -> None:
    failed, tried = doctest.testmod(module)
    assert (failed, tried > 0) == (0, True)
