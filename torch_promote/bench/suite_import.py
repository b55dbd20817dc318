"""The suite `import`: an op outside of regions, in a process that imported the package and in one that did not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from torch_promote.bench.cases import OURS, STOCK, Case, Prepared, Settings

__all__ = ["cases"]

# Times an op for each line of its input. Does not import the package by itself.
_WORKER = """
import sys, time, timeit, torch
imported, device, threads, clock, runs = sys.argv[1:]
if imported == "imported":
    import torch_promote
torch.set_num_threads(int(threads))
low = torch.randn(4, 4, device=device).bfloat16()
clock = time.process_time if clock == "cpu" else time.perf_counter
timer = timeit.Timer("torch.mm(low, low)", timer=clock, globals={"torch": torch, "low": low})
for line in sys.stdin:
    seconds = timer.timeit(int(runs))
    if device == "cuda":
        torch.cuda.synchronize()
    print(seconds / int(runs) * 1e9, flush=True)
"""

_MM_SECONDS = 1e-6  # approximate


def cases(settings: Settings) -> Iterator[Case]:
    """Yields the cases of the suite."""
    yield Case("import", "mm outside of regions, package imported or not", _prepare)


def _prepare(settings: Settings) -> Prepared:
    ours, stock = _Worker("imported", settings), _Worker("not imported", settings)

    def close() -> None:
        ours.close()
        stock.close()

    return Prepared({OURS: ours.ask, STOCK: stock.ask}, close=close)


class _Worker:
    def __init__(self, imported: str, settings: Settings) -> None:
        runs = max(1, int(settings.slice_seconds / _MM_SECONDS))
        arguments = [imported, settings.device, str(settings.threads), settings.clock, str(runs)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()  # closes its stdin, so that it exits
