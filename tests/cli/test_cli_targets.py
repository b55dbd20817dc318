"""`torch-promote compare` and `tune`: the target, what they print and write, and their exit statuses."""

from __future__ import annotations

import html
import json
import shlex
import sys
from argparse import Namespace
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_promote as tp
from helpers.autoloading import entry_point, variables
from helpers.command_line import Capture, error_of, terminal_of_80_columns
from helpers.program_defaults import as_it_was
from torch_promote.cli import target as targets
from torch_promote.cli.program import main
from torch_promote.cli.target import TargetError
from torch_promote.errors import OptionError
from torch_promote.numerics.comparison import Comparison
from torch_promote.numerics.tuning import Tuning

__all__ = ["as_it_was", "entry_point", "terminal_of_80_columns"]  # fixtures

#: In float16, the product overflows where the mean is taken in float32: it needs float32, and the layers do not.
MAKE = '''
import sys
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.log1p((self.first(x) * SCALE * SCALE).abs()))

SCALE = 1000.0

def make():
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(2, 4)

    def step():
        print("a step")
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).float().square().mean()

    return model, step

def checked():
    model, step = make()
    return {"model": model, "step": step, "check": lambda results: False}

calls = []

def counting(act):
    """A step that counts its calls, and does more at each."""
    model, step = make()
    def other():
        calls.append(1)
        return act(step(), len(calls))
    return model, other

def odd():
    return counting(lambda loss, number: loss * number)

def interrupted():
    def act(loss, number):
        if number == 7:
            raise KeyboardInterrupt
        return loss
    return counting(act)
'''
#: In float16, nothing overflows.
with pytest.raises(RuntimeError) as _raised:
    torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 4), torch.ones(4))
#: PyTorch's own words for shapes that do not fit, up to the shapes. They differ between its versions.
SHAPES = str(_raised.value).partition(" (")[0]
GOOD = MAKE.replace("SCALE = 1000.0", "SCALE = 1.0")
TARGET = "train.py:make"
ASK = ["tune", TARGET, "--tolerance", "1e-3"]


@pytest.fixture
def target_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory has train.py with `make`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "train", raising=False)  # that of the test before
    file = tmp_path / "train.py"
    file.write_text(MAKE)
    return file


# The target


def open_target(text: str) -> AbstractContextManager[Any]:
    return targets.open_target(Namespace(target=text, json=None))


def test_a_file_is_loaded_as_python_would(target_file: Path) -> None:
    (target_file.parent / "beside.py").write_text("NAME = 'beside'\n")
    target_file.write_text(
        MAKE
        + "from beside import NAME\nSEEN = __name__, sys.argv, sys.path[0]\nif __name__ == '__main__':\n    1 / 0\n"
    )
    path, arguments = list(sys.path), list(sys.argv)
    with open_target("train.py:make") as target:
        module = sys.modules[target.step.__module__]
        assert ("train", ["train.py"], str(target_file.parent)) == module.SEEN
        assert isinstance(target.model, torch.nn.Module)
    assert (sys.path, sys.argv) == (path, arguments)


def test_a_name_of_a_library_is_free(target_file: Path) -> None:
    import random

    target_file.rename(target_file.with_name("random.py"))
    with open_target("random.py:make") as target:
        assert target.step.__module__ == "target_random"
    assert sys.modules["random"] is random


def test_a_module_is_found_in_the_working_directory(target_file: Path) -> None:
    target_file.rename(target_file.with_name("module_of_a_test.py"))
    with open_target("module_of_a_test:make") as target:
        assert target.step.__module__ == "module_of_a_test"


RETURNS = (
    "import torch\ndef make():\n    model = torch.nn.Linear(1, 1)\n    step = lambda: model.weight.sum()\n    return "
)


