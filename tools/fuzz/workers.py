"""Runs programs in processes. A crash or a hang counts as a difference, and the run goes on."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fuzz import calls, shrinking
from fuzz.drawing import draw_program, script_of
from fuzz.report import Counts, Found, Report
from fuzz.running import Maker, check, quiet
from fuzz.tree import Program

_fork: Any = multiprocessing.get_context("fork")
#: The programs of a process. Each process imports again what programs need, for a second.
_CHUNK = 500


@dataclass(frozen=True, slots=True)
class Work:
    """Which programs to run."""

    device: str
    mode: str | None
    seed: int
    first: int
    programs: int
    jobs: int = 1
    #: Stop after so many programs that differ.
    enough: int = 5
    #: Makes ours: another one has a planted bug.
    ours: Maker = calls.Ours
    #: After so many seconds, a program hangs.
    patience: float = 60.0

    def program(self, number: int) -> Program:
        """A program."""
        return draw_program(self.seed, number, "cpu" if self.device == "cpu" else "cuda", self.mode)


class GeneratorError(Exception):
    """A program could not be drawn, written or compiled: a mistake of this folder."""


class _Process:
    """A process that calls a function, and sends the result."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.pipe, theirs = _fork.Pipe()
        self.process = _fork.Process(target=self._serve, args=(theirs, function, arguments))
        self.process.start()
        theirs.close()

    @staticmethod
    def _serve(pipe: Any, function: Callable[..., Any], arguments: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faulthandler.disable()  # pytest's; a crash is reported by its signal
        for stream in (1, 2):  # PyTorch's profiler prints
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        with quiet():
            pipe.send(function(*arguments))
        os._exit(0)

    def result(self, patience: float = 0) -> Any:
        """The result; raises EOFError if the process died, and TimeoutError if it is not there in time."""
        if not self.pipe.poll(patience):
            raise TimeoutError
        return self.pipe.recv()

    def stop(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Chunk(_Process):
    """A process that runs some programs."""

    def __init__(self, work: Work, numbers: range) -> None:
        self.end = numbers.stop
        #: The number of the program that runs, and when it started.
        self.at = _fork.RawArray("d", (numbers.start, time.monotonic()))
        super().__init__(_checked, work, numbers, self.at)


def _checked(work: Work, numbers: range, at: Any) -> tuple[Counts, list[Found]] | str:
    counts, found = Counts(), []
    before = time.process_time()
    for place, number in enumerate(numbers):
        at[:] = number, time.monotonic()
        if place in (10, 100):  # programs import modules, which later collections need not look through
            gc.collect()
            gc.freeze()
        try:
            program = work.program(number)
            verdict = check(program, work.ours)
        except Exception:
            return f"program {number} of seed {work.seed}: {traceback.format_exc()}"
        counts.add(program, verdict)
        if verdict.found:
            found.append(Found(number, verdict.detail))
    counts.seconds = time.process_time() - before
    return counts, found


def run(work: Work, report: Report, step: Callable[[str], None] = lambda remark: None) -> None:
    """Runs programs, and fills in a report. Leaves a partial report if it is interrupted."""
    size = max(1, min(_CHUNK, work.programs // work.jobs))
    end = work.first + work.programs
    waiting = deque(range(start, min(start + size, end)) for start in range(work.first, end, size))
    busy: list[_Chunk] = []
    try:
        while busy or (waiting and len(report.found) < work.enough):
            while waiting and len(busy) < work.jobs and len(report.found) < work.enough:
                busy.append(_Chunk(work, waiting.popleft()))
            ready = multiprocessing.connection.wait([chunk.pipe for chunk in busy], timeout=1)
            for chunk in list(busy):
                number, began = int(chunk.at[0]), chunk.at[1]
                if chunk.pipe not in ready and time.monotonic() - began < work.patience:
                    continue
                busy.remove(chunk)
                try:
                    answer = chunk.result()
                except (EOFError, ConnectionResetError, TimeoutError) as error:
                    chunk.stop()
                    report.found.append(Found(number, _why(chunk, error)))
                    if number + 1 < chunk.end:
                        waiting.append(range(number + 1, chunk.end))
                    continue
                chunk.stop()
                if isinstance(answer, str):
                    raise GeneratorError(answer)
                counts, found = answer
                report.counts.merge(counts)
                report.found += found
                for _ in range(counts.programs):
                    step(f"{len(report.found)} differ")
    finally:
        for chunk in busy:
            chunk.stop()
        report.found.sort(key=lambda found: found.number)


def _why(chunk: _Chunk, error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it did not end"
    code = chunk.process.exitcode or 0
    return f"the process died: {signal.Signals(-code).name}" if code < 0 else f"the process ended with status {code}"


def shrink(work: Work, found: Found) -> None:
    """Adds the smallest script to a program that was found."""
    title = f"Program {found.number} of seed {work.seed} on {work.device}: {found.detail}"
    program = work.program(found.number)
    crashed = found.detail.startswith(("the process", "it did not end"))

    def fails(one: Program) -> bool:
        return _call(check, one, work.ours, patience=10) is None if crashed else check(one, work.ours).found

    smallest = _call(_smallest, program, fails, patience=600)
    if smallest is not None:
        program = smallest
    else:
        title += "; it does not by itself"
    found.script, found.statements = script_of(program, title.replace('"', "'")), shrinking.size(program)


def _smallest(program: Program, fails: shrinking.Fails) -> Program | None:
    return shrinking.shrunk(program, fails) if fails(program) else None


def _call(function: Callable[..., Any], *arguments: Any, patience: float) -> Any:
    """The result of a function in a process; None if it crashed or hung."""
    process = _Process(function, *arguments)
    try:
        return process.result(patience)
    except (EOFError, ConnectionResetError, TimeoutError):
        return None
    finally:
        process.stop()
