"""Python processes that tests start: their environments, and programs in forks of a process that has torch."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
#: What programs that compile or shard import, and what Inductor asks the C++ compiler first. Both take seconds.
COMPILER = (
    *("torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp"),
    "torch._inductor.cpu_vec_isa:pick_vec_isa",
)


def environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment, in which Python finds this package and the helpers, and more variables."""
    paths = [str(TESTS.parent), str(TESTS), str(TESTS.parent / "tools"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}


def plain_environment() -> dict[str, str]:
    """The same without the variables that change what `import torch_promote` does."""
    return {name: value for name, value in environment().items() if not name.startswith("TORCH_PROMOTE_")}


class Program:
    """Code that runs in a separate process like under `python -c`, except that torch has already been imported.

    `import torch` takes two seconds. The process is a fork of a process that has only imported torch. So start Python
    itself if the test depends on a variable that PyTorch reads during its import, or on options of the interpreter.
    OMP_NUM_THREADS is 1 if the tests have none. A program that returns, or calls `sys.exit`, runs its exit handlers and
    is not finalized, unless `finalize` says so. `compiler` imports torch.compile and FSDP before, too.
    """

    def __init__(
        self,
        code: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        compiler: bool = False,
        quiet: bool = False,
        finalize: bool = False,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        code = textwrap.dedent(code)
        self.arguments = ["python", "-c", code, *arguments]
        request = {"code": code, "arguments": arguments, "quiet": quiet, "finalize": finalize}
        request |= {"folder": os.fspath(cwd or Path.cwd()), "env": dict(environment() if env is None else env)}
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (`wait` closes them)
        self._status, status = os.pipe()
        out = self._out.fileno() if stdout is None else stdout
        err = self._err.fileno() if stderr is None else stderr
        warm = COMPILER if compiler else ()
        if warm not in _WARM:
            _WARM[warm] = _warm_python(warm)
        socket.send_fds(_WARM[warm][0], [json.dumps(request).encode()], [out, err, status])
        os.close(status)
        self.pid = self._number(timeout=400)
        self._ended = False

    def wait(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Returns the program's status and output. Kills it and raises TimeoutExpired after `timeout` seconds."""
        try:
            ended = self._number(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._ended = True
        written = []
        for file in (self._out, self._err):
            file.seek(0)
            written.append(file.read().decode())
            file.close()
        os.close(self._status)
        return subprocess.CompletedProcess(self.arguments, os.waitstatus_to_exitcode(ended), *written)

    def kill(self) -> None:
        """Kills the program if it has not ended."""
        if not self._ended and not select.select([self._status], [], [], 0)[0]:
            os.kill(self.pid, signal.SIGKILL)

    def _number(self, timeout: float) -> int:
        if not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        (number,) = struct.unpack("i", os.read(self._status, 4))
        return int(number)


def run_python(code: str, *arguments: str, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a `Program`, and returns its status and output."""
    return Program(code, *arguments, **options).wait(timeout)


def run_module(name: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The same for a module, as under `python -m`."""
    code = "import runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    return run_python(code, name, *arguments, **options)


def output_of(code: str, *arguments: str, **options: Any) -> str:
    """Runs a `Program`, which must end with status 0 and an empty stderr, and returns its stdout."""
    done = run_python(code, *arguments, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def run_together(programs: Sequence[Program], timeout: float = 120) -> list[subprocess.CompletedProcess[str]]:
    """Waits for concurrent programs, `timeout` seconds for all, and returns the result of each."""
    deadline = time.monotonic() + timeout
    try:
        return [program.wait(max(0.0, deadline - time.monotonic())) for program in programs]
    finally:
        for program in programs:
            program.kill()


#: The processes from which programs are forked, by what they import besides torch: what `_warm_python` returns.
_WARM: dict[tuple[str, ...], tuple[socket.socket, subprocess.Popen[bytes] | None]] = {}


def end_warm_pythons() -> None:
    """Ends them when no other process of pytest-xdist uses them, so that this process's CPU time includes theirs."""
    connected = [*_WARM.values()]
    _WARM.clear()
    for requests, _ in connected:
        requests.close()
    for _, process in connected:
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that a test has left has the socket, too
                process.wait(timeout=120)


def _warm_python(more: tuple[str, ...]) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """Connects to the process from which programs are forked, and starts it unless another of pytest-xdist's has."""
    here, listening = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    address = f"\0torch_promote's tests {run} {' '.join(more)}"[:100]  # in no folder: the process's end removes it
    process = None
    while True:
        with contextlib.suppress(ConnectionRefusedError):  # nobody listens, or not yet
            here.connect(address)
            break
        try:
            listening.bind(address)
        except OSError:
            time.sleep(0.01)
            continue
        listening.listen()
        process = _started(listening, more)
    listening.close()
    return here, process


def _started(listening: socket.socket, more: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(TESTS / "helpers" / "warm_python.py"), str(listening.fileno()), *more]
    env = {"OMP_NUM_THREADS": "1", **plain_environment(), "PYTHONUNBUFFERED": ""}  # a program's own is `prepared`
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        command, env=env, pass_fds=[listening.fileno()], stdin=nothing, stdout=nothing, start_new_session=True
    )