@pytest.mark.parametrize(
    ("returned", "restore"),
    [
        ("[model, step]", 0),
        ("model, step, (model, torch.Generator())", 2),
        ("model, step, model", 1),
        ("dict(model=model, step=step, restore=[model], metric='loss', check=bool)", 1),
    ],
)
def test_what_it_may_return(target_file: Path, returned: str, restore: int) -> None:
    target_file.write_text(RETURNS + returned)
    with open_target("train.py:make") as target:
        assert len(target.restore) == restore
        assert (target.metric, target.check) == (("loss", bool) if "metric" in returned else (None, None))


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ("None", "train.py:make returned NoneType. Legal: (model, step), (model, step, restore), or a dict with"),
        ("step, model", "returned model: function, step: Linear. Legal"),
        ("{'model': model}", "returned model: Linear. Legal"),
        ("{'model': model, 'step': step, 'steps': 3}", "returned model: Linear, step: function, steps: int. Legal"),
    ],
)
def test_what_it_may_not_return(target_file: Path, returned: str, complaint: str) -> None:
    target_file.write_text(RETURNS + returned)
    with pytest.raises(OptionError, match=r"^TARGET: ") as caught, open_target("train.py:make"):
        pass
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("train.py:mak", "TARGET: train.py has no function 'mak'. Closest: make. Its functions: make, checked, count"),
        ("train.py:SCALE", "TARGET: SCALE of train.py is a value of type float, not a function."),
        ("train.py:step", "TARGET: train.py has no function 'step'. Its functions: make, checked, counting, odd, "),
        ("empty.py:make", "TARGET: empty.py has no function 'make'. It has no function at all."),
        ("text.txt:make", "TARGET: 'text.txt' is not a Python file: its name has to end in .py."),
        ("nomodule:make", "TARGET: there is no module 'nomodule'. Python looks in "),
    ],
)
def test_a_target_that_is_not_there(target_file: Path, text: str, complaint: str) -> None:
    for name in ("text.txt", "empty.py"):
        (target_file.parent / name).write_text("text" * ("text" in name))
    with pytest.raises(OptionError) as caught, open_target(text):
        pass
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


MAKES = "lambda: (torch.nn.Linear(1, 1), torch.ones)"


@pytest.mark.parametrize(
    "source",
    [
        f"globals()['ma' + 'ke'] = {MAKES}",
        "from beside import *",
        "from beside import build as make",
        "import sys\nsetattr(sys.modules[__name__], 'make', build)",
        "if True:\n    make = build",
        "def __getattr__(name):\n    return build",
        "exec('mak' + 'e = build')",
    ],
)
def test_a_file_in_which_the_function_is_made_as_it_runs(target_file: Path, source: str) -> None:
    (target_file.parent / "beside.py").write_text(f"import torch\nbuild = make = {MAKES}\n")
    sys.modules.pop("beside", None)
    target_file.write_text(f"import torch\nbuild = {MAKES}\n{source}\n")
    with open_target("train.py:make") as target:
        assert isinstance(target.model, torch.nn.Module)


def test_a_file_without_the_function_does_not_run(target_file: Path, capsys: Capture) -> None:
    target_file.write_text("open('ran', 'w')\ndef _hidden(): pass\nclass Model:\n    def make(self): pass\n")
    assert "has no function 'nope'. It has no function at all." in error_of(capsys, "compare", "train.py:nope")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("package", "start", "target", "remedy"),
    [
        ("pkg", ".", "pkg/train.py", "pkg.train:make"),
        ("pkg/inner", ".", "pkg/inner/train.py", "pkg.inner.train:make"),
        ("pkg", "pkg", "train.py", "(cd {folder}) pkg.train:make"),
    ],
)
def test_a_file_of_a_package_is_named_as_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, package: str, start: str, target: str, remedy: str
) -> None:
    folder = tmp_path / package
    folder.mkdir(parents=True)
    for place in [folder, *folder.parents][: package.count("/") + 1]:
        (place / "__init__.py").touch()
    (folder / "train.py").write_text("from . import other\ndef make(): pass\n")
    monkeypatch.chdir(tmp_path / start)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    assert main(["compare", f"{target}:make"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"It is a part of a package. Name the module: {remedy.format(folder=tmp_path)}"


def test_a_function_that_needs_arguments_is_no_target(target_file: Path, capsys: Capture) -> None:
    target_file.write_text("def make(rate):\n    pass")
    assert main(["compare", TARGET]) == 2
    said = "TARGET: make of train.py gets no arguments: missing a required argument: 'rate'. Give it a default."
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "head", "frames"),
    [
        ("import no_such_package\ndef make(): pass", "ModuleNotFoundError: No module named 'no_such_package'", 1),
        ("def make():\n    return inner()\ndef inner():\n    raise ValueError('no data')", "ValueError: no data", 2),
        ("import sys\ndef make():\n    sys.exit(3)", "SystemExit: 3", 1),
        ("import torch\ndef make():\n    torch.nn.Linear(2, 2)(torch.ones(3))", "RuntimeError: ", 1),
        ("import torch_promote\ndef make():\n    torch_promote.my_autocast('cpx')", "", 1),
        ("def make(:\n    pass", "SyntaxError: invalid syntax", 1),
    ],
)
def test_an_error_of_its_code_has_the_frames_of_its_files(
    target_file: Path, source: str, head: str, frames: int
) -> None:
    target_file.write_text(source)
    with pytest.raises(TargetError) as caught, open_target("train.py:make"):
        pass
    text = str(caught.value)
    assert text.startswith(f"train.py:make raised {head}")
    assert text.count("  File ") == text.count(f'  File "{target_file}", line ') == frames


