"""Every numbered example runs and prints the expected output."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

from helpers.subprocesses import Program, environment, run_python, run_together

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 120
#: A line of a crosscheck's report.
COUNT = re.compile(r"(\D+?) +(\d+)(?: \(|$)")


#: Runs a script as the interpreter does.
SCRIPT = """
import os, runpy, sys
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def lines_of(script: Path, done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, f"{script.name} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def run(script: Path) -> list[str]:
    """Returns the lines that a script prints. Most optimizers and checkpoints import Dynamo."""
    return lines_of(script, run_python(SCRIPT, str(script), compiler=True))


def rewritten(name: str, old: str, new: str, folder: Path) -> Path:
    """A copy of an example in which something is replaced."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert old in text
    copy = folder / name
    copy.write_text(text.replace(old, new), encoding="utf-8")
    return copy


def losses(lines: list[str]) -> list[float]:
    return [float(match.group(1)) for line in lines if (match := re.search(r"loss (\d+\.\d+)$", line))]


def test_every_example_has_a_test_here() -> None:
    tested = set(re.findall(r'"(\d\d_\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert tested == {path.name for path in EXAMPLES.glob("[0-9][0-9]_*.py")}


def test_training_loop() -> None:
    lines = run(EXAMPLES / "01_training_loop.py")
    assert lines[-1] == "the same losses, bit for bit: True"
    assert len(lines) > 1


def test_overrides() -> None:
    lines = run(EXAMPLES / "02_overrides.py")
    dtypes = re.compile(r"(.+?) +linear torch\.(\w+) +softmax torch\.(\w+)")
    shown = {match.group(1): match.groups()[1:] for line in lines if (match := dtypes.match(line))}
    assert shown == {
        "the stock policy": ("bfloat16", "float32"),
        "linear kept in float32, softmax not": ("float32", "bfloat16"),
        "nested, softmax in float16": ("float32", "float16"),
        "after the nested region": ("float32", "bfloat16"),
        "a decorated function": ("float32", "float32"),
    }
    errors = [line for line in lines if line.startswith("PolicyError: ")]
    assert len(errors) == 2
    assert "Closest: softmax" in errors[0]
    assert "no optional dtype argument" in errors[1]


def test_compile(tmp_path: Path) -> None:
    """The same with and without the compiler."""
    name = "03_compile.py"
    lines = run(EXAMPLES / name)
    assert lines == run(rewritten(name, '@torch.compile(backend="aot_eager", fullgraph=True)\n', "", tmp_path))
    dtypes = [line.split()[-1].removeprefix("torch.") for line in lines[:4]]
    assert dtypes == ["float32", "bfloat16", "float16", "float32"]
    seen = losses(lines)
    assert len(seen) == 3
    assert seen == sorted(seen, reverse=True)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_in_two_processes(script: Path, *arguments: str) -> list[str]:
    """Runs a script as torchrun does."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "2"}
    ranks = [
        Program(SCRIPT, str(script), *arguments, env=environment(RANK=rank, LOCAL_RANK=rank, **job), compiler=True)
        for rank in "01"
    ]
    return [line for done in run_together(ranks) for line in lines_of(script, done)]


def test_distributed() -> None:
    """DDP and FSDP2 give the same results: both sum the same two gradients."""
    script = EXAMPLES / "04_distributed.py"
    data_parallel = run_in_two_processes(script, "--steps", "5", "--strategy", "ddp")
    sharded = run_in_two_processes(script, "--steps", "5", "--strategy", "fsdp2")
    seen = losses(data_parallel)
    assert len(seen) == 5
    assert seen == sorted(seen, reverse=True), "it learns"
    assert sharded == data_parallel


def test_crosscheck() -> None:
    lines = run(EXAMPLES / "05_crosscheck.py")
    counts = {match.group(1).rstrip(): int(match.group(2)) for line in lines if (match := COUNT.match(line))}
    assert counts["mismatches"] == counts["without a rule"] == 0
    assert "stock raised" not in counts
    # Compared are calls of CUDA's rows too, which have no policy on the CPU.
    assert counts["compared with stock"] >= counts["with a cast policy"] > 0
    assert counts["calls"] == counts["checked against the reference"] + counts["composite"] > 50
    (start,) = (index for index, line in enumerate(lines) if line.startswith("CrosscheckError: "))
    assert lines[start].startswith("CrosscheckError: aten.sinh.default(float32[32, 8]): dtype")
    assert lines[start + 3].endswith("in <module>: torch.sinh(x)")


def test_module_policies() -> None:
    lines = run(EXAMPLES / "06_module_policies.py")
    shown = {line[:22].strip(): line[22:].split() for line in lines if " lm_head " in line}
    plain = ["blocks.0.mlp.0", "bfloat16", "blocks.1.mlp.0", "bfloat16", "lm_head", "bfloat16"]
    chosen = ["blocks.0.mlp.0", "bfloat16", "blocks.1.mlp.0", "float16", "lm_head", "float32"]
    assert shown.pop("three policies") == shown.pop("a copy has them") == chosen
    assert shown == {"no policies": plain, "taken off again": plain}
    assert "4 of 15 modules have a policy." in lines
    assert lines[-1] == "PolicyError: no module of the model is named 'lm_haed'. Closest: lm_head."


def test_custom_op() -> None:
    lines = run(EXAMPLES / "07_custom_op.py")
    assert lines[0].endswith("blend requires inputs of one dtype, got torch.bfloat16 and torch.float32")
    dtypes = [line[20:].partition(",")[0].removeprefix("torch.") for line in lines[1:]]
    assert dtypes == ["float32", "bfloat16", "float64", "float16", "float32"]
    assert all(line.endswith("the weight's gradient torch.float32") for line in lines[1:4])


def test_promotion() -> None:
    lines = run(EXAMPLES / "08_promotion.py")
    assert lines[0].split() == ["torch", "float32", "float32", "float32", "float16"]
    assert lines[1].split() == ["jax", "float32", "float32", "float32", "float32"]
    assert lines[2].split() == ["numpy", "float32", "float64", "float64", "float32"]
    assert lines[3] == "gradient torch.bfloat16"
    assert lines[4].startswith("strict   aten::mul.Tensor: the promotion rule")
    assert lines[5].endswith("torch.float32")
    kinds = [line.rpartition(": ")[2] for line in lines if line.startswith("lint")]
    assert kinds == ["0-dim precision loss", "int to low-precision float", "int overflow by wrapping scalar"]
    assert lines[-1].endswith("torch.bfloat16")


def test_tune() -> None:
    lines = run(EXAMPLES / "09_tune.py")
    assert lines[0].startswith("aten::sum in the model: local inf, ")
    assert lines[3].startswith("overrides {'aten::sum': 'fp32'} after ")
    assert lines[3].endswith(" runs: minimum")
    shown = re.fullmatch(r"with the file: (\d\.\d{4}), in float32: (\d\.\d{4})", lines[4])
    assert shown is not None
    assert abs(float(shown[1]) - float(shown[2])) < 2e-3
