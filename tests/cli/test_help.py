"""The help texts: every option is explained, and every example is a valid command line."""

from __future__ import annotations

import argparse
import shlex

import pytest

from torch_promote.cli.program import main, make_parser, parse_arguments
from torch_promote.policy.op_table import CastPolicy


def parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parser and those of its commands, by name."""
    found = {parser.prog: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found |= parsers(command)
    return found


@pytest.fixture(autouse=True)
def _terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


PARSERS = parsers(make_parser())


def test_the_commands() -> None:
    commands = ["run", "trace", "find-nan", "explain", "compare", "tune", "info", "policies", "parity", "why"]
    assert list(PARSERS) == ["torch-promote", *(f"torch-promote {command}" for command in commands)]


@pytest.mark.parametrize("name", PARSERS)
def test_help_explains_the_command_and_each_option(name: str) -> None:
    parser = PARSERS[name]
    assert parser.description
    for action in parser._actions:
        assert action.help or isinstance(action, argparse._SubParsersAction), action


@pytest.mark.parametrize("name", PARSERS)
def test_help_fits_into_80_columns(name: str) -> None:
    assert [line for line in PARSERS[name].format_help().splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("name", PARSERS)
def test_no_word_of_the_help_is_broken_on_a_narrow_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = PARSERS[name].format_help()
    monkeypatch.setenv("COLUMNS", "60")
    narrow = PARSERS[name].format_help()
    assert set(wide.split()) <= set(narrow.split())
    assert [line for line in narrow.splitlines() if len(line) > 60 and not line.lstrip().startswith("[")] == []


def test_help_lists_each_command_with_a_summary() -> None:
    text = make_parser().format_help()
    for name in PARSERS:
        command = name.removeprefix("torch-promote").strip()
        if command:
            assert any(line.startswith(f"    {command} ") and line.split()[1:] for line in text.splitlines()), command


EXAMPLES = [
    line.strip().split("   ")[0].partition("  ")[0].partition(" > ")[0]
    for parser in PARSERS.values()
    for line in parser.format_help().splitlines()
    if line.startswith("  torch-promote ")
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_are_valid_command_lines(example: str) -> None:
    program, *arguments = shlex.split(example)
    assert program == "torch-promote"
    assert callable(parse_arguments(arguments).run)


def test_help_of_policies_explains_each_policy() -> None:
    text = " ".join(PARSERS["torch-promote policies"].format_help().split())
    for policy in CastPolicy:
        assert f"{policy.value} {policy.meaning}" in text


def test_an_unknown_option_before_a_program_points_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["trace", "-o", "x.json", "train.py"])
    assert "See `torch-promote trace --help`." in capsys.readouterr().err