# compare


def test_it_prints_the_comparison(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(GOOD)
    assert main(["compare", TARGET, "--json", "run.json", "--html", "run.html"]) == 0
    out, err = capsys.readouterr()
    comparison = Comparison.load("run.json")
    assert out == "a step\n" * 3 + f"{comparison}\n"
    wrote, following = err.splitlines()
    assert wrote == "torch-promote: wrote run.html, run.json"
    tune = "torch-promote: next: torch-promote tune train.py:make --tolerance 1e-"
    assert following.startswith(tune)
    assert following.endswith(" -o mine.toml")
    assert Path("run.html").read_text().startswith("<!DOCTYPE html>")
    assert {site.module for site in comparison.sites} >= {"first", "last", ""}
    assert max(map(len, out.splitlines())) <= 80


WRONG = """
import torch

def make():
    model = torch.nn.Linear(2, 2)
    def step(number):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.tensor([1002.0, 1006.0]).to(model(torch.ones(1, 2)).dtype).float().sin()
    return model, step
"""


def test_the_tolerance_to_tune_for_is_below_a_large_error(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(WRONG)
    assert main(["compare", TARGET]) == 0
    out, err = capsys.readouterr()
    assert err.endswith("torch-promote: next: torch-promote tune train.py:make --tolerance 1e-2 -o mine.toml\n")
    text = " ".join(out.split())
    assert "to.dtype in (model), train.py:8 (estimated to change the outputs by " in text
    assert "; no override acts on it: change the conversion in the code)" in text


def test_json_has_stdout_to_itself(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(GOOD)
    assert main(["compare", TARGET, "--json", "--gradients", "--batches", "2"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert Comparison.from_dict(data).to_dict() == data
    assert "first.weight" in [one["name"] for one in data["gradients"]]
    *steps, following = err.splitlines()
    assert steps == ["a step"] * 6
    assert following.startswith("torch-promote: next: ")


def test_the_policies_are_those_that_were_named(target_file: Path, capsys: Capture) -> None:
    Path("mine.toml").write_text('format = 1\n[all]\nmul = "fp32"\n')
    assert main(["compare", TARGET, "--candidate", "mine.toml"]) == 0
    assert "comparison of a changed policy with fp32" in capsys.readouterr().out
    assert main(["compare", TARGET, "--candidate", "off", "--reference", "off"]) == 0
    said = capsys.readouterr()
    assert "The results are identical: no op ran in another dtype than in the reference." in said.out


@pytest.mark.parametrize(
    ("source", "arguments", "status", "message"),
    [
        (GOOD, "make --tolerance 1e-9", 1, "the error of loss, "),
        (GOOD, "make --tolerance loss=1e-9", 1, "is over 1e-9."),
        (GOOD, "make --tolerance loss=0.5", 0, ""),
        (GOOD, "make --tolerance los=1", 2, "the step returns no 'los'. Closest: loss. It returns loss."),
        (MAKE, "make", 1, "torch-promote: loss is not finite, and the reference's is.\n"),
        (MAKE, "odd", 2, "torch-promote: error: "),
        (
            MAKE.replace("(2, 4)", "(2, 3)"),
            "make",
            2,
            f"error: the step of train.py:make raised RuntimeError: {SHAPES}",
        ),
    ],
)
def test_statuses_of_compare(
    target_file: Path, capsys: Capture, source: str, arguments: str, status: int, message: str
) -> None:
    target_file.write_text(source)
    assert main(["compare", *f"train.py:{arguments}".split()]) == status
    assert message in capsys.readouterr().err


# tune


def test_it_saves_the_policy_that_it_found(target_file: Path, capsys: Capture) -> None:
    files = ["-o", "mine.toml", "--html", "run.html", "--json", "run.json"]
    assert main([*ASK, *files]) == 0
    out, err = capsys.readouterr()
    tuning = Tuning.load("run.json")
    assert out.replace("a step\n", "").split() == str(tuning).split()
    assert err == (
        "torch-promote: wrote mine.toml, run.html, run.json\n"
        "torch-promote: next: torch-promote compare train.py:make --candidate mine.toml\n"
    )
    assert dict(tuning.overrides) == {"aten::mul": "fp32"}
    assert tp.Policy.load("mine.toml") == tuning.policy
    assert "mine.toml" in Path("run.html").read_text()
    Path("out").mkdir()
    assert main([*ASK, "-o", "out/my best.toml", "--html", "run.html"]) == 0
    page = Path("run.html").read_text()
    assert "mine.toml" not in page
    assert html.unescape(page.replace("<wbr>", "")).count('install(policy="out/my best.toml")') == 1
    capsys.readouterr()
    assert main(["compare", TARGET, "--candidate", "mine.toml", "--tolerance", "1e-3"]) == 0
    then = "torch-promote: then, for your training script: torch-promote"
    assert capsys.readouterr().err == f"{then} run --policy mine.toml SCRIPT\n"
    assert main(["compare", TARGET]) == 1
    assert capsys.readouterr().err.endswith(f"{then} find-nan SCRIPT\n")


def test_the_options_of_the_search(target_file: Path, capsys: Capture) -> None:
    options = ["--level", "site", "--budget", "30", "--batches", "2", "--dtype", "bfloat16", "--seed", "3"]
    assert main([*ASK[:2], "--tolerance", "loss=1e-3", *options, "--resume", "runs.json", "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert (data["level"], data["budget"], data["tolerance"], data["met"]) == ("site", 30, {"loss": 1e-3}, True)
    assert err.count("a step\n") == 2 * data["runs"]
    saved = "torch-promote: the policy was not saved. To save it, name a file: -o mine.toml\n"
    again = f"train.py:make --tolerance loss=1e-3 {' '.join(options)} --resume runs.json --json -o mine.toml\n"
    assert err.endswith(f"{saved}torch-promote: next: torch-promote tune {again}")
    assert Path("runs.json").exists()


def test_a_policy_that_needs_no_override(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(GOOD)
    files = ["-o", "mine.toml", "--html", "run.html", "--json", "run.json"]
    assert main([*ASK[:3], "0.5", *files]) == 0
    out, err = capsys.readouterr()
    assert "Nothing to tune: the current policy meets the tolerance without an override" in " ".join(out.split())
    assert "wrote mine.toml, run.html, run.json\ntorch-promote: mine.toml has no override beyond the " in err
    assert tp.Policy.load("mine.toml") == tp.Policy.stock()
    assert json.loads(Path("run.json").read_text())["met"] is True
    assert main([*ASK[:3], "0.5"]) == 0
    err = capsys.readouterr().err
    assert "not saved" not in err
    assert err.endswith(f"next: torch-promote tune {TARGET} --tolerance 0.5 -o mine.toml --direction speed\n")
    assert main(_next_of(err)) == 0
    assert "tuning for speed" in capsys.readouterr().out


def test_a_loss_that_is_nan_in_the_reference_too(target_file: Path, capsys: Capture) -> None:
    program = MAKE.replace("SCALE = 1000.0", "SCALE = float('nan')")
    target_file.write_text(f"{program}\nif __name__ == '__main__':\n    make()[1]()\n")
    for command in (["compare", "train.py:make"], ["tune", "train.py:make", "--tolerance", "0.5", "-o", "mine.toml"]):
        assert main(command) == 1
        out, err = capsys.readouterr()
        assert "NaN or inf in the reference: loss." in " ".join(out.split())
        assert "next: torch-promote find-nan train.py" in err
    assert not Path("mine.toml").exists()


def test_a_search_for_the_layers_that_bear_float8(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(GOOD.replace("(4, ", "(16, ").replace(", 4)", ", 16)"))
    options = ["--level", "module", "--direction", "speed", "--formats", "lower,float8", "-o", "mine.toml"]
    assert main(["tune", TARGET, "--tolerance", "0.1", *options]) == 0
    assert "in float8  94.1%" in capsys.readouterr().out  # the last layer has one feature
    assert tp.Policy.load("mine.toml").to_dict()["modules"] == {"first": {"aten::linear.default": "float8:rowwise"}}


def test_a_search_that_finds_nothing_or_is_interrupted(
    target_file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["tune", "train.py:checked", "--tolerance", "1e-3", "-o", "mine.toml"]) == 1
    out, err = capsys.readouterr()
    assert out.replace("a step\n", "").startswith("not met: ")
    assert err.endswith(
        "torch-promote: no policy was found, so mine.toml was not written.\n"
        "torch-promote: next: torch-promote compare train.py:checked\n"
    )
    assert not Path("mine.toml").exists()
    assert main(["tune", "train.py:interrupted", *ASK[2:], "-o", "best.toml"]) == 130
    assert "\nInterrupted. " in capsys.readouterr().out
    assert Path("best.toml").exists()

    def interrupted(step: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torch_promote.numerics.tune.tune", interrupted)
    assert main([*ASK, "-o", "mine.toml"]) == 130
    assert "interrupted in the first runs: nothing is known, and nothing was saved." in capsys.readouterr().err
    assert not Path("mine.toml").exists()


PROGRAM = """
if __name__ == "__main__":
    model, step = make()
    print("loss", step().item())
"""


@pytest.mark.parametrize("level", ["op", "module"])
def test_the_last_step_is_printed_and_works(
    target_file: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, entry_point: Path, level: str
) -> None:
    """From a comparison to the search, and from there to the unchanged program under the policy that was found."""
    monkeypatch.setenv("PYTHONPATH", variables(entry_point)["PYTHONPATH"])
    target_file.write_text(GOOD + PROGRAM)
    assert main(["compare", TARGET]) == 0
    assert main([*_next(capfd), "--level", level]) == 0
    command = _next(capfd)
    assert command == ["run", "--policy", "mine.toml", "train.py"]
    losses = []
    for policy in ([], ["--policy", "fp32"], command[1:3]):
        assert main(["run", *policy, "train.py"]) == 0
        losses.append(float(capfd.readouterr().out.partition("loss ")[2]))
    assert abs(losses[2] - losses[1]) < abs(losses[0] - losses[1])
    assert main(["compare", TARGET, "--candidate", "mine.toml", "--tolerance", "0.5"]) == 0
    assert _next(capfd) == command


def test_the_last_step_of_a_comparison_with_inf(target_file: Path, capsys: Capture) -> None:
    target_file.write_text(MAKE + PROGRAM)
    assert main(["compare", TARGET]) == 1
    assert _next(capsys) == ["find-nan", "train.py"]


def _next(capture: Capture) -> list[str]:
    """The command that was said last."""
    return _next_of(capture.readouterr().err)


def _next_of(err: str) -> list[str]:
    return shlex.split(err.splitlines()[-1].partition("torch-promote: next: torch-promote ")[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("compare --candidate nope", "nope"),
        ("compare --batches 0", "batches (the number of times a run calls step) must be 1 or more, got 0."),
        ("tune --tolerance 0", "tolerance must be a finite number above 0"),
        ("tune --tolerance 1 --formats lower,float8", 'is for direction="speed", got direction="accuracy"'),
        ("tune --tolerance 1 --budget 2", "budget (the maximum number of runs) must be 6 or more, got 2"),
    ],
)
def test_a_wrong_command_line(target_file: Path, capsys: Capture, arguments: str, message: str) -> None:
    command, *options = arguments.split()
    assert message in error_of(capsys, command, TARGET, *options)
