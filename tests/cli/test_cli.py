"""The command line: `info`, help, errors, exit statuses, and the command as a process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from expecttest import assert_expected_inline

import torch_promote
from helpers.command_line import Capture, cells_of, error_of, json_of, terminal_of_80_columns, text_of, wide
from helpers.op_registrations import STRANGE_ROWS
from helpers.subprocesses import environment, run_module, run_python
from torch_promote import _C
from torch_promote.cli.program import main
from torch_promote.policy import op_table as registrations
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy, missing_rows, op_table, unlisted_ops

__all__ = ["terminal_of_80_columns", "wide"]  # fixtures


ROOT = Path(__file__).parents[2]


# --- info


def test_info_as_json(capsys: Capture) -> None:
    info = json_of(capsys, "info")
    devices = info.pop("devices")
    installed = torch_promote.installed()
    assert info.pop("autoloading")  # depends on the installation
    assert info == {
        "torch_promote": torch_promote.__version__,
        "torch": torch.__version__,
        "built_with_torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "dispatch_key": "AutocastPrivateUse1",
        "rows": len(op_table()),
        "installed": None if installed is None else installed.info,
        "default_policy": torch_promote.regions.defaults.spell_default_policy(),
        "registered_policies": [],
        "environment": {},
    }
    assert list(devices) == list(DEVICE_TYPES)
    for index, (name, device) in enumerate(devices.items()):
        counting = [byte for byte in _C.stock_policy_bytes()[index] if byte != _C.POLICY_BYTES["unlisted"]]
        assert device == {
            "available": name == "cpu" or torch.cuda.is_available(),
            "default_dtype": {"cpu": "bfloat16", "cuda": "float16"}[name],
            "rows_with_policy": sum(row.policy(name) is not CastPolicy.fallthrough for row in op_table()),
            "rows_that_count": len(counting),
            "missing_rows": [row.name for row in missing_rows(name)],
            "unlisted_ops": list(unlisted_ops(name)),
        }
        assert device["rows_that_count"] == device["rows_with_policy"] - len(device["missing_rows"])


def test_info_shows_what_runs_regions_of_torch_autocast(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, wide: None
) -> None:
    if torch_promote.installed() is None:
        assert ["torch.autocast", "PyTorch's", "own"] in cells_of(text_of(capsys, "info"))
    monkeypatch.setenv("TORCH_PROMOTE_CACHE", "all")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    with torch_promote.installed_as(cache="all") as installation:
        info = json_of(capsys, "info")
        text = text_of(capsys, "info")
    assert info["installed"] == installation.info
    assert info["environment"] == {"TORCH_PROMOTE_CACHE": "all"}
    problem = "TORCH_DEVICE_BACKEND_AUTOLOAD keeps PyTorch from loading it. Unset that variable."
    assert info["autoloading"] == problem
    for name, value in (("torch.autocast", installation.info), ("environment", "TORCH_PROMOTE_CACHE=all")):
        assert [name, *value.split()] in cells_of(text)
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [SimpleNamespace(module="_torch_promote_hooks")]
    )
    assert json_of(capsys, "info")["autoloading"] == "works"


def test_info_follows_the_default_dtype(capsys: Capture) -> None:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert json_of(capsys, "info")["devices"]["cpu"]["default_dtype"] == "float16"
    finally:
        torch.set_autocast_dtype("cpu", before)


def test_info_as_text_says_what_the_json_says(capsys: Capture, wide: None) -> None:
    info = json_of(capsys, "info")
    text = text_of(capsys, "info")
    lines = cells_of(text)
    assert ["torch_promote", torch_promote.__version__] in lines
    assert ["torch", f"{torch.__version__},", "built", "with", torch.__version__] in lines
    assert ["dispatch", "key", "AutocastPrivateUse1"] in lines
    assert ["op", "table", str(len(op_table())), "rows"] in lines
    for name, device in info["devices"].items():
        available = "yes" if device["available"] else "no"
        rows = [str(device["rows_that_count"]), "of", str(device["rows_with_policy"])]
        numbers = [str(len(device["missing_rows"])), str(len(device["unlisted_ops"]))]
        assert [name, available, device["default_dtype"], *rows, *numbers] in lines
        assert [[op] in lines for op in (*device["missing_rows"], *device["unlisted_ops"])].count(False) == 0
    differs = any(device["missing_rows"] or device["unlisted_ops"] for device in info["devices"].values())
    assert ("This PyTorch registers exactly the ops that the table lists." in text) is not differs


def test_info_lists_what_is_missing_and_unlisted(capsys: Capture, monkeypatch: pytest.MonkeyPatch, wide: None) -> None:
    monkeypatch.setattr(registrations, "op_table", lambda: STRANGE_ROWS)
    monkeypatch.setattr(registrations, "registered", lambda device: frozenset({"aten::mm", "lib::op"}))
    text = text_of(capsys, "info")
    assert_expected_inline(
        text[text.index("missing on") :],
        """\
