"""The target of `torch-promote compare` and `tune`: how it is loaded, and what is said of one that cannot be used."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from helpers.targets import MAKE, target_file
from torch_promote.cli.target import Target, TargetError
from torch_promote.cli.target import open_target as open_target_of
from torch_promote.errors import OptionError
from torch_promote.numerics.step_runs import StepRuns
from torch_promote.policy.policy import Policy

__all__ = ["target_file"]  # a fixture


def open_target(text: str) -> AbstractContextManager[Target]:
    return open_target_of(Namespace(target=text, json=None))


RETURNS = (
    "import torch\ndef make():\n    model = torch.nn.Linear(1, 1)\n    step = lambda: model.weight.sum()\n    return "
)


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
    assert "train" not in sys.modules


def test_a_name_of_a_library_is_free(target_file: Path) -> None:
    target_file.rename(target_file.with_name("random.py"))
    import random

    with open_target("random.py:make") as target:
        assert target.step.__module__ == "target_random"
    assert sys.modules["random"] is random


def test_a_module_is_found_in_the_working_directory(target_file: Path) -> None:
    (target_file.parent / "project_of_a_test").mkdir()
    target_file.rename(target_file.parent / "project_of_a_test" / "training.py")
    try:
        with open_target("project_of_a_test.training:make") as target:
            assert target.step.__module__ == "project_of_a_test.training"
    finally:
        for name in ("project_of_a_test", "project_of_a_test.training"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("returned", "restore"),
    [
        ("model, step", 0),
        ("[model, step]", 0),
        ("model, step, [model]", 1),
        ("model, step, (model, torch.Generator())", 2),
        ("model, step, model", 1),
        ("{'model': model, 'step': step}", 0),
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
        ("None", "train.py:make returned None. Legal: (model, step), (model, step, restore), or a dict with"),
        ("model", "train.py:make returned a Linear. Legal"),
        ("model, step, (), 3", "returned a tuple of 4. Legal"),
        (
            "step, model",
            "returned a function as the model, which is not an nn.Module. They are the other way round.",
        ),
        ("model, 3", "returned a int as the step, which is not a function. Legal"),
        ("{'model': model}", "returned a dict with the keys model. Legal"),
        ("{'model': model, 'step': step, 'steps': 3}", "returned a dict with the keys model, step, steps. Legal"),
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
        ("train.py", "TARGET 'train.py': name a file or module and a function in it that returns "
         "(model, step), such as train.py:make."),
        ("make", "such as train.py:make."),
        (":make", "name a file or module"),
        ("train.py:", "name a file or module"),
        ("train.py:make()", "name a file or module"),
        ("trian.py:make", "TARGET: there is no file 'trian.py'. Closest: train.py."),
        ("no/where.py:make", "TARGET: there is no file 'no/where.py'."),
        ("train.py:mak", "TARGET: there is no function 'mak' in train.py. Closest: make."),
        ("train.py:SCALE", "TARGET: SCALE in train.py is 1000.0, not a function that returns (model, step)."),
        (".:make", "TARGET: '.' is a folder. Name a Python file in it."),
        ("text.txt:make", "TARGET: 'text.txt' is not a Python file: its name has to end in .py."),
        ("nomodule:make", "TARGET: there is no module 'nomodule'. Python looks in "),
        ("torch.nomodule:make", "TARGET: there is no module 'torch.nomodule'."),
        ("no.module:make", "TARGET: there is no module 'no.module'."),
    ],
)  # fmt: skip
def test_a_target_that_is_not_there(target_file: Path, text: str, complaint: str) -> None:
    (target_file.parent / "text.txt").write_text("text")
    with pytest.raises(OptionError) as caught, open_target(text):
        pass
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "head", "frames"),
    [
        ("import no_such_package", "train.py:make raised ModuleNotFoundError: No module named 'no_such_package'", 1),
        ("1 / 0", "train.py:make raised ZeroDivisionError: division by zero", 1),
        ("def make():\n    return inner()\ndef inner():\n    raise ValueError('no data')",
         "train.py:make raised ValueError: no data", 2),
        ("import sys\ndef make():\n    sys.exit(3)", "train.py:make raised SystemExit: 3", 1),
        ("def make():\n    raise KeyError", "train.py:make raised KeyError\n", 1),
        ("def make(rate):\n    pass", "train.py:make raised TypeError: make() missing 1 required positional", 0),
        ("import torch\ndef make():\n    torch.nn.Linear(2, 2)(torch.ones(3))",
         "train.py:make raised RuntimeError: ", 1),
        ("import torch_promote\ndef make():\n    torch_promote.my_autocast('cpx')",
         "train.py:make raised ", 1),
    ],
)  # fmt: skip
def test_an_error_of_its_code_has_the_frames_of_its_files(
    target_file: Path, source: str, head: str, frames: int
) -> None:
    target_file.write_text(source)
    with pytest.raises(TargetError) as caught, open_target("train.py:make"):
        pass
    text = str(caught.value)
    assert text.startswith(head)
    assert text.count("  File ") == text.count(f'  File "{target_file}", line ') == frames


def test_a_syntax_error_has_its_place(target_file: Path) -> None:
    target_file.write_text("def make(:\n    pass")
    with pytest.raises(TargetError) as caught, open_target("train.py:make"):
        pass
    assert str(caught.value).startswith("train.py:make raised SyntaxError: invalid syntax")
    assert f'  File "{target_file}", line 1\n    def make(:' in str(caught.value)


def test_our_errors_are_not_the_steps(target_file: Path) -> None:
    with pytest.raises(OptionError, match="step must be a function"), open_target("train.py:make"):
        StepRuns(3, torch.nn.Linear(1, 1)).__enter__().run(Policy.stock())  # type: ignore[arg-type]
