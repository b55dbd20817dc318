"""Worker processes of a DataLoader and of torch.multiprocessing that start while a region is open."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.subprocesses import environment

#: A worker sees the regions that were open if it was forked, and no region if it was spawned. Both can open their own,
#: and a region that came with the pickled dataset.
SCRIPT = """
import json, sys
import torch
import torch_promote as tp

class Items(torch.utils.data.Dataset):
    def __init__(self, region):
        self.region, self.weight = region, torch.ones(2, 2, requires_grad=True)

    def __len__(self):
        return 2

    def __getitem__(self, at):
        x = torch.ones(2, 2)
        around = x @ self.weight
        with self.region:
            inside = x @ self.weight
            inside.float().sum().backward()
        return str(around.dtype), str(inside.dtype), str((x @ x).dtype), self.weight.grad.clone()

def loaded(kind, method, around, inside):
    items = Items(inside)
    loader = torch.utils.data.DataLoader(
        items, batch_size=None, num_workers=1, multiprocessing_context=method, persistent_workers=True
    )
    seen = []
    with around:
        torch.ones(2, 2) @ items.weight
        for _ in range(2):
            seen += [[*dtypes, grad.tolist()] for *dtypes, grad in loader]
        after = str((torch.ones(2, 2) @ items.weight).dtype)
    return [*seen, after, str((torch.ones(2, 2) @ items.weight).dtype)]

def doubled(queue, region):
    with region:
        queue.put(str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype))

def main():
    method, results = sys.argv[1], {}
    for kind, autocast in (("stock", tp.stock_autocast), ("ours", tp.my_autocast)):
        results[kind] = [
            loaded(kind, method, autocast("cpu"), autocast("cpu")),
            loaded(kind, method, autocast("cpu", enabled=False), autocast("cpu")),
        ]
    context = torch.multiprocessing.get_context(method)
    queue, kept = context.Queue(), torch.ones(2, 2, requires_grad=True)
    region = tp.my_autocast("cpu", cache="persistent", overrides={"matmul": torch.float64, "mm": torch.float64})
    with region:
        torch.ones(2, 2) @ kept
        process = context.Process(target=doubled, args=(queue, region))
        process.start()
        results["overrides"] = queue.get(timeout=60)
        process.join()
    results["status"] = process.exitcode
    print(json.dumps(results))

if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
"""


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.slow)],
)
def test_workers_that_start_in_a_region(tmp_path: Path, method: str) -> None:
    script = tmp_path / "loads.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), method]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(done.stdout)
    assert results["ours"] == results["stock"]
    around = "torch.bfloat16" if method == "fork" else "torch.float32"
    assert results["ours"][0][0][:3] == [around, "torch.bfloat16", around]
    assert (results["overrides"], results["status"]) == ("torch.float64", 0)
