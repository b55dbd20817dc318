"""The summary of `torch-promote trace`: in colours on a terminal that can have them, or else as `str(report)`."""

from __future__ import annotations

import importlib.util
import io
import re
import sys

import pytest

from helpers.made_up_traces import small_report
from torch_promote.cli import trace


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = trace._summary(small_report())
    assert "\x1b[1m" in text
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert plain.splitlines()[0] == "trace: torch 2.13.0, 1 optimizer step"
    assert "Autocast had a policy for 4 of 5 calls" in plain


@pytest.mark.parametrize("why", ["not a terminal", "no stderr", "no rich"])
def test_everything_else_gets_plain_text(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    streams = {"not a terminal": io.StringIO(), "no stderr": None, "no rich": Terminal()}
    monkeypatch.setattr(sys, "stderr", streams[why])
    if why == "no rich":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    text, plain = trace._summary(small_report()), str(small_report())
    if why == "not a terminal":  # which wraps nothing
        assert text.split() == plain.split()
        assert max(map(len, text.splitlines())) > 100
    else:
        assert text == plain
