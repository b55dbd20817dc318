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

__all__ = ["GeneratorError", "Work", "run", "shrink"]

_fork: Any = multiprocessing.get_context("fork")
_CHUNK = 100


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

    @property
    def device_type(self) -> str:
        """The device type in programs."""
        return "cpu" if self.device == "cpu" else "cuda"

    def program(self, number: int) -> Program:
        """A program."""
        return draw_program(self.seed, number, self.device_type, self.mode)


class GeneratorError(Exception):
    """A program could not be drawn, written or compiled: a mistake of this folder."""


class _Worker:
    """A process that runs chunks of programs."""

    def __init__(self, work: Work) -> None:
        self.work = work
        #: The number of the program that runs, and when it started.
        self.at = _fork.RawArray("d", 2)
        self.end = 0
        self.pipe, theirs = _fork.Pipe()
        self.process = _fork.Process(target=_serve, args=(work, theirs, self.at), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, chunk: range) -> None:
        self.at[:] = chunk.start, time.monotonic()
        self.end = chunk.stop
        self.pipe.send((chunk.start, chunk.stop))

    @property
    def hangs(self) -> bool:
        return time.monotonic() - self.at[1] > self.work.patience

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _serve(work: Work, pipe: Any, at: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()  # pytest's; a crash is reported by its signal
    for stream in (1, 2):  # PyTorch's profiler prints
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    done = 0
    with quiet():
        while True:
            if done < 1000:  # programs import modules, which later collections need not look through
                gc.collect()
                gc.freeze()
            try:
                start, stop = pipe.recv()
            except EOFError:
                return
            try:
                counts, found = _chunk(work, range(start, stop), at)
            except Exception:
                pipe.send(f"program {int(at[0])} of seed {work.seed}: {traceback.format_exc()}")
                return
            done += stop - start
            pipe.send((counts, found))


def _chunk(work: Work, numbers: range, at: Any) -> tuple[Counts, list[Found]]:
    counts, found = Counts(), []
    before = time.process_time()
    for number in numbers:
        at[:] = number, time.monotonic()
        program = work.program(number)
        verdict = check(program, work.ours)
        counts.add(program, verdict)
        if verdict.found:
            found.append(Found(number, verdict.detail))
    counts.seconds = time.process_time() - before
    return counts, found


def run(work: Work, report: Report, step: Callable[[str], None] = lambda remark: None) -> None:
    """Runs programs, and fills in a report. Leaves a partial report if it is interrupted."""
    waiting = deque(
        range(start, min(start + _CHUNK, work.first + work.programs))
        for start in range(work.first, work.first + work.programs, _CHUNK)
    )
    idle = [_Worker(work) for _ in range(max(1, min(work.jobs, len(waiting))))]
    busy: list[_Worker] = []
    try:
        while (waiting and len(report.found) < work.enough) or busy:
            while waiting and idle and len(report.found) < work.enough:
                worker = idle.pop()
                worker.give(waiting.popleft())
                busy.append(worker)
            ready = multiprocessing.connection.wait([worker.pipe for worker in busy], timeout=1)
            for worker in list(busy):
                if worker.pipe not in ready and not worker.hangs:
                    continue
                busy.remove(worker)
                try:
                    if worker.pipe not in ready:
                        raise TimeoutError
                    answer = worker.pipe.recv()
                except (EOFError, ConnectionResetError, TimeoutError) as error:
                    number, stop = int(worker.at[0]), worker.end
                    worker.stop()
                    report.found.append(Found(number, _why(worker, error)))
                    if number + 1 < stop:
                        waiting.append(range(number + 1, stop))
                    idle.append(_Worker(work))
                    continue
                if isinstance(answer, str):
                    raise GeneratorError(answer)
                counts, found = answer
                report.counts.merge(counts)
                report.found += found
                idle.append(worker)
                for _ in range(counts.programs):
                    step(f"{len(report.found)} differ")
    finally:
        for worker in [*idle, *busy]:
            worker.stop()
        report.found.sort(key=lambda found: found.number)


def _why(worker: _Worker, error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not end within {worker.work.patience:.0f} s"
    code = worker.process.exitcode or 0
    return f"the process died: {signal.Signals(-code).name}" if code < 0 else f"the process ended with status {code}"


def shrink(work: Work, found: Found) -> None:
    """Adds the smallest script to a program that was found."""
    title = f"Program {found.number} of seed {work.seed} on {work.device}: {found.detail}"
    program = work.program(found.number)
    crashed = "differ" not in found.detail and ("died" in found.detail or "did not end" in found.detail)
    fails = (lambda one: _in_a_process(work, one)) if crashed else (lambda one: check(one, work.ours).found)
    smallest = _call(lambda: _smallest(program, fails), patience=600)
    if smallest is not None:
        program = smallest
    else:
        title += "; it does not by itself"
    found.script, found.statements = script_of(program, title.replace('"', "'")), shrinking.size(program)


def _smallest(program: Program, fails: shrinking.Fails) -> Program | None:
    with quiet():
        return shrinking.shrunk(program, fails) if fails(program) else None


def _in_a_process(work: Work, program: Program) -> bool:
    return _call(lambda: check(program, work.ours).found, patience=10) is not False


def _call(function: Callable[[], Any], patience: float) -> Any:
    """The result of a function in a process; None if it crashed or hung."""
    pipe, theirs = _fork.Pipe()

    def call() -> None:
        faulthandler.disable()
        theirs.send(function())
        theirs.close()
        os._exit(0)

    process = _fork.Process(target=call)
    process.start()
    theirs.close()
    try:
        return pipe.recv() if pipe.poll(patience) else None
    except (EOFError, ConnectionResetError):
        return None
    finally:
        process.kill()
        process.join()
