"""The source distribution: it has every file of the repository, and pip installs it beside nothing but PyTorch."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

import torch_promote

ROOT = Path(__file__).parents[1]
PACKAGE = Path(torch_promote.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

#: Files of a source distribution that setuptools writes.
WRITTEN = {"PKG-INFO", "setup.cfg"}

SMOKE = """
import torch, torch_promote as tp
with tp.crosscheck() as report, tp.my_autocast("cpu", overrides={"softmax": "lower"}), tp.promotion("jax"):
    y = torch.softmax(torch.ones(2, 2) @ torch.ones(2, 2), -1)
assert y.dtype is torch.bfloat16
assert not report.mismatches
print(tp.__file__)
"""


def call(*command: str | Path, folder: Path, **variables: str) -> str:
    """Runs a command outside of the source tree, as after a new login: without this process's Python variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCH_"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env={**environment, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive. Its metadata is written elsewhere, so that the source tree stays as it is.

    setuptools collects the files in a folder of the source tree, which two workers must not share.
    """
    folder = tmp_path_factory.mktemp("sdist")
    command = (sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder, "sdist", "--dist-dir", folder)
    with Path(tempfile.gettempdir(), f"torch_promote_sdist_{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        call(*command, folder=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_the_sdist_has_every_file_of_the_repository_and_no_other(sdist: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("these sources are no git repository: they may be a source distribution themselves")
    with tarfile.open(sdist) as tar:
        files = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    assert files - WRITTEN == {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_the_description_for_pypi_has_no_relative_links(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        (name,) = (name for name in tar.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name))
        file = tar.extractfile(name)
        assert file is not None
        text = file.read().decode()
    assert "Description-Content-Type: text/markdown" in text
    links = re.findall(r"""(?:\]\(|src="|srcset=")([^)"]+)""", text)
    assert len(links) > 30
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def requirements(names: Iterable[str]) -> set[str]:
    """The installed packages that these need, themselves included."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.split(r"[\s;<>=!~\[(]", waiting.pop(), maxsplit=1)[0].lower()
        if name in found:
            continue
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:  # for another platform
            continue
        found.add(name)
        waiting += [one for one in needed if "extra ==" not in one]
    return found


def link_packages(names: Iterable[str], folder: Path) -> None:
    """Makes installed packages available in another environment, without a copy."""
    for name in names:
        files = distribution(name).files or []
        for top in sorted({file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}):
            source = Path(str(distribution(name).locate_file(top)))
            if source.exists() and not (folder / top).exists():
                (folder / top).symlink_to(source)


@pytest.mark.slow
def test_pip_installs_the_sdist_where_there_is_only_pytorch(sdist: Path, tmp_path: Path) -> None:
    """The extension is the one that is here: compiling takes minutes, and `make build` has done it."""
    environment = tmp_path / "environment"
    call(sys.executable, "-m", "venv", environment, folder=tmp_path)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    shutil.rmtree(packages / "setuptools", ignore_errors=True)  # Python 3.11 brings an old one
    for old in packages.glob("setuptools-*"):
        shutil.rmtree(old)
    # No index is asked: what the package requires has to be there, and nothing else is.
    link_packages(requirements(["torch", "setuptools", "wheel", *PROJECT["dependencies"]]), packages)
    offline = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "TORCH_PROMOTE_EXTENSION": str(PACKAGE)}
    call(python, "-m", "pip", "install", "--no-build-isolation", sdist, folder=tmp_path, **offline)

    used = call(python, "-c", SMOKE, folder=tmp_path).strip()
    assert Path(used).parent == packages / "torch_promote"
    loaded = "import sys, torch; print('torch_promote' in sys.modules)"
    assert call(python, "-c", loaded, folder=tmp_path) == "False\n"
    assert call(python, "-c", loaded, folder=tmp_path, TORCH_PROMOTE_AUTOCAST="1") == "True\n"
    command = environment / "bin" / "torch-promote"
    assert torch_promote.__version__ in call(command, "info", folder=tmp_path)
    assert "float32" in call(command, "why", "int32[3] + 5.5", folder=tmp_path)
    assert "softmax" in call(command, "policies", "--op", "softmax", folder=tmp_path)
    call(python, "-m", "pip", "check", folder=tmp_path)
