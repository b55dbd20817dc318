"""What the public CI, pre-commit and the templates name exists, in the versions that the project uses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import torch_promote
from torch_promote.cli.program import COMMANDS

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(ROOT.glob(".github/workflows/*.yml"))}
TEXT = "\n".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(".github/workflows/*.yml")))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
PYTHONS = {"3.11", "3.12", "3.13"}  # the suite runs on them


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, workflow in WORKFLOWS.items():
        for job, content in workflow["jobs"].items():
            yield f"{name}: {job}", content


def steps(key: str) -> list[str]:
    return [step[key] for _, job in jobs() for step in job.get("steps", [job]) if key in step]


def test_no_job_has_more_rights_or_time_than_it_needs() -> None:
    assert {*WORKFLOWS} == {"tests", "wheels", "docs", "release"}
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] in ({}, {"contents": "read"}), name
        assert workflow["concurrency"]["group"], name
    writes = {
        (name, right) for name, job in jobs() for right, level in job.get("permissions", {}).items() if level != "read"
    }
    assert writes == {("docs: deploy", "pages"), ("docs: deploy", "id-token"), ("release: publish", "id-token")}
    assert [name for name, job in jobs() if "uses" not in job and not 0 < job["timeout-minutes"] <= 150] == []


def test_actions_are_pinned_by_commit_and_hold_no_credentials() -> None:
    used = steps("uses")
    assert len(used) > 15
    for action in used:
        assert (ROOT / action).is_file() if action.startswith("./") else re.search(r"@[0-9a-f]{40}$", action), action
    versions = re.findall(r"uses: (\S+)@(\w+) # (v[\d.]+)$", TEXT, re.MULTILINE)
    assert len(versions) == len(used) - 1  # release.yml calls wheels.yml
    assert len({*versions}) == len({action for action, _, _ in versions})  # one version of each
    assert TEXT.count("uses: actions/checkout@") == TEXT.count("persist-credentials: false") > 5


def test_what_workflows_call_exists() -> None:
    commands = steps("run")
    called = [target for command in commands for target in re.findall(r"^make ([\w-]+)", command, re.MULTILINE)]
    assert {"test", "docs"} <= {*called} <= TARGETS
    files = [path for command in commands for path in re.findall(r"(?<![\w/])\.?[\w-]+/[\w/.]+|\w+\.py\b", command)]
    files = [path for path in files if not path.startswith("dist/")]
    assert {"tools/wheel", ".ci/run", "setup.py"} <= {*files}
    trigger = WORKFLOWS["wheels"][True]["pull_request"]["paths"]  # YAML 1.1 reads `on` as true
    named = {*files, *trigger, *re.findall(r"(?:hashFiles\('|cache-dependency-path: )([\w./-]+)", TEXT)}
    assert "pyproject.toml" in named
    assert [path for path in named if not [*ROOT.glob(path)]] == []


def test_pythons_and_torches_are_those_that_the_project_supports() -> None:
    torches = {"2.11.0", "2.13.0", "2.15.0"}
    for job in (WORKFLOWS["tests"]["jobs"]["test"], WORKFLOWS["wheels"]["jobs"]["try"]):
        assert {*job["strategy"]["matrix"]["python"]} == PYTHONS
        assert {*job["strategy"]["matrix"]["torch"]} == torches
    settings = PYPROJECT["tool"]["cibuildwheel"]
    built = WORKFLOWS["wheels"]["jobs"]["wheel"]["strategy"]["matrix"]["python"]
    assert built == ["cp311", "cp312", "cp313", "cp314"]
    assert all(re.fullmatch(settings["build"].replace("*", ".*"), f"{python}-manylinux_x86_64") for python in built)
    _, compiled = settings["before-build"]
    assert re.findall(r"2\.\d+\.\d", compiled) == [f"2.{minor}.0" for minor in range(11, 16)]


def test_pre_commit_has_the_tools_of_make_lint() -> None:
    lint = dict(requirement.split("==") for requirement in PYPROJECT["project"]["optional-dependencies"]["lint"])
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    pinned = {tuple(each.split("==")) for hook in hooks for each in hook.get("additional_dependencies", ())}
    whole = "pyright[nodejs]"  # it judges the package as a whole, which takes too long for each commit
    assert pinned == {*lint.items()} - {("mypy", lint["mypy"]), (whole, lint[whole])}
    assert {Path(hook["entry"].split()[0]).name for hook in hooks} == {*lint, "make"} - {whole}
    assert [hook["stages"] for hook in hooks if hook["entry"] == "make lint"] == [["pre-push"]]
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    words = {Path(word).name for word in recipe.replace("$(PYRIGHT)", "pyright").split()}
    assert {name.partition("[")[0] for name in lint} <= words
    (pattern,) = [hook["files"] for hook in hooks if hook["id"] == "clang-format"]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    (line,) = [line for line in recipe.splitlines() if "clang-format" in line]
    formatted = {str(path.relative_to(ROOT)) for glob in re.findall(r"\S+\*\S+", line) for path in ROOT.glob(glob)}
    if tracked:  # not in an unpacked source distribution
        assert {path for path in tracked if re.search(pattern, path)} == formatted


@pytest.mark.parametrize("path", ["ISSUE_TEMPLATE/bug.yml", "ISSUE_TEMPLATE/feature.yml", "PULL_REQUEST_TEMPLATE.md"])
def test_templates_ask_for_the_output_of_info(path: str) -> None:
    text = (ROOT / ".github" / path).read_text(encoding="utf-8")
    assert "torch-promote info" in text
    assert {*re.findall(r"torch-promote ([\w-]+)", text)} <= {*COMMANDS}
    if path.endswith(".yml"):
        fields = {field["id"]: field.get("validations", {}) for field in yaml.safe_load(text)["body"]}
        assert fields["info"] == {"required": True}


def test_the_citation_names_this_version_and_repository() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    url = PYPROJECT["project"]["urls"]["Repository"]
    assert (citation["version"], citation["repository-code"]) == (torch_promote.__version__, url)
    assert citation["license"] == PYPROJECT["project"]["license"]
    named = set()
    pages = *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.*"), ROOT / "mkdocs.yml"
    for page in pages:
        text = page.read_text(encoding="utf-8")
        found = {*re.findall(r"https://github\.com/[\w-]+/torch[_-]promote\b", text)}
        assert found <= {url}, page
        named |= {page.name} if found else set()
        assert not re.search("git clone [A-Z_]+", text), page
    assert {"README.md", "mkdocs.yml"} <= named


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `make test` would run. The variables of a make around these tests would change that."""
    others = ("MAKE", "MFLAGS", "PYTHON3", "TORCH_VERSION", "VENV")  # the last three: what its command line sets
    variables = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    command = ["make", "-n", "test", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=variables)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        ((), ".venv"),
        (("TORCH_VERSION=2.15.0",), ".venv-2.15.0"),
        ((f"PYTHON3={sys.executable}",), f".venv-py{sys.version_info.major}.{sys.version_info.minor}"),
        (
            (f"PYTHON3={sys.executable}", "TORCH_VERSION=2.15.0"),
            f".venv-2.15.0-py{sys.version_info.major}.{sys.version_info.minor}",
        ),
    ],
)
def test_make_has_an_environment_for_each_python_and_torch(arguments: tuple[str, ...], environment: str) -> None:
    done = dry_run(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"{environment}/bin/python -m pytest" in done.stdout


def test_make_names_a_python_that_does_not_run() -> None:
    done = dry_run("PYTHON3=no-python")
    assert (done.returncode, done.stdout) == (2, "")
    assert "PYTHON3=no-python does not run" in done.stderr
