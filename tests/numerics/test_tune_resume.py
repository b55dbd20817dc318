"""`tune(resume=...)`: the content of a file, and errors for unsuitable files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.planted_steps import Calls, planted_step, registered_meanwhile
from helpers.subprocesses import Program


@pytest.fixture(autouse=True)
def policies_of_ops() -> Iterator[None]:
    with registered_meanwhile():
        yield


class Killed(BaseException):
    pass


def until(step: Calls, last: int) -> Any:
    """A step that is killed in its call with a number."""

    def killed(number: int) -> torch.Tensor:
        if step.count == last:
            raise Killed
        return step(number)

    return killed


def tuned(step: Any, model: torch.nn.Module, file: Path | None, **options: Any) -> tp.Tuning:
    return tp.tune(step, model=model, **{"tolerance": 0.04, "resume": file, **options})


def test_a_killed_tuning_loses_at_most_one_trial(tmp_path: Path) -> None:
    step = planted_step(8, 2, seed=61)
    whole = tuned(step, step.model, None)
    total = step.count
    for last in (4, 7, total - 1):
        file = tmp_path / f"{last}.json"
        step.count = 0
        with pytest.raises(Killed):
            tuned(until(step, last), step.model, file)
        assert step.count == last
        step.count = 0
        again = tuned(step, step.model, file)
        assert last + step.count <= total + 1
        assert again.overrides == whole.overrides
        assert again.policy == whole.policy
        assert again.met
        assert again.runs <= whole.runs + 1
        assert [one.overrides for one in again.trials] == [one.overrides for one in whole.trials]
        assert again.certificate.text == whole.certificate.text
        assert again.noise_floor == whole.noise_floor
        assert [site.name for site in again.comparison.sites] == [site.name for site in whole.comparison.sites]


def test_a_finished_tuning_makes_no_run(tmp_path: Path) -> None:
    step = planted_step(4, 1, seed=62)
    whole = tuned(step, step.model, tmp_path / "file.json")
    step.count = 0
    again = tuned(step, step.model, tmp_path / "file.json")
    assert step.count == 0
    assert again.overrides == whole.overrides
    assert again.certificate == whole.certificate
    assert again.runs == whole.runs


def test_a_larger_budget_goes_on(tmp_path: Path) -> None:
    step = planted_step(8, 2, seed=63)
    small = tuned(step, step.model, tmp_path / "file.json", budget=8)
    assert small.certificate.kind == "passes"
    assert step.count <= 8
    large = tuned(step, step.model, tmp_path / "file.json", budget=60)
    assert large.certificate.kind != "passes"
    assert step.count <= 60


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tolerance": 0.05}, "belongs to another tuning: tolerance 0.05, in the file 0.04"),
        ({"level": "module"}, 'level "module", in the file "op"'),
        ({"batches": 2}, "batches 2, in the file 1"),
        ({"seed": 1}, "seed 1, in the file 0"),
        ({"dtype": torch.float16}, 'dtype "torch.float16", in the file null'),
        ({"model": torch.nn.Linear(2, 2)}, "parameters"),
    ],
)
def test_a_file_of_another_tuning_is_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    step = planted_step(3, 1, seed=64)
    tuned(step, step.model, tmp_path / "file.json", budget=6)
    model = options.pop("model", step.model)
    with pytest.raises(tp.errors.OptionError, match=text):
        tuned(step, model, tmp_path / "file.json", **options)


def test_another_policy_in_force_is_refused(tmp_path: Path) -> None:
    step = planted_step(3, 1, seed=65)
    tuned(step, step.model, tmp_path / "file.json", budget=6)
    with (
        tp.installed_as(policy="cuda"),
        pytest.raises(tp.errors.OptionError, match="belongs to another tuning: policy"),
    ):
        tuned(step, step.model, tmp_path / "file.json")


def test_other_weights_are_refused(tmp_path: Path) -> None:
    step = planted_step(3, 1, seed=66)
    tuned(step, step.model, tmp_path / "file.json", budget=6)
    with torch.no_grad():
        next(step.model.parameters()).add_(1)
    with pytest.raises(tp.errors.OptionError, match=r"gives other results .* different before the step: .*model"):
        tuned(step, step.model, tmp_path / "file.json")


def test_other_random_numbers_that_the_step_does_not_draw_are_no_difference(tmp_path: Path) -> None:
    step = planted_step(3, 1, seed=67)
    whole = tuned(step, step.model, tmp_path / "file.json")
    torch.manual_seed(12345)
    step.count = 0
    assert tuned(step, step.model, tmp_path / "file.json").overrides == whole.overrides
    assert step.count == 1  # the reference, to see that it is the same


def test_patterns_that_were_run_need_no_budget_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3)))
    inputs = torch.randn(4, 4, 8)

    def step(number: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs[number])  # type: ignore[no-any-return]

    first = tuned(step, model, tmp_path / "file.json", tolerance=1e-6, level="site")
    assert list(first.overrides) == ["[012].0"]
    again = tuned(step, model, tmp_path / "file.json", tolerance=1e-6, level="site", budget=first.runs)
    assert again.overrides == first.overrides


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1}', "\x00"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    step = planted_step(3, 1, seed=68)
    with pytest.raises(tp.errors.OptionError, match="was not written by tune"):
        tuned(step, step.model, file)
    assert file.read_text() == text


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    step = planted_step(3, 1, seed=69)
    tuned(step, step.model, file, budget=6)
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "format": 2}))
    with pytest.raises(tp.errors.OptionError, match="has format 2; this release reads format 1"):
        tuned(step, step.model, file)


@pytest.mark.slow
def test_a_process_that_is_killed_is_taken_up_by_another(tmp_path: Path) -> None:
    code = f"""
        import os, signal, sys, torch_promote as tp
        from helpers.planted_steps import planted_step
        step = planted_step(8, 2, seed=61)
        last = int(sys.argv[1])

        def counted(number):
            if step.count == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(number)

        tuning = tp.tune(counted, model=step.model, tolerance=0.04, resume={os.fspath(tmp_path / "file.json")!r})
        print(step.count, sorted(tuning.overrides) == sorted(step.model.planted), tuning.met)
    """
    killed = Program(code, "9").wait()
    assert killed.returncode == -signal.SIGKILL
    done = Program(code, "-1").wait()
    step = planted_step(8, 2, seed=61)
    tuned(step, step.model, None)
    count, found, met = done.stdout.split()
    assert (found, met) == ("True", "True"), done.stderr
    assert 9 + int(count) <= step.count + 1
