"""The pytest plugin: failures, their text, the counts, and that it does nothing while it is off."""

from __future__ import annotations

import pytest

from helpers.plugin_runs import BAD, Run, counted, run, wrong_cell

__all__ = ["run", "wrong_cell"]  # fixtures

pytest_plugins = ["pytester"]


GOOD = """
    import torch

    def test_good():
        assert (torch.ones(3) + 1).sum() == 6
"""
#: The same, as the inner run's conftest.py, for runs in processes of their own.
PLANTED = """
    import torch
    from torch_promote.reference import promotion as promotion_table

    promotion_table._TABLE[torch.int8, torch.int16] = torch.int32
"""


def test_off_by_default(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BAD)
    result = run()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*crosscheck*")


def test_off_imports_nothing_and_registers_no_kernel(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_modules():
            assert "_torch_promote_hooks" in sys.modules
            assert not {"torch", "torch_promote"} & set(sys.modules)

        def test_kernels():
            import torch, torch_promote
            from torch_promote import _C

            name = _C.dispatch_observer_key()
            assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C._dispatch_key_parse(name))
            assert f"{name}: registered" not in torch._C._dispatch_dump_table("aten::add.Tensor")
            with torch_promote.crosscheck():
                assert torch._C._dispatch_tls_is_dispatch_key_included(torch._C._dispatch_key_parse(name))
            assert name in torch._C._dispatch_dump_table("aten::add.Tensor")
        """
    )
    pytester.runpytest_subprocess("-p", "_torch_promote_hooks").assert_outcomes(passed=2)


@pytest.mark.usefixtures("wrong_cell")
def test_a_failure(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BAD, test_other=GOOD)
    result = run("--torch-promote-crosscheck")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "torch_promote: crosscheck, level dtype",
            "*_ test_bad _*",
            "crosscheck: 1 mismatch in 3 calls: aten.add.Tensor dtype x1",
            "aten.add.Tensor(int8[[]3[]], int16[[]3[]], 1): dtype",
            "    expected int32",
            "    got      int16",
            "    at *test_a_failure.py:4 in mixed: return torch.ones*",
            "*= torch_promote crosscheck, level dtype =*",
            "tests checked *2",
            "without a rule *0",
            "mismatches *1",
            "FAILED *::test_bad - Failed: crosscheck: 1 mismatch in 3 calls: aten.add.Tensor*",
        ]
    )
    # Neither the plugin's lines nor those of the check are shown.
    assert "_torch_promote_hooks.py:" not in result.stdout.str()
    assert "checking/" not in result.stdout.str()


def test_the_summary_counts(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch, torch_promote as tp

        def test_it():
            with tp.my_autocast("cpu"):
                torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2))
            torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        """
    )
    result = run("--torch-promote-crosscheck=bits")
    result.assert_outcomes(passed=1)
    assert counted(result, "with a cast policy") == counted(result, "compared with stock") == 1
    assert counted(result, "without a rule") == 1
    result.stdout.fnmatch_lines(["without a rule *1  aten.quantize_per_tensor.default 1", "mismatches *0"])


@pytest.mark.usefixtures("wrong_cell")
def test_a_test_that_fails_by_itself_keeps_its_failure(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BAD + "        assert 1 == 2\n")
    for options in ([], ["--show-capture=no"]):
        result = run("--torch-promote-crosscheck", *options)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "E       assert 1 == 2",
                "*- torch_promote crosscheck -*",
                "crosscheck: 1 mismatch *",
                "FAILED *::test_bad - assert 1 == 2",
            ]
        )


@pytest.mark.usefixtures("wrong_cell")
def test_a_failure_that_is_only_a_text(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BAD + "        pytest.fail('for this test', pytrace=False)\n", conftest="")
    pytester.path.joinpath("test_a_failure_that_is_only_a_text.py").write_text(
        "import pytest\n" + pytester.path.joinpath("test_a_failure_that_is_only_a_text.py").read_text()
    )
    result = run("--torch-promote-crosscheck")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["for this test", "*- torch_promote crosscheck -*", "crosscheck: 1 mismatch *"])


