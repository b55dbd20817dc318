"""The pytest plugin: which tests fail, how, and what the summary counts."""

from __future__ import annotations

import re

import pytest
import torch

from helpers.pytest_runs import Run, ends, plain_pytester
from torch_promote.reference import promotion as promotion_table

__all__ = ["plain_pytester"]  # a fixture

pytest_plugins = ["pytester"]

#: `mixed` has one mismatch in `wrong_cell`.
TOP = """
    import pytest, unittest, torch, torch_promote as tp

    def mixed():
        return torch.ones(3, dtype=torch.int8) + torch.ones(3, dtype=torch.int16)

    def product():
        with tp.my_autocast("cpu"):
            torch.ones(2, 2) @ torch.ones(2, 2)
"""


@pytest.fixture
def run(plain_pytester: pytest.Pytester) -> Run:
    """Writes a test file below `TOP`, and runs pytest on it with the plugin."""

    def run(code: str, *arguments: str) -> pytest.RunResult:
        plain_pytester.makepyfile(test_it=TOP + code)
        return plain_pytester.runpytest("-p", "_torch_promote_hooks", "-p", "no:cacheprovider", *arguments)

    return run


@pytest.fixture
def wrong_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the reference: int8 and int16 promote to int32."""
    monkeypatch.setitem(promotion_table._TABLE, (torch.int8, torch.int16), torch.int32)


def counted(result: pytest.RunResult, title: str) -> int:
    """A count of the summary."""
    (match,) = filter(None, (re.match(rf"{re.escape(title)} +(\d+)", line) for line in result.outlines))
    return int(match.group(1))


# --- off


def test_off_imports_nothing_and_registers_no_kernel(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys, pytest

        @pytest.mark.record_numerics(tolerance=1e-3)
        def test_modules():
            assert "_torch_promote_hooks" in sys.modules
            assert not {"torch", "torch_promote"} & set(sys.modules)

        def test_kernels():
            import torch, torch_promote
            from torch_promote import _C

            name = _C.DISPATCH_OBSERVER_KEY
            assert f"{name}: registered" not in torch._C._dispatch_dump_table("aten::add.Tensor")
            with torch_promote.crosscheck():
                assert torch._C._dispatch_tls_is_dispatch_key_included(torch._C._dispatch_key_parse(name))
            assert name in torch._C._dispatch_dump_table("aten::add.Tensor")
        """
    )
    pytester.runpytest_subprocess("-p", "_torch_promote_hooks", "--strict-markers").assert_outcomes(passed=2)


def test_levels(run: Run, pytester: pytest.Pytester) -> None:
    code = "    def test_it(): product()"
    run(code).stdout.no_fnmatch_line("*crosscheck*")
    pytester.makeini("[pytest]\ntorch_promote_crosscheck = bits")
    result = run(code)
    result.stdout.fnmatch_lines(["torch_promote: crosscheck, level bits", "tests checked *1"])
    assert counted(result, "with a cast policy") == counted(result, "compared with stock") == 1
    run(code, "--torch-promote-crosscheck").stdout.fnmatch_lines(["torch_promote: crosscheck, level dtype"])
    run(code, "--torch-promote-crosscheck=off").stdout.no_fnmatch_line("*crosscheck*")


@pytest.mark.parametrize(
    ("ini", "arguments", "message"),
    [
        ("", ["--torch-promote-crosscheck=bit"], "*--torch-promote-crosscheck: 'bit' is not a level. Legal: off, *"),
        ("", ["--torch-promote-crosscheck", "test_it.py"], "*'test_it.py' is not a level. *put the option last or *"),
        ("torch_promote_crosscheck = yes", [], "ERROR: ini option torch_promote_crosscheck: 'yes' is not a level. *"),
    ],
)
def test_an_invalid_level(run: Run, pytester: pytest.Pytester, ini: str, arguments: list[str], message: str) -> None:
    pytester.makeini(f"[pytest]\n{ini}")
    result = run("    def test_it(): pass", *arguments)
    assert result.ret is pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    assert "Traceback" not in result.stderr.str()


# --- mismatches


@pytest.mark.usefixtures("wrong_cell")
def test_a_failure(run: Run) -> None:
    result = run("    def test_bad():\n        mixed()\n    def test_good(): product()", "--torch-promote-crosscheck")
    result.assert_outcomes(failed=1, passed=1)
    lines = """
torch_promote: crosscheck, level dtype
*_ test_bad _*
crosscheck: 1 mismatches in 3 calls: aten.add.Tensor dtype x1
aten.add.Tensor(int8[[]3[]], int16[[]3[]], 1): dtype
    expected int32
    got      int16
    at *test_it.py:4 in mixed: return torch.ones*
*= torch_promote crosscheck, level dtype =*
tests checked *2
without a rule *0
mismatches *1
FAILED *::test_bad - Failed: crosscheck: 1 mismatches in 3 calls: aten.add.Tensor*"""
    result.stdout.fnmatch_lines(lines.strip("\n").split("\n"))
    # Neither the plugin's lines nor those of the check are shown.
    assert "_torch_promote_hooks.py:" not in result.stdout.str()
    assert "checking/" not in result.stdout.str()


