"""`make test-ecosystem` (tests/ecosystem/): its programs, its verdicts on their runs, and its report."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).with_name("ecosystem")


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def runs() -> ModuleType:
    return importlib.import_module("runs")


@pytest.fixture
def programs() -> ModuleType:
    return importlib.import_module("programs")


def framework_in(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "programs.toml").write_text(text, encoding="utf-8")
    return folder


def checked(runs: ModuleType, programs: ModuleType, folder: Path, values: dict[str, Any], **keys: Any) -> Any:
    """The verdict on a program whose runs save these values; a string is a run that fails."""
    environments = importlib.import_module("environments")

    def run(program: Any, environment: Any, at: Path, under: tuple[str, ...], variables: dict[str, str]) -> str | None:
        value = values.get(at.name, torch.ones(3))
        if isinstance(value, str):
            return f"{at.name}: {value}"
        (at / "work").mkdir(parents=True)
        torch.save({"losses": [0.5], "weight": value}, at / "work" / "result.pt")
        return None

    program = programs.Program("framework", "program", folder, ("train.py",), **keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_run", run)
        return runs.check(program, environments.Environment(folder, "1.0"), folder / "out")


OTHER = torch.tensor([1.0, 1.0, 1.5])
CHANGED = {"off": OTHER, "override": OTHER}


@pytest.mark.parametrize(
    ("values", "keys", "passed", "problem"),
    [
        (CHANGED, {}, True, None),
        ({}, {"autocast": False}, True, None),
        ({**CHANGED, "variable": OTHER}, {}, False, "variable: result.pt.weight: 1 of 3 elements differ, by up to 0.5"),
        ({**CHANGED, "command": torch.ones(3).double()}, {}, False, "command: result.pt.weight: torch.float64 [3] and"),
        ({"override": OTHER}, {}, False, "off: it changed no bit"),
        ({"off": OTHER}, {}, False, "override: it changed no bit"),
        (CHANGED, {"autocast": False}, False, "off: result.pt.weight: 1 of 3"),
        ({"stock": "exit status 1"}, {}, False, "stock: exit status 1"),
        ({"off": "not run", "override": OTHER}, {"off": False}, True, None),
        ({"off": "not run"}, {"off": False}, False, "off: it changed no bit"),
        ({"off": "not run", "override": "not run"}, {"checks": True}, True, None),
        ({"stock": "exit status 1"}, {"checks": True}, False, "stock: exit status 1"),
        (CHANGED, {"results": ("*.safetensors",)}, False, "the runs saved no file that matches *.safetensors"),
    ],
)
def test_what_becomes_of_a_program(
    runs: ModuleType,
    programs: ModuleType,
    tmp_path: Path,
    values: dict[str, Any],
    keys: dict[str, Any],
    passed: bool,
    problem: str | None,
) -> None:
    verdict = checked(runs, programs, tmp_path, values, **keys)
    assert verdict.passed == passed
    assert (problem is None and not verdict.problems) or problem in verdict.problems[0]


def test_a_failed_run_is_named_and_the_rest_runs(runs: ModuleType, programs: ModuleType, tmp_path: Path) -> None:
    verdict = checked(runs, programs, tmp_path, {**CHANGED, "command": "exit status 3", "off": "stopped"})
    assert not verdict.passed
    assert verdict.problems == ["command: exit status 3", "off: stopped"]


def test_a_stopped_run_does_not_stop_the_next(runs: ModuleType, programs: ModuleType, tmp_path: Path) -> None:
    environment = importlib.import_module("environments").Environment(tmp_path / "environment", "1.0")
    environment.commands.mkdir(parents=True)
    (environment.commands / "python").symlink_to(sys.executable)
    lock = environment.folder / "torch_extensions" / "op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (tmp_path / "train.py").write_text("import time; time.sleep(60)", encoding="utf-8")
    program = programs.Program("framework", "program", tmp_path, ("train.py",), timeout=0.5)
    problem = runs._run(program, environment, tmp_path / "out" / "stock", (), {})
    assert problem.startswith("stock: stopped after ")
    assert not lock.exists()


@pytest.mark.parametrize(
    ("before", "problem"),
    [
        ("open('data', 'w').write('1')", None),
        ("print('no disk'); raise SystemExit(3)", "stock: before.py: exit status 3; see "),
    ],
)
def test_a_script_may_run_before_a_program(
    runs: ModuleType, programs: ModuleType, tmp_path: Path, before: str, problem: str | None
) -> None:
    environment = importlib.import_module("environments").Environment(tmp_path / "environment", "1.0")
    environment.commands.mkdir(parents=True)
    (environment.commands / "python").symlink_to(sys.executable)
    (tmp_path / "before.py").write_text(before, encoding="utf-8")
    (tmp_path / "train.py").write_text("open('result', 'w').write(open('data').read())", encoding="utf-8")
    program = programs.Program("framework", "program", tmp_path, ("train.py",), before="before.py")
    found = runs._run(program, environment, tmp_path / "out" / "stock", (), {})
    if problem is None:
        assert found is None
        assert (tmp_path / "out" / "stock" / "work" / "result").read_text(encoding="utf-8") == "1"
    else:
        assert found.startswith(problem)
        assert (tmp_path / "out" / "stock" / "log").read_text(encoding="utf-8") == "no disk\n"


def test_a_script_that_the_user_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, programs: ModuleType, tmp_path: Path
) -> None:
    folder = framework_in(tmp_path / "framework", '[one]\nprogram = ["$SCRIPT_OF_ONE", "--fast"]\n')
    (program,) = programs.programs_of(folder)
    arguments = ["test-ecosystem", "--folder", str(tmp_path), "--out", str(tmp_path / "out")]

    def command(*more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [*arguments, *more])
        return runpy.run_path(str(FOLDER / "__main__.py"))["main"](), *capsys.readouterr()

    monkeypatch.delenv("SCRIPT_OF_ONE", raising=False)
    assert program.missing
    status, out, error = command()
    assert (status, error) == (2, "framework/one: not run (0 s)\n")
    assert out.splitlines()[-2:] == [
        "framework/one: not run: say where its script is: SCRIPT_OF_ONE=PATH",
        f"0 of 1 programs passed, 1 not run; logs are in {tmp_path / 'out'}",
    ]
    (entry,) = json.loads(command("--json")[1])
    assert (entry["passed"], entry["not_run"]) == (False, "say where its script is: SCRIPT_OF_ONE=PATH")

    script = tmp_path / "checkout" / "train.py"
    monkeypatch.setenv("SCRIPT_OF_ONE", str(script))
    status, _, error = command()
    assert status == 2
    assert error.startswith(f"test-ecosystem: error: SCRIPT_OF_ONE names {script}, which is not a file. ")

    script.parent.mkdir()
    script.touch()
    assert not program.missing
    assert importlib.import_module("runs")._arguments(program) == [str(script), "--fast"]


@pytest.mark.parametrize(
    ("ours", "stock", "expected"),
    [
        ({"a": torch.tensor([float("nan")])}, {"a": torch.tensor([float("nan")])}, None),
        ({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}, "a.pt.a: 1 of 1 elements differ, by up to 0"),
        ({"a": [1, 0.0]}, {"a": [1, -0.0]}, "a.pt.a[1]: 0.0 and -0.0"),
        ({"a": (1, 2)}, {"a": (1,)}, "a.pt.a: 2 and 1 values"),
        ({"a": 1}, {"b": 1}, "a.pt has other keys"),
        ({"a": 1}, {"a": True}, "a.pt.a: int and bool"),
    ],
)
def test_values_are_compared_bit_for_bit(tmp_path: Path, ours: Any, stock: Any, expected: str | None) -> None:
    comparing = importlib.import_module("comparing")
    for name, value in (("ours", ours), ("stock", stock)):
        (tmp_path / name).mkdir()
        torch.save(value, tmp_path / name / "a.pt")
        (tmp_path / name / "same.csv").write_text("1,2\n", encoding="utf-8")
    assert comparing.difference(tmp_path / "ours", tmp_path / "stock", ["*"]) == expected
    for name in ("ours", "stock"):
        (tmp_path / name / "a.pt").rename(tmp_path / name / "a.pth.tar")
    renamed = None if expected is None else expected.replace("a.pt", "a.pth.tar")
    assert comparing.difference(tmp_path / "ours", tmp_path / "stock", ["*.tar"]) == renamed
    assert comparing.difference(tmp_path / "ours", tmp_path / "stock", ["*.csv"]) is None
    (tmp_path / "ours" / "more.csv").touch()
    assert "saved other files" in comparing.difference(tmp_path / "ours", tmp_path / "stock", ["*.csv"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[one]\nprogram = ["train.py"]\noverrides = "mm=fp32"\n', "framework/one has the unknown key 'overrides'"),
        ('[one]\noverride = "mm=fp32"\n', "framework/one has no `program`: name its script and arguments"),
    ],
)
def test_a_wrong_list_of_programs(programs: ModuleType, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(programs.ProgramsError, match=message):
        programs.programs_of(framework_in(tmp_path / "framework", text))


def test_the_lists_of_programs_are_right(programs: ModuleType) -> None:
    folders = programs.frameworks(FOLDER)
    assert {"accelerate", "deepspeed", "torchtitan", "torchtune", "transformers"} <= {folder.name for folder in folders}
    for folder in folders:
        pins = (folder / "requirements.txt").read_text(encoding="utf-8").split()
        assert all("==" in pin for pin in pins), folder
        for program in programs.programs_of(folder):
            script = program.program[0]
            assert script == "-m" or program.variable is not None or (folder / script).is_file(), program
            assert program.before is None or (folder / program.before).is_file(), program
            paths = [part.replace("{folder}", str(folder)) for part in program.program if "{folder}" in part]
            assert all(Path(path).is_file() for path in paths), program


def test_which_programs_a_command_names(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(*names: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["test-ecosystem", "--list", *names])
        return runpy.run_path(str(FOLDER / "__main__.py"))["main"](), *capsys.readouterr()

    assert listed("accelerate/bf16") == (0, "accelerate/bf16\n", "")
    assert listed("*/bf16")[1].splitlines()[:2] == ["accelerate/bf16", "deepspeed/bf16"]
    status, _, error = listed("acelerate")
    assert status == 2
    assert error.startswith("test-ecosystem: error: no program matches 'acelerate'. The frameworks: accelerate, ")


def test_the_report(runs: ModuleType, programs: ModuleType, tmp_path: Path) -> None:
    report = importlib.import_module("verdicts")
    good = checked(runs, programs, tmp_path, CHANGED)
    bad = checked(runs, programs, tmp_path, {**CHANGED, "variable": OTHER})
    broken = checked(runs, programs, tmp_path, {"stock": "exit status 1"})
    lines = report.draw([good, bad, broken], Path("out")).splitlines()
    assert lines[0].split()[:3] == ["framework", "version", "program"]
    assert lines[1].split() == ["framework", "1.0", "program", "stock's", "yes", "yes", "0"]
    assert lines[2].split()[3:6] == ["DIFFER", "yes", "yes"]
    assert lines[3].split()[3:6] == ["-", "-", "-"]
    assert lines[-1] == "1 of 3 programs passed; logs are in out"
    data = json.loads(report.plain([good, bad]))
    assert [entry["passed"] for entry in data] == [True, False]
    assert data[1]["problems"] == bad.problems


@pytest.mark.parametrize(
    ("requirements", "pin"), [("timm==1.0\n", None), ("vision==1\ntorch===2.13.0\n", "torch===2.13.0")]
)
def test_requirements_may_name_a_build_of_pytorch(tmp_path: Path, requirements: str, pin: str | None) -> None:
    environments = importlib.import_module("environments")
    (tmp_path / "requirements.txt").write_text(requirements, encoding="utf-8")
    assert environments._torch_of(tmp_path) == (pin or f"torch=={torch.__version__.partition('+')[0]}")
