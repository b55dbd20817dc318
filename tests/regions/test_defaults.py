"""Settings of a whole program: default policies and registered ops."""

import asyncio
import contextlib
import subprocess
import threading
from pathlib import Path

import pytest
import torch

import torch_promote as tp
from helpers.subprocesses import environment, run_python

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def exp_dtype() -> torch.dtype:
    """float32 under CUDA's list, float16 under the CPU's."""
    return torch.exp(torch.ones(2, dtype=HALF)).dtype


# --- the default policy


def test_regions_start_from_the_default() -> None:
    assert tp.set_default_policy("cuda") is None
    with tp.my_autocast("cpu"):
        assert exp_dtype() is FP32
        with tp.my_autocast("cpu"):
            assert exp_dtype() is FP32
        with tp.my_autocast("cpu", policy="stock"):
            assert exp_dtype() is HALF
        with tp.stock_autocast("cpu"):
            assert exp_dtype() is FP32
        assert exp_dtype() is FP32
    assert exp_dtype() is HALF
    assert tp.set_default_policy(None) == tp.Policy.named("cuda")
    with tp.my_autocast("cpu"):
        assert exp_dtype() is HALF


def test_overrides_come_on_top_of_the_default() -> None:
    tp.set_default_policy("cuda")
    with tp.my_autocast("cpu", overrides={"exp": "float64"}):
        assert exp_dtype() is FP64
        with tp.my_autocast("cpu", overrides={"log": "float64"}):
            assert exp_dtype() is FP64
    with tp.my_autocast("cpu"):
        assert exp_dtype() is FP32


def test_open_regions_keep_theirs() -> None:
    with tp.my_autocast("cpu"):
        tp.set_default_policy("cuda")
        assert exp_dtype() is HALF
        with tp.my_autocast("cpu"):
            assert exp_dtype() is HALF
    with tp.my_autocast("cpu"):
        assert exp_dtype() is FP32
        tp.set_default_policy(None)
        assert exp_dtype() is FP32
    with tp.my_autocast("cpu"):
        assert exp_dtype() is HALF


def test_every_thread_has_it() -> None:
    tp.set_default_policy("cuda")
    seen: list[torch.dtype] = []

    def run() -> None:
        with tp.my_autocast("cpu"):
            seen.append(exp_dtype())

    thread = threading.Thread(target=run)
    with tp.my_autocast("cpu", policy="stock"):
        thread.start()
        thread.join()
    assert seen == [FP32]


@pytest.mark.parametrize("outer", [{}, {"policy": "cuda"}, {"overrides": {"log": "fp32"}}])
def test_nothing_is_left_in_pytorch_s_state(outer: dict[str, object]) -> None:
    def state() -> object:
        devices = torch._C._autocast_supported_devices()
        return [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]

    before = state()
    tp.set_default_policy("fp32_safe")
    with contextlib.suppress(KeyError), tp.my_autocast("cpu", **outer):  # type: ignore[arg-type]
        inside = state()
        with tp.my_autocast("cpu"):
            assert state() == inside
        raise KeyError
    assert state() == before


def test_steps_of_coroutines() -> None:
    @tp.my_autocast("cpu")
    async def work(results: list[torch.dtype]) -> None:
        results.append(exp_dtype())
        await asyncio.sleep(0)
        results.append(exp_dtype())

    async def main() -> list[torch.dtype]:
        results: list[torch.dtype] = []
        await asyncio.gather(work(results), work(results))
        assert exp_dtype() is HALF
        return results

    tp.set_default_policy("cuda")
    assert asyncio.run(main()) == [FP32] * 4


def test_compiled_functions_see_a_change() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def inside(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu"):
            return torch.exp(x)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def around(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    x = torch.ones(2, dtype=HALF)
    for policy, dtype in ((None, HALF), ("cuda", FP32), (None, HALF), ("cuda", FP32)):
        tp.set_default_policy(policy)
        assert inside(x).dtype is dtype
        with tp.my_autocast("cpu"):
            assert around(x).dtype is dtype


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cudda", "no policy is called 'cudda'. Closest: cuda."),
        ("nowhere/policy.toml", "nowhere/policy.toml"),
        ({"mm": "fp32"}, "a policy is a Policy, a name or the path of a policy file, got"),
        (3, "got 3 of type int"),
    ],
)
def test_a_wrong_default_changes_nothing(value: object, message: str) -> None:
    tp.set_default_policy("cuda")
    with pytest.raises(tp.PolicyError) as caught:
        tp.set_default_policy(value)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert tp.default_policy() == tp.Policy.named("cuda")


# --- the environment


def imported(policy: str, code: str = "") -> subprocess.CompletedProcess[str]:
    return run_python(f"import torch, torch_promote as tp\n{code}", env=environment(TORCH_PROMOTE_POLICY=policy))


def test_the_environment_names_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    tp.Policy.stock().override({"exp": "float64"}).save(path)
    code = "with tp.my_autocast('cpu'): print(torch.exp(torch.ones(2, dtype=torch.float16)).dtype)"
    for policy, dtype in (("cuda", "torch.float32"), (str(path), "torch.float64"), ("", "torch.float16")):
        result = imported(policy, code)
        assert (result.returncode, result.stdout.strip()) == (0, dtype), result.stderr


def test_a_wrong_environment_is_an_error_at_the_import(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('format = 1\n\n[cpu]\nsofmax = "fp32"\n')
    for policy, messages in {
        "cudda": ["TORCH_PROMOTE_POLICY is 'cudda'", "Closest: cuda"],
        str(path): [f"TORCH_PROMOTE_POLICY is {str(path)!r}", f'{path}: [cpu] "sofmax":', "softmax"],
    }.items():
        result = imported(policy)
        assert result.returncode == 1
        for message in messages:
            assert message in result.stderr.splitlines()[-1] or message in result.stderr
        assert "Correct it, or unset it." in result.stderr.splitlines()[-1]
        assert result.stderr.count("Traceback") == 1
