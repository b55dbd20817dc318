"""The pytest plugin: mismatches in tests that skip, and markers on more than one level. More: test_pytest_plugin.py."""

from __future__ import annotations

import pytest

from helpers.plugin_runs import BAD, Run, counted, run, wrong_cell

__all__ = ["run", "wrong_cell"]  # fixtures

pytest_plugins = ["pytester"]

TOP = BAD.replace("def test_bad():\n        mixed()", "import pytest, unittest, torch_promote as tp")

SKIPPING = (
    TOP
    + """
    def test_skip():
        mixed()
        pytest.skip("not now")

    class Test(unittest.TestCase):
        def test_skip(self):
            mixed()
            self.skipTest("not now")

    @pytest.fixture
    def skipping():
        mixed()
        pytest.skip("not now")

    def test_of_a_fixture(skipping): pass

    def test_good_skip():
        assert int(torch.ones(2).sum()) == 2
        pytest.skip("not now")
"""
)


@pytest.mark.usefixtures("wrong_cell")
def test_a_mismatch_before_a_skip_counts(run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CI", "BUILD_NUMBER"):  # where pytest repeats whole messages in its summary
        monkeypatch.delenv(variable, raising=False)
    pytester.makepyfile(SKIPPING)
    result = run("--torch-promote-crosscheck", "-rA")
    result.assert_outcomes(failed=2, errors=1, skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert counted(result, "mismatches") == 3
    result.stdout.fnmatch_lines_random(
        ["FAILED *::test_skip*", "FAILED *::Test::test_skip*", "ERROR *::test_of_a_fixture*", "SKIPPED*not now"]
    )
    assert result.outlines.count("aten.add.Tensor(int8[3], int16[3], 1): dtype") == 3
    run("-rA").assert_outcomes(skipped=4)


@pytest.mark.usefixtures("wrong_cell")
def test_expected_failures_with_a_mismatch_stay_expected(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        TOP
        + """
    @pytest.mark.xfail(strict=True)
    def test_fails():
        mixed()
        assert False

    def test_says_so():
        mixed()
        pytest.xfail("not yet")
"""
    )
    result = run("--torch-promote-crosscheck")
    result.assert_outcomes(xfailed=2)
    assert result.ret == pytest.ExitCode.OK
    assert counted(result, "mismatches") == 2


@pytest.mark.usefixtures("wrong_cell")
def test_markers_of_class_and_function_merge(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        TOP
        + """
    pytestmark = pytest.mark.torch_promote_crosscheck(level="bits")

    def product():
        with tp.my_autocast("cpu"):
            torch.ones(2, 2) @ torch.ones(2, 2)

    @pytest.mark.torch_promote_crosscheck(raise_on_mismatch=True)
    class TestMerged:
        def test_both(self, torch_promote_crosscheck):
            product()
            assert torch_promote_crosscheck.with_stock.total() == 1
            with pytest.raises(tp.checking.report.CrosscheckError):
                mixed()
            torch_promote_crosscheck.mismatches.clear()

        @pytest.mark.torch_promote_crosscheck(level="dtype")
        def test_the_nearest_wins(self, torch_promote_crosscheck):
            product()
            assert torch_promote_crosscheck.with_stock.total() == 0
            with pytest.raises(tp.checking.report.CrosscheckError):
                mixed()
            torch_promote_crosscheck.mismatches.clear()

        @pytest.mark.torch_promote_crosscheck(raise_on_mismatch=False)
        def test_taken_back(self, torch_promote_crosscheck):
            mixed()
            product()
            assert torch_promote_crosscheck.with_stock.total() == 1
            torch_promote_crosscheck.mismatches.clear()

    @pytest.mark.torch_promote_crosscheck(depth=3)
    class TestStrange:
        @pytest.mark.torch_promote_crosscheck(level="dtype")
        def test_it(self): pass
"""
    )
    result = run()
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*takes level= and raise_on_mismatch= only, got depth."])


@pytest.mark.usefixtures("wrong_cell")
def test_a_test_of_another_kind_shows_its_mismatches(run: Run, pytester: pytest.Pytester) -> None:
    """Its collector may describe a failure by a string."""
    pytester.makefile(".sum", test_it="int8 + int16")
    pytester.makeconftest(
        """
        import pytest, torch

        class Sum(pytest.Item):
            def runtest(self):
                _ = torch.ones(3, dtype=torch.int8) + torch.ones(3, dtype=torch.int16)
                raise ValueError("of its own")

            def repr_failure(self, excinfo):
                return f"failed: {excinfo.value}"

        class Sums(pytest.File):
            def collect(self):
                yield Sum.from_parent(self, name="sum")

        def pytest_collect_file(file_path, parent):
            return Sums.from_parent(parent, path=file_path) if file_path.suffix == ".sum" else None
        """
    )
    result = run("--torch-promote-crosscheck")
    result.assert_outcomes(failed=1)
    assert counted(result, "mismatches") == 1
    result.stdout.fnmatch_lines(
        ["failed: of its own", "*torch_promote crosscheck*", "*aten.add.Tensor(int8[[]3[]], int16[[]3[]], 1): dtype*"]
    )
