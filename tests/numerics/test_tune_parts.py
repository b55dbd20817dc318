"""Parts of `tune`: candidates, patterns, verdicts, errors before the search, and how it finds compiled code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from helpers.overflowing_steps import scaled
from torch_promote.numerics import trials as resume
from torch_promote.numerics.candidates import Overriding, compress, overridable
from torch_promote.numerics.comparing.site import Site
from torch_promote.numerics.trials import Judge
from torch_promote.numerics.tune import check_full, is_compiled
from torch_promote.numerics.tuning.tuning import Certificate, Trial


class Leaf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


# --- candidates


def test_sites_that_cannot_have_the_override_are_named() -> None:
    def site(op: str, overload: str, module: str, **others: Any) -> Site:
        return Site(op, overload, module, 1, **{"dtypes": "float16", "in_region": True, **others})

    mm = site("aten::mm", "", "blocks.1")
    sites = [
        mm,
        site("aten::mm", "", "blocks.0.inner"),
        site("aten::mm", "", "blocks.0"),
        site("aten::add_", "Tensor", "blocks.1"),
        site("aten::mm", "", "blocks.2", dtypes="float32"),
        site("aten::mm", "", "blocks.2", in_region=False),
    ]
    found, others = overridable(sites, "fp32", ["blocks.0"])
    assert found == [mm]
    assert others[0] == "aten::mm (2 calls): the policy has 'blocks.0' run with autocast off"
    assert others[1].startswith("aten::add_.Tensor (1 call): ")
    assert "Legal" not in others[1]


def test_modules_with_a_policy_of_their_own_are_no_candidates() -> None:
    model = nn.ModuleDict({"a": Leaf(), "b": Leaf()})
    tp.set_module_policy(model, {"a": "cuda"})
    found = Overriding(tp.Policy.stock(), model, "site", "fp32")
    [text] = found.choose_from(Site("aten::linear", "", module, 1) for module in ("a", "b"))
    assert text == "aten::linear in a: set_module_policy has given 'a' a policy for it, which wins"
    assert [site.module for site in found.sites] == ["b"]


def test_two_patterns_do_not_select_one_module() -> None:
    """`m.*` would select m.inner, to which `*.inner` gives another table."""
    model = nn.ModuleDict(
        {
            **{name: nn.ModuleDict({"inner": Leaf()}) for name in "ab"},
            "m": nn.ModuleDict({name: Leaf() for name in ("p", "q", "inner")}),
        }
    )
    found = Overriding(tp.Policy.stock(), model, "site", "fp32")
    places = [("a.inner", "aten::linear"), ("b.inner", "aten::linear"), ("m.p", "aten::mm"), ("m.q", "aten::mm")]
    assert found.choose_from(Site(op, "", module, 1) for module, op in places) == []
    tables = found.overrides(set(places))
    assert set(tables) == {module for module, _ in places}
    packed = compress(tables, found)
    assert set(packed) == {"*.inner", "m.p", "m.q"}
    found.policy(packed)


# --- verdicts


def test_results_of_fewer_batches_are_no_results() -> None:
    judge, loss = Judge(0.1), {"loss": torch.ones(())}
    with pytest.raises(tp.errors.StepError, match=r"the run ended after 1 of 2 batches\."):
        judge.errors([loss], [loss, loss])


def test_a_metric_may_return_several_numbers() -> None:
    model, step = scaled()

    def metric(loss: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"once": loss, "twice": 2 * loss}

    tuning = tp.tune(step, model=model, tolerance=0.01, metric=metric)
    assert tuning.tolerance == {"once": 0.01, "twice": 0.01}
    assert tuning.errors["once"] == pytest.approx(tuning.errors["twice"])
    assert tuning.overrides == {"aten::mul": "fp32"}


def test_a_certificate_names_violations_of_monotonicity() -> None:
    certificate = Certificate("1-minimal", "Without any one it fails.", ("a passed, and a with b failed",))
    assert str(certificate) == "Without any one it fails.\n  not monotone: a passed, and a with b failed"


# --- what float32 does not cure


def failed(**facts: Any) -> Trial:
    return Trial(overrides=(), errors={"loss": 0.5}, passed=False, why="gate", **facts)


@pytest.mark.parametrize(
    ("full", "text"),
    [
        (None, r"^the policy does not meet the tolerance, and no op that can get an override runs in a lower dtype\. "),
        (failed(), r"with all 2 candidates in float32 .* either: loss 0\.5 \(tolerance 0\.1\)\. "),
        (failed(error="ValueError: mine"), r"either: it raised ValueError: mine\. "),
        (failed(), r" Not among them: op1; op2; op3; op4; op5; 2 more\. 1 call differs\. 2 calls differ\. Raise the"),
    ],
)
def test_why_float32_does_not_cure(full: Trial | None, text: str) -> None:
    judge = Judge({"loss": 0.1})
    judge.name_metrics([{"loss": torch.ones(())}])
    others = [f"op{number}" for number in range(1, 8)] if "Not among" in text else []
    not_aligned = ["1 call differs.", "2 calls differ."] if others else []
    with pytest.raises(tp.errors.Fp32FailsError, match=text):
        check_full(full, judge, 2, others, not_aligned)


def test_check_may_disagree_with_what_float32_gives() -> None:
    judge = Judge({"loss": 1.0}, check=lambda result: False)
    judge.name_metrics([{"loss": torch.ones(())}])
    with pytest.raises(
        tp.errors.Fp32FailsError, match=r"either: check does not agree, at loss 0\.5 \(tolerance 1\)\. "
    ):
        check_full(failed(), judge, 1, [], [])


# --- files


def test_a_file_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def write(path: object, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resume, "write_atomically", write)
    model, step = scaled()
    with pytest.raises(
        tp.errors.OptionError, match=r"resume='.*file\.json' cannot be written: No space left on device\."
    ):
        tp.tune(step, model=model, tolerance=0.01, resume=tmp_path / "file.json")


# --- compiled code


def _with_an_unset_variable() -> Callable[[], Any]:
    def step() -> Any:
        return later

    if not torch.__version__:
        later = 1
    return step


def test_where_it_looks_for_compiled_code() -> None:
    plain, compiled = nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager")

    def run(model: Callable[..., Any]) -> Any:
        return model(torch.ones(1, 2))

    assert not is_compiled(functools.partial(run, plain), plain)
    assert not is_compiled(_with_an_unset_variable(), plain)
    assert is_compiled(functools.partial(run, compiled), plain)
    assert is_compiled(functools.partial(run, model=compiled), plain)
    assert is_compiled(lambda: compiled, None)
    assert is_compiled(lambda: 0, nn.Sequential(compiled))
    plain.compile(backend="eager")
    assert is_compiled(lambda: 0, nn.Sequential(plain))
