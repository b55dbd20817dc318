"""README.md and docs/: code blocks run by themselves, commands are legal, links lead somewhere, and lists are whole."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from torch import nn

import performance_plot
import promotion_page
import report_picture
import site_hooks
import terminal_picture
import torch_promote as tp
from helpers.autoloading import entry_point, folder
from helpers.command_line import Capture
from helpers.doc_blocks import ROOT, Block, blocks, commands, sessions
from helpers.traced_commands import warm_compiler
from torch_promote.cli.program import main, parse_arguments

__all__ = ["entry_point", "folder", "warm_compiler"]  # fixtures

PYTHON = [block for block in blocks() if block.language == "python"]
RUN = [block for block in PYTHON if not block.not_run and ">>>" not in block.text]
SESSIONS = [block for block in PYTHON if ">>>" in block.text]
NOT_RUN = [block for block in PYTHON if block.not_run]

#: Each recipe and each step of Get started, and the block below it, which shows what it prints.
RECIPES = [block for block in blocks() if block.page == "docs/recipes.md"]
STEPS = [block for block in blocks() if block.page == "docs/get_started.md" and block.language in ("python", "text")]
PRINTED = {block: shown for pairs in (RECIPES, STEPS) for block, shown in zip(pairs[::2], pairs[1::2], strict=True)}

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
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, vars(module))
    if block in RECIPES:
        assert out.getvalue() == PRINTED[block].text
    elif block in PRINTED:
        assert_shown(PRINTED[block].text, out.getvalue())
    assert {path.name for path in tmp_path.iterdir()} == set(re.findall(r'(?:\.save\(|\bto=)"([\w.]+)"', block.text))


def assert_shown(shown: str, printed: str) -> None:
    """A page shows what was printed, or leaves lines out, as "...". Numbers by themselves differ between machines."""
    numbers = re.compile(r"(?<![\w.:-])-?\d[\d.,]*(?:e[+-]?\d+)?(?:\+\w+)?(?![\w.])")
    shown, printed = (numbers.sub("#", text) for text in (shown, printed))
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(shown, printed, flags), f"shown:\n{shown}\nprinted:\n{printed}"


@pytest.mark.parametrize("page", sessions())
def test_a_console_prints_what_the_page_shows(
    page: str, folder: Path, warm_compiler: None, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shutil.copy(ROOT / "examples" / "overflow.py", folder)
    for command, shown in sessions()[page]:
        program, *arguments = shlex.split(command)
        assert program == "torch-promote"
        status = main(arguments)
        printed = "".join(capfd.readouterr())
        assert status == (arguments[0] == "find-nan" or (arguments[0] == "diff" and "kind" in printed)), printed
        assert_shown(shown, printed)


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
    assert len(RUN) > 30
    assert len(SESSIONS) > 8
    assert [str(block) for block in blocks() if block.language not in LANGUAGES] == []
    assert {(block.language, shown.language) for block, shown in PRINTED.items()} == {("python", "text")}
    assert sessions().keys() >= {"README.md", "docs/get_started.md"}


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


# --- the site: links, the navigation, the API reference


PAGES = [ROOT / "README.md", *(ROOT / name for name in site_hooks.ROOT_PAGES), *sorted((ROOT / "docs").rglob("*.md"))]
NAVIGATION = re.findall(r"^ +- [^:\n]+: ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
#: Written by a run on a GPU, where there is one.
NOT_ON_THE_SITE = {"gpu.md"}


def without_code(text: str) -> str:
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!`)`[^`\n]+`(?!`)", lambda match: match[0].replace("](", "] ("), text)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, which GitHub and mkdocs (mkdocs.yml, slugify) both give them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)", without_code(page.read_text(encoding="utf-8")))
    for target, anchor in links:
        if target.startswith(("https:", "http:")):
            continue
        file = page if target == "" else (page.parent / target)
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page.name}: {target}#{anchor}"


def test_pages_have_the_pictures() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert len({imread(picture).shape for picture in report_picture.PICTURES.values()}) == 1
    pictures = [*report_picture.PICTURES.values(), terminal_picture.PICTURE]
    assert [picture.name for picture in pictures if f"images/{picture.name}" not in text] == []
    images = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert images == {picture.name for picture in pictures} | {"performance.svg"}


def test_the_picture_of_find_nan_is_what_it_prints() -> None:
    """And the program that README.md shows is that of examples/, so that a reader can type it."""
    assert terminal_picture.main(["--check"]) == 0
    program = (ROOT / "examples" / "overflow.py").read_text(encoding="utf-8")
    assert f"```python\n{program}```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_navigation_has_each_page_once() -> None:
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} - NOT_ON_THE_SITE
    assert sorted(NAVIGATION) == sorted(pages | set(site_hooks.ROOT_PAGES.values()))
    assert NAVIGATION[0] == "index.md"


def test_the_api_reference_has_each_public_name_once() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^::: torch_promote\.(\w+)$", text, re.MULTILINE)
    assert sorted(documented) == sorted({*tp.__all__} - {"__version__"})
    assert len(tp.__all__) <= 34, "a new name takes the place of another"
    types = re.findall(r"^::: torch_promote\.types\.(\w+)$", text, re.MULTILINE)
    types += re.findall(r"\w+", text.partition("members: [")[2].partition("]")[0])
    assert sorted(types) == sorted(name for name in vars(tp.types) if name.isidentifier() and not name.startswith("_"))


def test_the_plot_is_that_of_the_tables() -> None:
    assert performance_plot.main(["--check"]) == 0


def test_what_each_part_costs_is_measured_on_another_page() -> None:
    page, title, rest = (
        (ROOT / "docs" / "performance.md").read_text(encoding="utf-8").partition("## What each part costs\n")
    )
    assert title
    figures, _, rest = rest.partition("\n## ")
    names = ("parity", "trace", "crosscheck", "casts")
    pages = page + rest + "".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in names)
    numbers = re.findall(r"\b\d+\.\d+\b(?!\.)|\b\d+,\d{3}\b", figures.replace("2.13", ""))
    assert len(numbers) >= 8
    assert [number for number in numbers if number not in pages] == []


# --- docs/promotion.md and the other generated pages


@pytest.mark.parametrize("default_dtype", [torch.float32, torch.float64])
def test_the_generated_pages_are_up_to_date(default_dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default_dtype)
    try:
        assert promotion_page.main(["--check"]) == 0
    finally:
        torch.set_default_dtype(before)


# --- docs/overrides.md and docs/frameworks.md


def test_the_policy_files_of_the_page_can_be_read(tmp_path: Path) -> None:
    plain, with_modules = (b for b in blocks() if b.page == "docs/overrides.md" and b.language == "toml")
    path = tmp_path / "mine.toml"
    path.write_text(plain.text, encoding="utf-8")
    policy = tp.Policy.load(path)
    assert policy.lookup("linalg_norm.ord_str", "cuda") is tp.CastPolicy.fp32
    assert policy.lookup("softmax.int", "cpu") is tp.CastPolicy.lower_precision_fp
    path.write_text(with_modules.text, encoding="utf-8")
    tables = {"blocks.*.attn": {"linear": "float16"}, "head": "fp32"}
    assert tp.Policy.load(path) == tp.Policy.stock().override_modules(tables)


def test_every_policy_is_explained() -> None:
    text = (ROOT / "docs" / "overrides.md").read_text(encoding="utf-8")
    names = [*(policy.value for policy in tp.CastPolicy), *tp.Policy.names()]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_a_module_policy_in_a_region_with_the_policy_off() -> None:
    """The recipe for models in bfloat16."""
    (recipe,) = (b for b in blocks() if b.page == "docs/frameworks.md" and 'policy="off"' in b.text)
    names: dict[str, Any] = {}
    exec(compile(recipe.text, str(recipe), "exec"), names)
    body, head, tokens = names["model"]["body"], names["model"]["lm_head"], names["tokens"]
    hidden = body(tokens)
    expected = nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float())
    assert torch.equal(names["logits"], expected)
    assert head(hidden).dtype is torch.bfloat16, "without a region, the policy has no effect"
    with tp.my_autocast("cpu", policy="off"):
        assert torch.equal(body(tokens), hidden), "the region casts nothing by itself"
