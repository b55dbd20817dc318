"""The processes of helpers.subprocesses are like `python -c`, except that torch is already imported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.subprocesses import Program, environment, output_of, run_module, run_python, run_together

SEEN = """
    import os, sys, warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("a warning")
    values = sys.argv, sys.path, os.getcwd(), dict(os.environ), __name__, sys.stdin.read(), len(caught)
    print(*values, sys.modules["__main__"].__dict__ is globals(), sep="|")
"""


def test_what_a_program_finds(tmp_path: Path) -> None:
    env = environment(OMP_NUM_THREADS="1", MARK="here", PYTHONPATH=f"{tmp_path}:{tmp_path / 'second'}")
    code = "\n".join(line.removeprefix("    ") for line in SEEN.splitlines())
    command = [sys.executable, "-c", code, "first", "-v"]
    stdin = subprocess.DEVNULL
    plain = subprocess.run(command, env=env, cwd=tmp_path, stdin=stdin, capture_output=True, text=True, check=True)
    assert output_of(SEEN, "first", "-v", env=env, cwd=tmp_path) == plain.stdout
    quiet = output_of(SEEN, "first", "-v", env=env, cwd=tmp_path, quiet=True)
    assert [line.split("|")[6] for line in (quiet, plain.stdout)] == ["0", "1"]


@pytest.mark.parametrize("compiler", [False, True])
def test_nothing_but_torch_is_imported(compiler: bool) -> None:
    code = (
        "import sys; print(*(name in sys.modules for name in ('torch', 'torch._dynamo', 'torch_promote', 'helpers')))"
    )
    assert output_of(code, compiler=compiler) == f"True {compiler} False False\n"
    assert output_of("import os; print(len(os.listdir('/proc/self/task')))", compiler=compiler) == "1\n"


@pytest.mark.parametrize(
    ("code", "status", "out", "err"),
    [
        ("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", 3, "out\n", "err\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, "", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, "", "KeyboardInterrupt\n"),
        ("def wrong():\n    1 / 0\nwrong()", 1, "", "ZeroDivisionError: division by zero\n"),
        ("import atexit\natexit.register(print, 'at exit')\nprint('first')", 0, "first\nat exit\n", ""),
    ],
)
def test_how_a_program_ends(code: str, status: int, out: str, err: str) -> None:
    done = run_python(code)
    assert (done.returncode, done.stdout) == (status, out)
    assert done.stderr.endswith(err)
    assert bool(err) == bool(done.stderr)


def test_a_program_that_does_not_end_is_killed() -> None:
    program = Program("import time; time.sleep(100)")
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(timeout=0.1)
    for _ in range(600):
        if not os.path.exists(f"/proc/{program.pid}"):
            return
        time.sleep(0.1)
    pytest.fail("it is still there")


def test_programs_at_the_same_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    code = "import sys; print(open(sys.argv[1], 'w').write('x') if sys.argv[2:] else open(sys.argv[1]).read())"
    both = [Program(code, str(tmp_path / "pipe"), *more) for more in ((), ("writes",))]
    assert [done.stdout for done in run_together(both)] == ["x\n", "1\n"]


def test_a_module() -> None:
    assert run_module("platform", "--terse").stdout == run_module("platform", "--terse").stdout != ""
