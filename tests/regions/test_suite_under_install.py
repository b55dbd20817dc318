"""The options --installed and --installed-policy of the tests: their effects, and that such a run can fail."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import torch_promote as tp
from helpers.program_comparison import Region, assert_like_stock, ours, silenced, stock
from helpers.subprocesses import environment, run_module

TESTS = Path(__file__).parents[1]

#: Tests, and what the run under --installed says of each.
TESTS_OF_A_RUN = """
    import torch
    from torch import autocast

    import torch_promote as tp
    from helpers.program_comparison import ON_THE_CPU, assert_like_stock

    X = torch.ones(2, 2)

    def product(region):
        with region():
            return X @ X

    def test_installed_with_the_names_of_before():
        assert tp.installed() is not None
        with autocast("cpu"):
            assert torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.AutocastPrivateUse1)

    def test_restores():
        before = tp.uninstall()
        assert tp.installed() is None
        if before is not None:
            tp.install()

    def test_wrong_contender():
        assert_like_stock(product, regions=(lambda: autocast("cpu"), *ON_THE_CPU[1:]))

    def test_uninstalls():
        tp.uninstall()

    def test_installed_again():
        assert tp.installed() is not None

    def test_replaces():
        tp.install(policy="off")

    def test_takes_the_class_for_stock():
        with autocast("cpu"):
            assert (X @ X).dtype == torch.bfloat16
"""


def product(region: Region) -> torch.Tensor:
    with region():
        return torch.ones(2, 2) @ torch.ones(2, 2)


def test_a_contender_that_is_ours_is_refused() -> None:
    assert_like_stock(product)
    for wrong in (functools.partial(torch.autocast, "cpu"), ours):
        with tp.installed_as(), pytest.raises(AssertionError, match=r"use tp\.stock_autocast for stock"):
            assert_like_stock(product, regions=(wrong, ours, silenced))
    with tp.installed_as(policy="off"):
        assert_like_stock(product, regions=(stock, ours, silenced))


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_planted_faults(processes: int, tmp_path: Path) -> None:
    assert outcomes(tmp_path, "--installed", f"--numprocesses={processes}") == {
        "test_installed_with_the_names_of_before": "passed",
        "test_restores": "passed",
        "test_wrong_contender": "failed",
        "test_uninstalls": "error",
        "test_installed_again": "passed",
        "test_replaces": "error",
        "test_takes_the_class_for_stock": "passed",
    }


def test_with_the_policy_off_a_test_that_takes_the_class_for_stock_fails(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "--installed-policy=off", "--numprocesses=0")
    assert found["test_takes_the_class_for_stock"] == "failed"
    assert found["test_installed_with_the_names_of_before"] == "passed"


@pytest.mark.slow
def test_without_the_option_nothing_is_installed(tmp_path: Path) -> None:
    found = outcomes(tmp_path, "--numprocesses=0")
    assert found["test_installed_again"] == "failed"
    assert found["test_wrong_contender"] == "passed"
    assert found["test_replaces"] == "error"


def outcomes(folder: Path, *options: str) -> dict[str, str]:
    """Runs the tests in a separate process with this project's conftest.py, and returns its output."""
    lines = [line.removeprefix("    ") for line in TESTS_OF_A_RUN.splitlines()]
    folder.joinpath("test_planted.py").write_text("\n".join(lines), encoding="utf-8")
    arguments = ["-p", "conftest", "-p", "no:cacheprovider", "-rA", "--tb=short", "--rootdir", str(folder)]
    arguments += ["-c", str(TESTS.parent / "pyproject.toml"), *options, "test_planted.py"]
    variables = environment(PYTEST_ADDOPTS="", PYTEST_PLUGINS="")
    for name in ("PYTEST_XDIST_WORKER", "TORCH_PROMOTE_AUTOCAST"):
        variables.pop(name, None)
    done = run_module("pytest", *arguments, cwd=folder, env=variables, timeout=240)
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("PASSED", "FAILED", "ERROR") and "::" in rest:
            found[rest.partition("::")[2].split()[0]] = word.lower()
    assert found, done.stdout + done.stderr
    return found