PHASES = """
    @pytest.fixture
    def before(): mixed()

    @pytest.fixture
    def after():
        yield
        mixed()

    def test_before(before): pass
    def test_after(after): pass

    def test_skip():
        mixed()
        pytest.skip("not now")

    @pytest.mark.xfail(strict=True)
    def test_expected(): mixed()

    def test_expected_at_run_time():
        mixed()
        pytest.xfail("not yet")

    class Test(unittest.TestCase):
        def test_good(self): product()
        def test_bad(self): mixed()
        def test_skip(self): mixed(); self.skipTest("not now")
        @unittest.skip("not now")
        def test_skipped(self): mixed()

    class TestSub(unittest.TestCase):
        def test_bad(self):
            with self.subTest(): mixed()
            with self.subTest(): product()
        def test_good(self):
            with self.subTest(): product()
"""


@pytest.mark.usefixtures("wrong_cell")
def test_each_phase_is_checked(run: Run) -> None:
    result = run(PHASES, "--torch-promote-crosscheck", "-rA")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert ends(result) == {
        **dict.fromkeys(("test_before", "test_after"), "ERROR"),
        **dict.fromkeys(("test_skip", "Test::test_bad", "Test::test_skip", "TestSub::test_bad"), "FAILED"),
        **dict.fromkeys(("test_expected", "test_expected_at_run_time"), "XFAIL"),
        **dict.fromkeys(("Test::test_good", "TestSub::test_good"), "PASSED"),
    }
    result.stdout.fnmatch_lines(["*ERROR at setup of test_before*", "*ERROR at teardown of test_after*"])
    assert counted(result, "mismatches") == 8


@pytest.mark.usefixtures("wrong_cell")
def test_markers(run: Run) -> None:
    code = """
    crosscheck = pytest.mark.torch_promote_crosscheck

    def test_plain(): mixed()

    @crosscheck(level="off")
    def test_off(): mixed()

    @crosscheck
    def test_on(): mixed()

    @crosscheck(level="bits")
    def test_bits(torch_promote_crosscheck):
        product()
        assert torch_promote_crosscheck.with_stock.total() == 1

    @crosscheck(raise_on_mismatch=True)
    def test_stops():
        mixed()
        assert False, "not reached"

    @crosscheck(raise_on_mismatch=True, level="bits")
    class TestMerged:
        @crosscheck(raise_on_mismatch=False)
        def test_taken_back(self, torch_promote_crosscheck):
            mixed()
            product()
            assert torch_promote_crosscheck.with_stock.total() == 1
            torch_promote_crosscheck.mismatches.clear()

    @crosscheck(level="bit")
    def test_bad_level(): pass

    @crosscheck("bits", depth=3)
    def test_bad_arguments(): pass
    """
    expected = {
        **dict.fromkeys(("test_plain", "test_off", "test_bits"), "PASSED"),
        "TestMerged::test_taken_back": "PASSED",
        **dict.fromkeys(("test_on", "test_stops"), "FAILED"),
        **dict.fromkeys(("test_bad_level", "test_bad_arguments"), "ERROR"),
    }
    assert ends(run(code, "-rA")) == expected
    result = run(code, "-rA", "--torch-promote-crosscheck")
    assert ends(result) == {**expected, "test_plain": "FAILED"}
    result.stdout.fnmatch_lines(
        [
            "*marker torch_promote_crosscheck: 'bit' is not a level. Legal: off, dtype, bits.",
            "*marker torch_promote_crosscheck takes level= and raise_on_mismatch= only, got 'bits', depth.",
            "*_ test_stops _*",
            ">   *return torch.ones(3, dtype=torch.int8)*",
            "E   *CrosscheckError: aten.add.Tensor(*",
        ]
    )
    assert "checking/" not in result.stdout.str()
    assert "- torch_promote crosscheck -" not in result.stdout.str()


def test_the_fixture_gives_the_report(run: Run) -> None:
    code = """
    def test_it(torch_promote_crosscheck):
        torch.ones(2) + 1
        assert torch_promote_crosscheck.checked["aten.add.Tensor"] == 1

    def test_too_late(request): request.getfixturevalue("torch_promote_crosscheck")

    @pytest.mark.torch_promote_crosscheck(level="off")
    def test_off(torch_promote_crosscheck): pass
    """
    result = run(code, "-rA")
    assert ends(result) == {"test_it": "PASSED", "test_too_late": "FAILED", "test_off": "ERROR"}
    result.stdout.fnmatch_lines_random(["*test_off is not checked. Remove level='off', or name *"])
    assert counted(result, "tests checked") == 1


def test_nothing_is_left_behind(run: Run) -> None:
    code = """
    crosscheck = pytest.mark.torch_promote_crosscheck

    def included():
        key = torch._C._dispatch_key_parse(tp._C.DISPATCH_OBSERVER_KEY)
        return torch._C._dispatch_tls_is_dispatch_key_included(key)

    @crosscheck
    def test_checked(): raise ValueError(included())

    @crosscheck
    def test_interrupted_setup(missing): pass

    def test_after(): assert not included()
    """
    result = run(code)
    result.assert_outcomes(failed=1, errors=1, passed=1)
    result.stdout.fnmatch_lines(["*ValueError: True"])
