"""On terminals of 60 and 80 columns, commands print the words that they print in a pipe: all of them, and whole."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import sys
import termios
from pathlib import Path

import pytest

from helpers.autoloading import entry_point, folder
from helpers.command_line import Capture
from helpers.doc_blocks import ROOT
from helpers.traced_commands import warm_compiler
from torch_promote.cli.program import COMMANDS, main
from torch_promote.errors import say

__all__ = ["entry_point", "folder", "warm_compiler"]  # fixtures

#: Commands that print results. `run` prints what the program prints, and `build` what the compiler does.
PRINTING = (
    "info",
    "info --all",
    "policies",
    "policies softmax",
    "policies 'linear*'",
    "policies --diff stock fp32_safe",
    "why 'int32[3] + 5.5 * float16[3, 1]'",
    "parity --quick --ops softmax",
    "compare overflow.py:make",
    "tune overflow.py:make --tolerance 1e-3",
    "trace --values overflow.py",
    "trace --read a.jsonl.gz",
    "trace --read a.jsonl.gz head",
    "trace --read a.jsonl.gz linear",
    "find-nan overflow.py",
    "find-nan long.py",
    "diff a.jsonl.gz b.jsonl.gz",
    "diff a.jsonl.gz c.jsonl.gz",  # other random numbers: the table of states
)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of overflow.py: as it is, with an override, and with another seed. long.py has a long name."""
    place = tmp_path_factory.mktemp("recordings")
    program = (ROOT / "examples" / "overflow.py").read_text(encoding="utf-8")
    (place / "overflow.py").write_text(program)
    (place / "seed.py").write_text(program.replace("manual_seed(0)", "manual_seed(1)"))
    name = "normalization_of_the_hidden_states_by_the_root_of_their_mean_square"
    (place / "long.py").write_text(program.replace("norm=", f"{name}="))
    return place


@pytest.fixture
def programs(folder: Path, recordings: Path, warm_compiler: None, capfd: Capture) -> Path:
    """The working directory, with overflow.py and the recordings."""
    runs = {"a": "overflow.py", "b": "--override square=fp32 overflow.py", "c": "seed.py"}
    for name in ("overflow.py", "seed.py", "long.py"):
        shutil.copy(recordings / name, folder)
    for name, program in runs.items():
        file = f"{name}.jsonl.gz"
        if not (recordings / file).exists():
            assert main(["trace", "--record", file, *shlex.split(program)]) == 0
            shutil.copy(file, recordings)
        elif not (folder / file).exists():
            shutil.copy(recordings / file, folder)
    capfd.readouterr()
    return folder


def words(text: str) -> set[str]:
    """The words of a text, and the parts of names. Numbers are times, which differ, or are compared elsewhere."""
    return {re.sub(r"\d+", "#", word) for word in re.findall(r"[A-Za-z0-9]+", text)}


def test_each_command_is_here() -> None:
    assert {line.split()[0] for line in PRINTING} | {"run", "build"} == set(COMMANDS)


@pytest.mark.parametrize("line", PRINTING)
def test_no_word_is_broken_or_left_out(
    line: str, programs: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = {}
    for columns in ("", "60", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        main(shlex.split(line))
        printed[columns] = "".join(capfd.readouterr())
    for columns in ("60", "80"):
        # On a narrow terminal, `policies` has a line for each policy of an op, with these headings.
        headings = {"devices", "policy"} if line.startswith("policies") else set()
        assert words(printed[columns]) - headings == words(printed[""]) - headings, printed[columns]
        # Messages are lines, unless stderr is a terminal: see below.
        lines = [one for one in printed[columns].splitlines() if not one.startswith("torch-promote: ")]
        assert [one for one in lines if len(one) > int(columns)] == []


def test_an_op_with_several_policies_has_one_heading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    main(["policies"])
    lines = capsys.readouterr().out.splitlines()
    place = lines.index("op addcdiv")
    assert lines[place + 1 : place + 3] == [
        "  devices cpu; policy fallthrough",
        "  devices cuda, xpu, mps; policy promote",
    ]
    heads = [line for line in lines if line.startswith("op ")]
    assert len(heads) == len(set(heads))
    assert "op" not in lines


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_help_has_whole_words(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = {}
    for columns in ("60", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(SystemExit):
            main([*filter(None, [command]), "--help"])
        printed[columns] = capsys.readouterr().out
        assert [one for one in printed[columns].splitlines() if len(one) > int(columns)] == []
    assert words(printed["60"]) == words(printed["80"])


ERROR = (
    "torch-promote: error: --policy bfloat.toml: there is no such file. Closest: bfloat16.toml. See `torch-promote run "
    "--help`.\ntorch-promote: next: torch-promote run --policy a_policy_with_a_long_name.toml train.py\n  File train.py"
)


def test_messages_break_between_words_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not within what the reader is to copy. In a pipe, each is a line."""
    say(ERROR)
    assert capsys.readouterr().err == f"{ERROR}\n"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    monkeypatch.delenv("COLUMNS", raising=False)
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        say(ERROR)
        printed = os.read(ours, 65536).decode().splitlines()
    os.close(ours)
    assert printed == [
        "torch-promote: error: --policy bfloat.toml: there",
        "is no such file. Closest: bfloat16.toml. See",
        "`torch-promote run --help`.",
        "torch-promote: next:",
        "torch-promote run --policy a_policy_with_a_long_name.toml train.py",
        "  File train.py",
    ]
