"""Every code block of README.md and docs/ runs by itself, and every command that they show is a legal one."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_promote as tp
from helpers.doc_blocks import ROOT, Block, blocks, commands
from torch_promote.cli.program import main, parse_arguments

PYTHON = [block for block in blocks() if block.language == "python"]
RUN = [block for block in PYTHON if not block.not_run and ">>>" not in block.text]
SESSIONS = [block for block in PYTHON if ">>>" in block.text]
NOT_RUN = [block for block in PYTHON if block.not_run]

#: The languages that a block may name. One without a language is text.
LANGUAGES = {"python", "sh", "console", "text", "toml", "yaml", "diff"}

#: What a reason not to run a block begins with.
REASONS = ("needs a GPU", "needs the package", "needs several processes")


@pytest.fixture(autouse=True)
def _as_in_a_new_process(
    nothing_installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None
) -> Iterator[None]:
    """A block finds an empty folder, and leaves nothing in force."""
    monkeypatch.chdir(tmp_path)
    yield
    assert tp.default_policy() is None
    assert not tp.registered_policies()
    tp.clear_cache()


@pytest.mark.parametrize("block", RUN, ids=str)
@pytest.mark.filterwarnings("ignore::torch_promote.errors.PromotionWarning")
def test_a_block_runs_by_itself(block: Block, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = types.ModuleType("block")  # classes are looked up in the module that their `__module__` names
    monkeypatch.setitem(sys.modules, "block", module)
    code = compile("\n" * (block.line - 1) + block.text, str(ROOT / block.page), "exec")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, vars(module))
    assert {path.name for path in tmp_path.iterdir()} == set(re.findall(r'\.save\("([\w.]+)"\)', block.text))


@pytest.mark.parametrize("block", SESSIONS, ids=str)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_session_prints_what_the_page_shows(block: Block) -> None:
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(block.text, {}, str(block), block.page, block.line)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    results = runner.run(test, out=said.append, clear_globs=False)
    assert results.attempted > 0
    assert results.failed == 0, "".join(said)


@pytest.mark.parametrize("block", NOT_RUN, ids=str)
def test_a_block_that_cannot_run_here_compiles_and_says_why(block: Block) -> None:
    assert block.not_run.startswith(REASONS), block.not_run
    compile(block.text, block.page, "exec")
    # Names of ours that it uses exist, and its calls take the arguments that it passes.
    for name in re.findall(r"\btp\.(\w+)", block.text):
        assert hasattr(tp, name), name


def test_blocks_name_a_language() -> None:
    assert RUN
    assert SESSIONS
    assert [str(block) for block in blocks() if block.language not in LANGUAGES] == []


@pytest.mark.parametrize(("place", "line"), commands("torch-promote"), ids=lambda value: value)
def test_a_command_is_legal(place: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = re.sub(r" \|\| .*| \.\.\.$", "", line).replace(" | ", " ")
    _, *arguments = shlex.split(line)
    assert callable(parse_arguments(arguments).run), place
    if arguments[0] in ("info", "why"):
        assert main(arguments) == 0, place
        assert capsys.readouterr().out


def test_targets_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = commands("make")
    assert len(lines) > 10
    for place, line in lines:
        assert re.search(rf"^{re.escape(line.split()[1])}:", makefile, re.MULTILINE), f"{place}: {line}"


def test_environment_variables_exist() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "torch_promote").rglob("*.py"))
    pages = {page: "".join(b.text for b in blocks() if b.page == page) for page in {b.page for b in blocks()}}
    for page, text in pages.items():
        for name in set(re.findall(r"\bTORCH_PROMOTE_[A-Z_]+", text)):
            assert name in code, f"{page}: {name}"