missing on cpu (in the table, not registered by this PyTorch; falls through):
aten::no_such_op
aten::relu

unlisted on cpu (registered by this PyTorch, no policy in the table; left to stock):
aten::mm
lib::op

missing on cuda (in the table, not registered by this PyTorch; falls through):
aten::relu

unlisted on cuda (registered by this PyTorch, no policy in the table; left to stock):
lib::op
""",
    )


# --- what goes wrong


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("pattern", "closest"),
    [
        ("sofmax", " Closest: softmax."),
        ("aten::sofmax", " Closest: softmax."),
        ("*zzzz*", ""),
        ("", ""),
    ],
)
def test_a_pattern_without_a_match_is_one_line_and_status_2(
    capsys: Capture, pattern: str, closest: str, as_json: bool
) -> None:
    arguments = ["policies", "--op", pattern, *(["--json"] if as_json else [])]
    assert error_of(capsys, *arguments) == (
        f"torch-promote: error: --op {pattern!r} matches no op.{closest} `torch-promote policies` lists the op table. "
        f"If a library defines the op, import it: --import MODULE.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "required: COMMAND"),
        (["polices"], "invalid choice: 'polices'"),
        (["policies", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["policies", "--op"], "expected one argument"),
        (["info", "extra"], "unrecognized arguments: extra"),
    ],
)
def test_a_wrong_command_line_is_status_2(capsys: Capture, arguments: list[str], complaint: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err


def test_text_without_rich_says_what_to_install(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)  # importing it now fails
    for command in ("info", "policies"):
        assert error_of(capsys, command) == (
            "torch-promote: error: text output needs rich: pip install rich. --json works without it.\n"
        )
        assert json_of(capsys, command)


# --- version


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    expected = f"torch-promote {torch_promote.__version__} (torch {torch.__version__})\n"
    assert capsys.readouterr().out == expected


# --- as a process


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "torch_promote", "policies", "--op", "bmm", "--json"]
    process = subprocess.run(command, env=environment(), text=True, timeout=120, check=False, capture_output=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert [row["op"] for row in json.loads(process.stdout)["rows"]] == ["aten::bmm"]
    process = run_module("torch_promote", "policies", "--op", "sofmax")
    assert (process.returncode, process.stdout) == (2, "")
    assert "Closest: softmax" in process.stderr


@pytest.mark.parametrize("arguments", [["policies"], ["info", "--json"], ["--help"]], ids=" ".join)
def test_a_reader_that_has_gone_is_no_error(arguments: list[str]) -> None:
    """With a buffer, the text of --help is written at the end."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        process = run_module(
            "torch_promote", *arguments, stdout=writer, finalize=True, env=environment(PYTHONUNBUFFERED="")
        )
    finally:
        os.close(writer)
    assert (process.returncode, process.stderr) == (0, "")


# --- what has to be installed


def test_the_commands_need_nothing_beyond_the_dependencies() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    assert "rich>=13" in project["dependencies"]
    assert not any("rich" in package for extra in project["optional-dependencies"].values() for package in extra)


def test_no_remedy_names_an_index_where_the_package_is_not() -> None:
    files = [*ROOT.glob("torch_promote/**/*.py"), *ROOT.glob("*.py"), *ROOT.glob("examples/*.py")]
    assert len(files) > 100
    named = [(file, line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert [one for one in named if re.search(r"pip install [^.`]*torch[-_]promote", one[1])] == []


def test_importing_the_package_does_not_import_rich() -> None:
    done = run_python("import sys, torch_promote; print('rich' in sys.modules)", env=environment())
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
