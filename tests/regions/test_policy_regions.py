"""Regions with a policy: the policy inside, nested, in other threads, and in the extension's tables."""

import copy
import pickle
import threading
from pathlib import Path

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


def test_one_object_of_both() -> None:
    region = tp.my_autocast("cpu", policy="cuda", overrides={"neg": "fp32"})
    for _ in range(2):
        with region:
            assert dtypes() == (BF16, FP32, FP32)
    assert repr(region) == "my_autocast('cpu', policy='cuda', overrides={'neg': 'fp32'})"


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


def test_equal_policies_are_one_in_the_extension() -> None:
    def number(**region: object) -> int:
        with tp.my_autocast("cpu", **region):  # type: ignore[arg-type]
            return _C.current_policy_id()

    assert number(policy="stock") == number()
    assert number(policy="cuda") == number(policy=tp.Policy.named("cuda"))
    assert number(overrides={"neg": "fp32"}) == number(policy=tp.Policy.stock().override({"neg": "fp32"}))
    assert number(overrides={"neg": "fp32"}) != number(overrides={"abs": "fp32"})
    on_cpu = tp.Policy.stock().override({"neg": "fp32"}, device_type="cpu")
    assert number(policy=on_cpu) != number(overrides={"neg": "fp32"})


def test_what_is_in_force_can_be_read_by_name() -> None:
    with tp.my_autocast("cpu", policy=tp.Policy.stock().override({"neg.default": "fp32"}, device_type="cpu")):
        fp32, unlisted = _C.POLICY_BYTES["fp32"], _C.POLICY_BYTES["unlisted"]
        assert _C.current_policy() == {"aten::neg": [fp32, unlisted]}
    assert _C.current_policy() == {}


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


def test_another_librarys_kernel_on_our_key_is_not_replaced() -> None:
    library = torch.library.Library("torch_promote_test_taken", "DEF")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: x + 1, "CompositeExplicitAutograd")
    theirs = torch.library.Library("torch_promote_test_taken", "IMPL")
    theirs.impl("op", lambda x: x, "AutocastPrivateUse1")
    with pytest.raises(tp.PolicyError, match="already has a kernel from another library on the dispatch key"):
        tp.my_autocast("cpu", overrides={"torch_promote_test_taken::op": "fp32"})
    theirs._destroy()
    library._destroy()


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


def test_an_optional_list_may_be_all_that_has_tensors() -> None:
    library = torch.library.Library("torch_promote_test_lists", "DEF")
    library.define("op(Tensor[]? x) -> int")
    library.impl("op", lambda x: x[0].element_size(), "CompositeExplicitAutograd")
    with tp.my_autocast("cpu", overrides={"torch_promote_test_lists::op": "float64"}):
        assert torch.ops.torch_promote_test_lists.op([torch.ones(2)]) == 8
        with pytest.raises(TypeError):
            torch.ops.torch_promote_test_lists.op(None)
    library._destroy()


def test_a_file_in_a_compiled_function(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.toml")
    tp.Policy.stock().override({"neg.default": "float64"}).save(path)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu", policy=path):
            return torch.neg(x)

    assert compiled(torch.ones(2, dtype=HALF)).dtype is FP64


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    tp.Policy.stock().override({"neg.default": "float64"}).save(path)
    region = tp.my_autocast("cpu", policy=path)
    path.unlink()
    for copied in (region, copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        with copied:
            assert dtypes() == (BF16, HALF, FP64)
