"""Every numbered example runs and prints the expected output."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from helpers.subprocesses import Program, environment, run_together

EXAMPLES = Path(__file__).parents[2] / "examples"

#: Runs a script as the interpreter does.
SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""

#: Patterns for lines that each example prints, in this order.
LINES = {
    "01_training_loop.py": ["the same losses, bit for bit: True"],
    "02_overrides.py": [
        "the stock policy * linear torch.bfloat16 * softmax torch.float32",
        "linear kept in float32, softmax not * linear torch.float32 * softmax torch.bfloat16",
        "nested, softmax in float16 * linear torch.float32 * softmax torch.float16",
        "after the nested region * linear torch.float32 * softmax torch.bfloat16",
        "a decorated function * linear torch.float32 * softmax torch.float32",
        "PolicyError: *Closest: softmax*",
        "PolicyError: *no optional dtype argument*",
    ],
    "03_compile.py": ["* torch.float32", "* torch.bfloat16", "* torch.float16", "* torch.float32"],
    "04_distributed.py": ["*loss *"],
    "05_crosscheck.py": [
        "without a rule * 0*",
        "compared with stock *",
        "mismatches * 0*",
        "CrosscheckError: aten.sinh.default(float32[[]32, 8[]]): dtype",
        "*in <module>: torch.sinh(x)",
    ],
    "06_module_policies.py": [
        "no policies *blocks.0.mlp.0 bfloat16  blocks.1.mlp.0 bfloat16  lm_head bfloat16",
        "three policies *blocks.0.mlp.0 bfloat16  blocks.1.mlp.0 float16  lm_head float32",
        "a copy has them *blocks.0.mlp.0 bfloat16  blocks.1.mlp.0 float16  lm_head float32",
        "4 of 15 modules have a policy.",
        "taken off again *blocks.0.mlp.0 bfloat16  blocks.1.mlp.0 bfloat16  lm_head bfloat16",
        "PolicyError: no module of the model is named 'lm_haed'. Closest: lm_head.",
    ],
    "07_custom_op.py": [
        "*blend requires inputs of one dtype, got torch.bfloat16 and torch.float32",
        "* torch.float32, *the weight's gradient torch.float32",
        "* torch.bfloat16, *the weight's gradient torch.float32",
        "* torch.float64, *the weight's gradient torch.float32",
        "* torch.float16*",
        "* torch.float32*",
    ],
    "08_promotion.py": [
        "torch *float32 float32 float32 float16",
        "jax *float32 float32 float32 float32",
        "numpy *float32 float64 float64 float32",
        "gradient torch.bfloat16",
        "strict   aten::mul.Tensor: the promotion rule*",
        "*torch.float32",
        "lint*: 0-dim precision loss",
        "lint*: int to low-precision float",
        "lint*: int overflow by wrapping scalar",
        "*torch.bfloat16",
    ],
    "09_tune.py": [
        "aten::sum in the model: local inf, *",
        "overrides {'aten::sum': 'fp32'} after * runs: minimum",
        "with the file: *, in float32: *",
    ],
}


def run(script: Path, *arguments: str, ranks: int = 1) -> list[str]:
    """Returns the lines that a script prints, in as many processes as torchrun would start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
    variables = [environment(RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(ranks)]
    # Most optimizers and checkpoints import Dynamo.
    programs = [Program(SCRIPT, str(script), *arguments, env=env, compiler=True) for env in variables]
    lines: list[str] = []
    for done in run_together(programs):
        assert done.returncode == 0, f"{script.name} failed:\n{done.stdout}\n{done.stderr}"
        lines += done.stdout.splitlines()
    return lines


def losses(lines: list[str]) -> list[float]:
    return [float(match.group(1)) for line in lines if (match := re.search(r"loss (\d+\.\d+)$", line))]


@pytest.mark.parametrize("name", sorted({*LINES, *(path.name for path in EXAMPLES.glob("[0-9][0-9]_*.py"))}))
def test_example(name: str, tmp_path: Path) -> None:
    script = EXAMPLES / name
    ranks, arguments = (2, ("--steps", "5", "--strategy", "ddp")) if "distributed" in name else (1, ())
    lines = run(script, *arguments, ranks=ranks)
    pytest.LineMatcher(lines).fnmatch_lines(LINES[name])
    if name in ("03_compile.py", "04_distributed.py"):
        assert len(losses(lines)) >= 3
        assert losses(lines) == sorted(losses(lines), reverse=True), "it learns"
    if "distributed" in name:  # DDP and FSDP2 give the same results: both sum the same two gradients
        assert run(script, "--steps", "5", "--strategy", "fsdp2", ranks=2) == lines
    if "compile" in name:
        without = script.read_text(encoding="utf-8").replace("@torch.compile(", "@(lambda **_: lambda f: f)(")
        (tmp_path / name).write_text(without, encoding="utf-8")
        assert run(tmp_path / name) == lines
    if "tune" in name:
        tuned, full = (float(part.rpartition(" ")[2]) for part in lines[4].split(","))
        assert abs(tuned - full) < 2e-3
