"""Regions with a policy: the policy inside, nested, in other threads, and in the extension's tables."""

import threading

import pytest
import torch

import torch_promote as tp
from torch_promote import _C
from torch_promote.extension import RegionSpec
from torch_promote.regions.base import Region

HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def dtypes() -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """What mm, exp (a row of CUDA alone) and neg (no row) give for float16 under the CPU's autocast of bfloat16."""
    x = torch.ones(2, 2, dtype=HALF)
    return torch.mm(x, x).dtype, torch.exp(x).dtype, torch.neg(x).dtype


STOCK = (BF16, HALF, HALF)


def test_a_policy_takes_the_place_of_the_one_around() -> None:
    with tp.my_autocast("cpu", overrides={"mm": "float64", "neg": "float64"}):
        assert dtypes() == (FP64, HALF, FP64)
        with tp.my_autocast("cpu", policy="cuda"):
            assert dtypes() == (BF16, FP32, HALF)
            with tp.my_autocast("cpu", overrides={"neg": "fp32"}):
                assert dtypes() == (BF16, FP32, FP32)
                with tp.my_autocast("cpu", policy="stock"):
                    assert dtypes() == STOCK
                    assert _C.policy_is_stock()
                assert dtypes() == (BF16, FP32, FP32)
            assert dtypes() == (BF16, FP32, HALF)
        assert dtypes() == (FP64, HALF, FP64)
    with tp.my_autocast("cpu"):
        assert dtypes() == STOCK


def test_a_region_without_a_policy_inherits() -> None:
    with tp.my_autocast("cpu", policy=tp.Policy.stock().override({"neg": "float64"})), tp.my_autocast("cpu", HALF):
        assert dtypes() == (HALF, HALF, FP64)
        with torch.autocast("cpu", BF16):
            assert dtypes() == (BF16, HALF, FP64)
        with tp.my_autocast("cpu", enabled=False):
            assert dtypes() == (HALF, HALF, HALF)
            with torch.autocast("cpu", BF16):
                assert dtypes() == (BF16, HALF, FP64)


def test_overrides_come_on_top_of_the_policy() -> None:
    with tp.my_autocast("cpu", policy="cuda", overrides={"exp": "float64"}):
        assert dtypes() == (BF16, FP64, HALF)


def test_threads_have_their_own() -> None:
    seen: dict[str, tuple[torch.dtype, ...]] = {}
    barrier = threading.Barrier(3)

    def run(name: str) -> None:
        with tp.my_autocast("cpu", policy=name):
            barrier.wait()
            seen[name] = dtypes()
            barrier.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("cuda", "stock", "off")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"cuda": (BF16, FP32, HALF), "stock": STOCK, "off": (HALF, HALF, HALF)}


def test_a_compiled_function_under_each_policy_of_another_op() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.neg(x)

    x = torch.ones(2, dtype=HALF, requires_grad=True)
    expected = {None: HALF, "fp32": FP32, "float64": FP64, "fp16": BF16, "keep": HALF, "fallthrough": HALF}
    for _ in range(2):
        for policy, dtype in expected.items():
            with tp.my_autocast("cpu", overrides=None if policy is None else {"neg": policy}):
                result = compiled(x)
            assert result.dtype is dtype
            result.sum().backward()
            assert x.grad is not None
            assert x.grad.dtype is HALF
        with torch.autocast("cpu"):
            assert compiled(x).dtype is HALF


def test_a_region_inside_a_compiled_function() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu", policy="cuda", overrides={"neg": "float64"}):
            return torch.neg(torch.exp(x))

    assert compiled(torch.ones(2, dtype=HALF)).dtype is FP64


@pytest.mark.parametrize("wrong", ["cdua", 3, ["cuda"], {"mm": "fp32"}, "no/such/file.toml"])
def test_a_wrong_policy_opens_nothing(wrong: object) -> None:
    with pytest.raises(tp.PolicyError):
        tp.my_autocast("cpu", policy=wrong)  # type: ignore[arg-type]
    assert _C.depth() == 0


def test_an_op_that_is_defined_anew_keeps_its_kernel() -> None:
    def define() -> torch.library.Library:
        library = torch.library.Library("torch_promote_test_again", "DEF")
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", lambda x: x.clone(), "CompositeExplicitAutograd")
        return library

    x = torch.ones(2)
    for _ in range(2):
        library = define()
        with tp.my_autocast("cpu", overrides={"torch_promote_test_again::op": "float64"}):
            assert torch.ops.torch_promote_test_again.op(x).dtype is FP64
        library._destroy()


def test_more_policies_than_fingerprints_tell_apart() -> None:
    """Some of them have the same 25-bit hash; the second one then gets another."""
    rows = range(len(_C.OP_ENTRY_NAMES))
    changes = (
        [(row, 0, 5), (other, 0, 5), (third, 1, 8)] for row in rows for other in rows[::7] for third in rows[::20]
    )
    seen: dict[tuple[torch.dtype, ...], str] = {}
    held: list[_C.HeldChange] = []
    slots = ("privateuseone", "ipu", "maia", "hpu", "mtia")
    for _, change in zip(range(30000), changes, strict=False):
        held.append(_C.register_change(change, False))
        with Region(RegionSpec(policy_change=held[-1].number).pack()):
            digits = tuple(torch.get_autocast_dtype(slot) for slot in slots)
            policy = str(_C.current_policy())
        assert seen.setdefault(digits, policy) == policy