@pytest.mark.usefixtures("wrong_cell")
def test_of_many_mismatches_the_first_are_shown(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(BAD + "        for _ in range(24): mixed()\n")
    result = run("--torch-promote-crosscheck")
    result.stdout.fnmatch_lines(["crosscheck: 25 mismatches in *", "and 5 more"])
    # With CI set in the environment, pytest's summary repeats a failure's whole message.
    report, _, _ = str(result.stdout).partition("short test summary info")
    assert report.count("got      int16") == 20


@pytest.mark.usefixtures("wrong_cell")
def test_unittest(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import unittest, torch

        def mixed():
            return torch.ones(3, dtype=torch.int8) + torch.ones(3, dtype=torch.int16)

        class Test(unittest.TestCase):
            def test_good(self): self.assertEqual(int(torch.ones(2).sum()), 2)
            def test_bad(self): mixed()
            def test_bad_by_itself(self): mixed(); self.assertEqual(1, 2)
            @unittest.skip("not now")
            def test_skipped(self): mixed()

        class TestSetUp(unittest.TestCase):
            def setUp(self): mixed()
            def test_bad_set_up(self): pass
        """
    )
    result = run("--torch-promote-crosscheck")
    result.assert_outcomes(failed=3, passed=1, skipped=1)
    result.stdout.fnmatch_lines_random(
        [
            "FAILED *::test_bad - Failed: crosscheck: 1 mismatch*",
            "FAILED *::test_bad_by_itself - AssertionError: 1 != 2",
            "FAILED *::test_bad_set_up - Failed: crosscheck: 1 mismatch*",
        ]
    )
    assert sum("crosscheck: 1 mismatch" in line for line in result.outlines) == 5  # three in full, two in short


@pytest.mark.usefixtures("wrong_cell")
def test_a_mismatch_in_a_subtest_fails_the_test(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import unittest, torch

        def mixed():
            return torch.ones(3, dtype=torch.int8) + torch.ones(3, dtype=torch.int16)

        class Test(unittest.TestCase):
            def test_bad(self):
                with self.subTest(): mixed()
                with self.subTest(): self.assertEqual(int(torch.ones(2).sum()), 2)
            def test_bad_and_skipped(self):
                with self.subTest(): mixed(); self.skipTest("not now")
            def test_good(self):
                with self.subTest(): self.assertEqual(int(torch.ones(2).sum()), 2)
        """
    )
    result = run("--torch-promote-crosscheck")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    failed = [line for line in result.outlines if line.startswith("FAILED")]
    assert [line.partition("::")[2].partition(" in ")[0] for line in failed] == [
        "Test::test_bad - Failed: crosscheck: 1 mismatch",
        "Test::test_bad_and_skipped - Failed: crosscheck: 1 mismatch",
    ]


@pytest.mark.usefixtures("wrong_cell")
def test_fixtures_are_checked_in_the_phase_they_run_in(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        BAD.replace("def test_bad():\n        mixed()", "")
        + """
    import pytest

    @pytest.fixture
    def before(): mixed()

    @pytest.fixture
    def after():
        yield
        mixed()

    @pytest.fixture(scope="module")
    def once(): mixed()

    def test_before(before): pass
    def test_after(after): pass
    def test_first_with_once(once): pass
    def test_second_with_once(once): pass
"""
    )
    result = run("--torch-promote-crosscheck", "-rA")
    result.assert_outcomes(errors=3, passed=2)
    result.stdout.fnmatch_lines_random(
        [
            "*ERROR at setup of test_before*",
            "*ERROR at teardown of test_after*",
            "*ERROR at setup of test_first_with_once*",
            "PASSED *::test_second_with_once",
        ]
    )
    assert counted(result, "mismatches") == 3


@pytest.mark.usefixtures("wrong_cell")
def test_markers(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        BAD
        + """
    import pytest, torch_promote as tp

    @pytest.mark.torch_promote_crosscheck(level="off")
    def test_off(): mixed()

    @pytest.mark.torch_promote_crosscheck
    def test_on(): mixed()

    @pytest.mark.torch_promote_crosscheck(level="bits")
    def test_bits(torch_promote_crosscheck):
        with tp.my_autocast("cpu"):
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert torch_promote_crosscheck.with_stock.total() == 1

    @pytest.mark.torch_promote_crosscheck(raise_on_mismatch=True)
    def test_stops():
        mixed()
        assert False, "not reached"
"""
    )
    run().assert_outcomes(failed=2, passed=3)
    result = run("--torch-promote-crosscheck")
    result.assert_outcomes(failed=3, passed=2)
    result.stdout.fnmatch_lines(
        [
            "*_ test_stops _*",
            ">   *return torch.ones(3, dtype=torch.int8)*",
            "E   *CrosscheckError: aten.add.Tensor(*",
            "E   *expected int32*",
        ]
    )
    assert "checking/" not in result.stdout.str()
    assert "- torch_promote crosscheck -" not in result.stdout.str()


def test_bad_markers(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.torch_promote_crosscheck(level="bit")
        def test_level(): pass

        @pytest.mark.torch_promote_crosscheck("bits", depth=3)
        def test_arguments(): pass
        """
    )
    result = run()
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines_random(
        [
            "*marker torch_promote_crosscheck: 'bit' is not a level. Legal: off, dtype, bits.",
            "*marker torch_promote_crosscheck takes level= and raise_on_mismatch= only, got 'bits', depth.",
        ]
    )


def test_the_fixture_gives_the_report(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.fixture
        def tensor(torch_promote_crosscheck): return torch.ones(2)

        def test_it(tensor, torch_promote_crosscheck):
            before = torch_promote_crosscheck.calls
            tensor + 1
            assert torch_promote_crosscheck.checked["aten.add.Tensor"] == 1
            assert torch_promote_crosscheck.calls == before + 1

        @pytest.mark.usefixtures("torch_promote_crosscheck")
        def test_used(): torch.ones(2)

        def test_asked_for_too_late(request): request.getfixturevalue("torch_promote_crosscheck")

        @pytest.mark.torch_promote_crosscheck(level="off")
        def test_off(torch_promote_crosscheck): pass
        """
    )
    result = run()
    result.assert_outcomes(passed=2, failed=1, errors=1)
    result.stdout.fnmatch_lines_random(["*test_off is not checked. Remove level='off', or name *"])
    assert counted(result, "tests checked") == 2


def test_folders_with_conftests_of_their_own(run: Run, pytester: pytest.Pytester) -> None:
    for folder in ("one", "two"):
        path = pytester.mkpydir(folder)
        (path / "conftest.py").write_text("")
        (path / "test_it.py").write_text("import torch\n\ndef test_it(): torch.ones(2)\n")
    result = run("--torch-promote-crosscheck")
    result.assert_outcomes(passed=2)
    assert counted(result, "tests checked") == 2


def test_the_ini_file(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GOOD)
    pytester.makeini("[pytest]\ntorch_promote_crosscheck = bits")
    run().stdout.fnmatch_lines(["torch_promote: crosscheck, level bits", "tests checked *1"])
    run("--torch-promote-crosscheck").stdout.fnmatch_lines(["torch_promote: crosscheck, level dtype"])
    run("--torch-promote-crosscheck=off").stdout.no_fnmatch_line("*crosscheck*")


def test_bad_options_are_usage_errors(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GOOD)
    for arguments in (["--torch-promote-crosscheck=bit"], ["--torch-promote-crosscheck", "bit"]):
        result = run(*arguments)
        assert result.ret is pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*--torch-promote-crosscheck: 'bit' is not a level. Legal: off, dtype, bits.*"])
    pytester.makeini("[pytest]\ntorch_promote_crosscheck = yes")
    result = run()
    assert result.ret is pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: ini option torch_promote_crosscheck: 'yes' is not a level. Legal: *"])
    assert "Traceback" not in result.stderr.str()


def test_expected_failures_are_expected(run: Run, pytester: pytest.Pytester, wrong_cell: None) -> None:
    pytester.makepyfile(BAD + "    import pytest\n    pytestmark = pytest.mark.xfail(strict=True)\n")
    run("--torch-promote-crosscheck").assert_outcomes(xfailed=1)


@pytest.mark.usefixtures("wrong_cell")
def test_xdist_merges_the_summary(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(PLANTED)  # the workers are processes of their own
    pytester.makepyfile(test_a=BAD, test_b=GOOD, test_c=BAD)
    alone = run("--torch-promote-crosscheck")
    shared = pytester.runpytest_subprocess("-p", "_torch_promote_hooks", "--torch-promote-crosscheck", "-n2")
    shared.assert_outcomes(failed=2, passed=1)
    for title in ("tests checked", "calls", "checked against the reference", "without a rule", "mismatches"):
        assert counted(shared, title) == counted(alone, title), title
    assert counted(shared, "tests checked") == 3
    assert counted(shared, "mismatches") == 2


def test_nothing_is_left_behind(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch
        from torch_promote import _C

        def included():
            key = torch._C._dispatch_key_parse(_C.dispatch_observer_key())
            return torch._C._dispatch_tls_is_dispatch_key_included(key)

        @pytest.mark.torch_promote_crosscheck
        def test_checked():
            assert included()
            raise ValueError

        @pytest.mark.torch_promote_crosscheck
        def test_interrupted_setup(missing): pass

        def test_after(): assert not included()
        """
    )
    run().assert_outcomes(failed=1, errors=1, passed=1)
