"""The structure in docs/architecture.md, and that of the tests: folders, and the direction of imports and includes."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from torch_promote.policy import module_tables
from torch_promote.regions import module_policies

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_promote"
CSRC = ROOT / "csrc"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")

#: What the package's root may hold besides folders. The last three are made by the build.
ROOT_FILES = {
    "__init__.py",
    "__main__.py",
    "errors.py",
    "types.py",
    "building.py",
    "loader.py",
    "extension.py",
    "_C.pyi",
    "py.typed",
    "_built_with.json",
}
EXTENSION = "torch_promote._C"
#: Rooms whose modules may import the extension.
MAY_USE_EXTENSION = {
    "loader",
    "extension",
    "integrations",
    "regions",
    "observe",
    "recording",
    "checking",
    "numerics",
    "cli",
}


def order(heading: str) -> list[list[str]]:
    """Returns the rooms of the line of arrows under a heading, lowest first, in groups that do not see each other."""
    line = re.search(rf"### {heading}\n.*?```text\n([^\n]*)\n```", PAGE, re.DOTALL)
    assert line is not None
    return [place.strip().split(", ") for place in line[1].split("<")]


def tree(root: str) -> dict[str, bool]:
    """Returns the entries of a tree on the page, and whether each is a folder."""
    block = re.search(rf"```text\n{root}/\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    names = [line.split()[0] for line in block[1].splitlines()]
    return {name.rstrip("/"): name.endswith("/") for name in names}


IMPORTS_ORDER = order("Allowed imports")
INCLUDES_ORDER = order("Allowed includes")


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Returns the package's modules by their dotted names, parsed."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(tree: ast.Module, known: Iterable[str]) -> set[str]:
    """Returns the package's modules that a module imports, wherever in it; the extension is `torch_promote._C`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in known or inner == EXTENSION else str(node.module))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in known:
            names.add(node.value)  # importlib.import_module("torch_promote....")
    return {name for name in names if name.split(".")[0] == "torch_promote"}


def room_of(module: str) -> str:
    """Returns a module's folder, or the module itself if it is in none."""
    return module.partition(".")[2].partition(".")[0] or "__init__"


def against_the_arrows(
    edges: Iterable[tuple[str, str]], places: list[list[str]], room: Callable[[str], str] = str
) -> Iterator[str]:
    """Yields the edges between modules of different rooms that do not run from a later place to an earlier one."""
    level = {name: number for number, place in enumerate(places) for name in place}
    for source, target in edges:
        if room(source) != room(target) and level[room(source)] <= level[room(target)]:
            yield f"{source} -> {target}"


@functools.cache
def imports() -> dict[str, set[str]]:
    """Returns the modules that each module of the package imports. Computed by the first test that asks."""
    trees = modules()
    return {name: imported(tree, trees) - {name} for name, tree in trees.items()}


def test_imports_follow_the_arrows() -> None:
    edges = [(module, target) for module, targets in imports().items() for target in targets - {EXTENSION}]
    assert len(edges) > 300
    assert list(against_the_arrows(edges, IMPORTS_ORDER, room_of)) == []


def test_regions_say_how_policies_find_modules() -> None:
    """What a lower room calls in a higher one is registered there, where the import is an arrow like the others."""
    assert "torch_promote.regions.module_policies" in imports()["torch_promote.regions"]
    (registered,) = module_tables._registered
    assert registered.__module__ == "torch_promote.regions"
    assert registered() is module_policies


def test_the_extension_is_imported_where_it_may_be() -> None:
    users = {module for module, targets in imports().items() if EXTENSION in targets}
    assert {module for module in users if room_of(module) not in MAY_USE_EXTENSION} == set()


def test_the_root_holds_the_public_face_and_folders() -> None:
    files = {path.name for path in PACKAGE.iterdir() if path.is_file() and path.suffix != ".so"}
    assert files <= ROOT_FILES
    hidden = [path.name for path in PACKAGE.rglob("_*.py") if not path.name.startswith("__")]
    assert hidden == []


@pytest.mark.parametrize("root", ["torch_promote", "csrc"])
def test_the_page_has_a_line_for_each_folder(root: str) -> None:
    folders = {path.name for path in (ROOT / root).iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {name for name, is_folder in tree(root).items() if is_folder} == folders


@pytest.mark.parametrize("root", ["torch_promote", "csrc"])
def test_each_folder_has_a_place_in_the_order(root: str) -> None:
    places = IMPORTS_ORDER if root == "torch_promote" else INCLUDES_ORDER
    named = {name.removesuffix(".py") for name, is_folder in tree(root).items() if is_folder or name.endswith(".py")}
    assert named == {room for place in places for room in place}


def test_the_sources_that_the_page_names_exist() -> None:
    sources = {path.name for path in CSRC.rglob("*.*")}
    assert set(re.findall(r"`(\w+\.(?:h|cpp))`", PAGE)) <= sources


# --- C++


def includes() -> dict[str, set[str]]:
    """Returns what each C++ module includes of the others; `a.h` and `a.cpp` are one, `room/a`."""
    found: dict[str, set[str]] = {}
    for path in sorted(CSRC.rglob("*.*")):
        module = path.relative_to(CSRC).with_suffix("").as_posix()
        text = path.read_text(encoding="utf-8")
        headers = re.findall(r'^#include "([\w/]+)\.h"', text, re.MULTILINE)
        found.setdefault(module, set()).update(header for header in headers if "/" in header and header != module)
    return found


INCLUDES = includes()


def test_includes_follow_the_arrows() -> None:
    edges = [(module, header) for module, headers in INCLUDES.items() for header in headers]
    assert len(edges) > 40
    assert list(against_the_arrows(edges, INCLUDES_ORDER, lambda module: module.split("/")[0])) == []


def test_there_is_no_cycle() -> None:
    """Of includes, or of imports. The arrows say nothing of modules in one folder."""
    assert len(INCLUDES) > 20
    for graph in (INCLUDES, {name: targets & modules().keys() for name, targets in imports().items()}):
        graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


# --- tests: shared code is in helpers, and the paths that texts name exist


def test_no_test_file_imports_from_another() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert len(files) > 100
    names = "|".join(file.stem for file in files if file.stem.startswith("test_"))
    imports = re.compile(rf"^\s*(?:from|import) (?:\w+\.)*(?:{names})\b", re.MULTILINE)
    assert [str(file) for file in files if imports.search(file.read_text(encoding="utf-8"))] == []


def test_paths_that_texts_name_exist() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
    in_text = re.compile(r"(?<![\w/.])(?:tests|tools|csrc|docs|torch_promote)/[\w/.]*\w(?![\w*])")
    for folder in ("docs", "tests", "tools", "torch_promote", "csrc", "examples"):
        texts += [file for file in (ROOT / folder).rglob("*") if file.suffix in (".md", ".py", ".toml", ".cpp", ".h")]
    named = [
        (file.relative_to(ROOT), path)
        for file in texts
        for path in in_text.findall(file.read_text(encoding="utf-8"))
        if path != "docs/gpu.md"  # written by a run on a GPU, where there is one
    ]
    assert len(named) > 200
    assert [(str(file), path) for file, path in named if not (ROOT / path).exists()] == []
