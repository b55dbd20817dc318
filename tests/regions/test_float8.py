"""The float8 policies of `linear`: torchao's bits, what does not fit, and what runs around them."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.counting_mode import CountingMode
from helpers.gloo_ranks import in_ranks
from helpers.persistent_casts import held
from torch_promote.policy.op_table import FLOAT8_POLICIES, op_table
from torch_promote.policy.overrides import legal_policies
from torch_promote.regions import float8

BF16, FP16 = torch.bfloat16, torch.float16
#: By the policies, how torchao is asked for the same.
CONFIGS = {
    f"float8:{name}": Float8LinearConfig.from_recipe_name(name)
    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
}
GW_HP = "float8:rowwise_with_gw_hp"
each_policy = pytest.mark.parametrize("policy", CONFIGS)
#: Those that torchao has on a CPU: before PyTorch 2.13, there is no product with a scale for each row.
ON_CPU = [policy for policy in CONFIGS if torch.__version__ >= "2.13" or policy == "float8:tensorwise"]


def region(policy: str = "float8", dtype: torch.dtype = BF16, **options: Any) -> tp.my_autocast:
    return tp.my_autocast("cpu", dtype=dtype, overrides={"linear": policy}, **options)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 32, bias=False))


def trained(net: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Returns the result of a step, and the gradients."""
    net.zero_grad()
    result = run()
    result.float().pow(2).sum().backward()
    return [result.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


# --- torchao's bits


#: Factors for columns, so that each has another scale than all of them together.
SIZES = torch.logspace(3, -9, 64)


def inputs() -> Iterator[torch.Tensor]:
    """Inputs of 1 to 4 dimensions, contiguous and not, with numbers of rows that 16 does not divide.

    Then inputs with rows of zeros, and with values that are tiny, large, infinite and not numbers.
    """
    for shape in [(16, 32), (5, 32), (1, 32), (32,), (2, 8, 32), (3, 5, 48), (2, 3, 5, 64)]:
        yield torch.randn(shape)
        yield torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
        if len(shape) > 1:
            yield torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    yield torch.randn(5, 1, 32).expand(5, 3, 32)
    for value in (0.0, 1e-30, 1e-8, 3e4, float("inf"), float("nan")):
        x = torch.randn(5, 32) * SIZES[:32]
        x[1] = x[2, 3] = value
        yield x
    yield torch.zeros(5, 32)
    yield torch.randn(5, 32) * 2e-13 * torch.arange(5)[:, None]  # around the least amax


@pytest.mark.parametrize("policy", ON_CPU)
@pytest.mark.parametrize(
    ("dtype", "own", "as_on_a_gpu"),
    [*itertools.product((BF16, FP16), (torch.float32, None), (False,)), (BF16, None, True)],
    ids=str,
)
@pytest.mark.usefixtures("without_onednn")  # torch._scaled_mm, which torchao calls, differs between CPUs with it
def test_the_bits_are_those_of_torchao(
    policy: str, dtype: torch.dtype, own: torch.dtype | None, as_on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if as_on_a_gpu:  # ours calls torch._scaled_mm, too
        monkeypatch.setattr(float8, "is_in_float32", lambda device: False)
    torch.manual_seed(0)
    for x, bias in itertools.product(inputs(), (True, False)):
        ours = nn.Linear(x.shape[-1], 48, bias=bias)
        ours.weight.data *= SIZES[: x.shape[-1]]
        ours.to(own or dtype)
        theirs = Float8Linear.from_float(copy.deepcopy(ours).to(dtype), config=CONFIGS[policy])
        mine, other = x.to(own or dtype, copy=True), x.to(dtype, copy=True)
        if x.dim() > 2:
            other = other.contiguous()  # torchao's rowwise recipes reshape no others
        with region(policy, dtype):
            result = ours(mine.requires_grad_()).mul_(1)  # in place, as nn.ReLU(inplace=True)
        expected = theirs(other.requires_grad_())
        gradient = (torch.randn(expected.shape) * SIZES[:48]).to(dtype)
        result.backward(gradient)
        expected.backward(gradient)
        found = [result, mine.grad, *(p.grad for p in ours.parameters())]
        right = [expected, other.grad, *(p.grad for p in theirs.parameters())]
        assert [one.dtype for one in found] == [dtype, *[own or dtype] * (2 + bias)]
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True, check_dtype=False)


def distributed(rank: int, world_size: int, kind: str, policy: str) -> None:
    def steps(net: nn.Sequential, with_region: bool) -> list[torch.Tensor]:
        wrapped: Any = DistributedDataParallel(net) if kind == "ddp" else net
        for layer in [] if kind == "ddp" else [net[0], net[2], net[3], net]:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world_size,)))
        optimizer, results = torch.optim.SGD(net.parameters(), lr=0.1), []
        for _ in range(2):
            with region(policy, enabled=with_region):
                results.append(wrapped(x))
            results[-1].float().pow(2).mean().backward()
            optimizer.step()
        return results + [p.full_tensor() if kind == "fsdp" else p for p in net.parameters()]

    torch._C._set_mkldnn_enabled(False)  # as in the test of torchao's bits; the rank ends with the test
    torch.manual_seed(10 + rank)
    x = torch.randn(6, 32, dtype=BF16)
    theirs = model().to(BF16)
    convert_to_float8_training(theirs, config=CONFIGS[policy])
    assert_same(steps(model().to(BF16), True), steps(theirs, False))


@pytest.mark.parametrize(
    "cases",
    [
        [("ddp", ON_CPU[0]), ("fsdp", ON_CPU[-1])],
        pytest.param([*itertools.product(("ddp", "fsdp"), ON_CPU)], marks=pytest.mark.slow),
    ],
    ids=["two cases", "all"],
)
def test_ddp_and_fsdp2_have_torchaos_bits(cases: list[tuple[str, str]], tmp_path: Path) -> None:
    programs = {f"{kind}, {one}": functools.partial(distributed, kind=kind, policy=one) for kind, one in cases}
    assert in_ranks(programs, 2, tmp_path) == [dict.fromkeys(programs)] * 2


# --- the policy


def test_only_linear_has_the_policies() -> None:
    assert {row.name for row in op_table() if set(FLOAT8_POLICIES) & set(legal_policies(row))} == {"aten::linear"}


LEGAL = "Legal for linear: float8 (float8:rowwise), float8:tensorwise, float8:rowwise, float8:rowwise_with_gw_hp."
NO_PRODUCT = "PyTorch has no product on a CPU for"
ONLY_LINEAR = "only aten::linear has a product in float8"
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"linear": "float8:mx"}, f"{NO_PRODUCT} MX, with a scale for 32 elements. {LEGAL}"),
    ({"linear": "float8:blockwise"}, f"{NO_PRODUCT} blocks with a scale each, so that none could be tested. {LEGAL}"),
    ({"linear": "float8:row"}, f"'linear': no cast policy is called 'float8:row'. {LEGAL}"),
    ({"linear": "fp8"}, f"'linear': no cast policy is called 'fp8'. {LEGAL}"),
    ({"mm.default": "float8"}, f"aten::mm cannot use 'float8:rowwise': {ONLY_LINEAR}. Legal: "),
    ({"matmul": "float8"}, f"can use 'float8:rowwise': {ONLY_LINEAR} (aten::matmul). Legal "),
]


@pytest.mark.parametrize(("overrides", "text"), ERRORS, ids=str)
def test_errors(overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(tp.PolicyError) as error:
        tp.my_autocast("cpu", overrides=overrides)
    assert text in str(error.value)


def test_every_way_to_give_a_policy_gives_this_one(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    net, x, file = model(), torch.randn(5, 32), tmp_path / "policy.toml"
    policy = tp.Policy.stock().override({"linear": "float8"})
    tables = tp.Policy.stock().override_modules({"*": {"linear": "float8"}})
    for one in (tables, policy):
        one.save(file)
        assert '"aten::linear.default" = "float8:rowwise"' in file.read_text()
        assert tp.Policy.load(file) == one
    with region():
        expected = net(x).detach()

    def check(region: Any) -> None:
        with region, torch.no_grad():
            assert_same(net(x), expected)

    check(region("float8"))
    check(tp.my_autocast("cpu", policy=str(file)))
    check(tp.my_autocast("cpu", policy=tables, model=net))
    with tp.register_policy("linear", "float8"):
        check(tp.my_autocast("cpu"))
    with tp.install(policy=str(file)):
        check(torch.autocast("cpu"))
    with tp.set_module_policy(net, {"*": {"linear": "float8"}}):
        check(tp.my_autocast("cpu"))
    request.addfinalizer(lambda: tp.set_default_policy(None))
    tp.set_default_policy(str(file))
    check(tp.my_autocast("cpu"))


# --- what does not fit

NESTED = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(2, 32)])
NO_PRODUCT_OF_MATRICES = "the shapes are not those of a matrix product"
MISFITS = [
    ("in_features is 30, which 16 does not divide", [torch.randn(5, 30), torch.randn(32, 30)]),
    ("out_features is 24, which 16 does not divide", [torch.randn(5, 32), torch.randn(24, 32), torch.randn(24)]),
    ("an operand is empty", [torch.randn(0, 32), torch.randn(16, 32)]),
    ("autocast does not cast float64", [torch.randn(5, 32).double(), torch.randn(16, 32).double()]),
    ("autocast does not cast int64", [torch.ones(5, 32).long(), torch.randn(16, 32)]),
    ("an operand is nested or sparse", [NESTED, torch.randn(16, 32), torch.randn(16)]),
    (NO_PRODUCT_OF_MATRICES, [torch.randn(5, 32), torch.randn(16, 48)]),
    (NO_PRODUCT_OF_MATRICES, [torch.randn(5, 32), torch.randn(32)]),
    (NO_PRODUCT_OF_MATRICES, [torch.randn(5, 32), torch.randn(16, 32), torch.randn(3, 5, 16)]),
]


@pytest.mark.parametrize(("reason", "operands"), MISFITS)
def test_what_does_not_fit_runs_in_lower_precision_and_says_so(reason: str, operands: list[torch.Tensor]) -> None:
    def run(policy: str) -> list[Any]:
        """Returns the result and the gradients, or PyTorch's error."""
        parameters = [tensor.clone().requires_grad_() for tensor in operands[1:]]
        try:
            with region(policy):
                result = F.linear(operands[0], *parameters)
        except RuntimeError as error:
            return [str(error)]
        flat = result.values() if result.is_nested else result
        flat.float().sum().backward()
        return [flat.detach(), *(one.grad for one in parameters)]

    with tp.trace() as report:
        found = run("float8")
    assert_same(found, run("lower"))
    assert not report.calls.where(op="_scaled_mm")
    call = report.calls.where(op="linear")[-1]  # ends after those inside
    assert call.policy_name == "float8:rowwise"
    assert call.fallback == reason
    assert reason in dict(report.explain("linear").facts)["policies"]


def test_a_gpu_without_float8_runs_in_lower_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    lacks = float8.what_lacks.__wrapped__(torch.device("cuda", 0))
    assert lacks == "NVIDIA A100 has compute capability 8.0, and 8.9 is the first with float8"


# --- what runs around it


def whole_numbers(*shape: int) -> torch.Tensor:
    """Numbers of which float8 rounds half, with exact scales and sums: in any order, the bits are the same."""
    numbers = torch.randint(-28, 29, shape).float()
    numbers[0, 0] = 28
    return numbers


@pytest.mark.parametrize(
    ("policy", "rows"),
    [
        ("float8:rowwise", 5),
        *(
            pytest.param(policy, rows, marks=pytest.mark.slow)
            for policy, rows in [("float8:tensorwise", 5), (GW_HP, 5), (GW_HP, 1), ("float8", 1)]
        ),
    ],
)
@pytest.mark.usefixtures("fresh_dynamo", "inductor")
def test_compiled_code_multiplies_in_float8(policy: str, rows: int) -> None:
    linear, gradient = nn.Linear(32, 48, bias=False), whole_numbers(rows, 48).to(BF16)
    linear.weight.data, linear.x = whole_numbers(48, 32), nn.Parameter(whole_numbers(rows, 32))

    def run(policy: str = policy) -> torch.Tensor:
        with region(policy):
            return linear(linear.x)

    def trained(run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        linear.zero_grad()
        result = run()
        result.backward(gradient)
        # Inductor leaves out the rounding to bfloat16 before a cast to float32.
        return [tensor.to(BF16) for tensor in (result.detach(), linear.x.grad, linear.weight.grad)]

    found = trained(torch.compile(run, fullgraph=True))
    assert_same(found, trained(run))
    assert not any(map(torch.equal, found[:2], trained(functools.partial(run, "lower"))))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo", "inductor")
def test_a_compiled_recomputation_quantizes_the_operand_of_the_forward() -> None:
    """Inductor alone would round less often, and RMS norm's result would get other values in float8: 150859."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    x = torch.randn(16, 64)

    def run() -> torch.Tensor:
        with region("float8:rowwise"):
            return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)  # type: ignore[no-any-return]

    def trained(run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        block.zero_grad()
        run().float().square().mean().backward()
        return [one.grad for one in block.parameters() if one.grad is not None]

    for ours, wanted in zip(trained(torch.compile(run)), trained(run), strict=True):
        assert float((ours - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize(
    ("policy", "compiled"),
    [
        *((policy, False) for policy in CONFIGS),
        (GW_HP, True),
        *(pytest.param(policy, True, marks=pytest.mark.slow) for policy in CONFIGS if policy != GW_HP),
    ],
)
@pytest.mark.usefixtures("nothing_persists", "fresh_dynamo")
def test_no_product_on_a_cpu_needs_a_kernel_of_onednn(
    policy: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPUs with AMX, torch._scaled_mm raises this if oneDNN has no kernel."""

    def raises(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    net, x = model(), torch.randn(5, 32)
    run = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
    with region(policy, cache="persistent"):
        expected = trained(net, lambda: net(x))
        monkeypatch.setattr(torch, "_scaled_mm", raises)
        assert_same(trained(net, lambda: run(x)), expected)
        with torch.no_grad():
            assert_same(run(x), expected[0])
    monkeypatch.setattr(float8, "is_in_float32", lambda device: False)
    with pytest.raises(RuntimeError, match="primitive descriptor"), region(policy):
        net(x)


@pytest.mark.parametrize("policy", ON_CPU)
@pytest.mark.usefixtures("without_onednn")
def test_the_forward_alone_asks_a_gpu_to_add_up_faster(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, product = [], torch._scaled_mm

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        asked.append(options["use_fast_accum"])
        return product(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    monkeypatch.setattr(float8, "is_in_float32", lambda device: False)
    linear, x = nn.Linear(32, 32), torch.randn(16, 32, requires_grad=True)
    with region(policy):
        linear(x).sum().backward()
    assert asked == [True, *[False] * (1 if policy == GW_HP else 2)]


def test_crosscheck_finds_a_linear_that_does_not_run_in_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = SimpleNamespace(apply=lambda x, weight, *_: torch.mm(x, weight.t()))
    monkeypatch.setattr(float8, "_Float8Linear", lower)
    with tp.crosscheck() as checked, region():
        nn.Linear(32, 32)(torch.randn(16, 32))
    assert [one.kind for one in checked.mismatches] == ["casts"]


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_takes_other_numbers_of_rows() -> None:
    net = model()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    for x in (torch.randn(rows, 32) for rows in (5, 16, 7, 31)):
        with region():
            assert_same(*(trained(net, functools.partial(run, x)) for run in (compiled, net)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@each_policy
def test_checkpoints_and_blocks_without_gradients_have_the_same_bits(policy: str) -> None:
    net, x = model(), torch.randn(5, 32, requires_grad=True)
    with region(policy):
        expected = trained(net, lambda: net(x))
        for way in (True, False):
            recomputed = functools.partial(checkpoint, net, x, use_reentrant=way)
            assert_same(trained(net, recomputed), expected)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_same(net(x), expected[0])


def test_what_is_saved_for_the_backward_takes_the_bytes_of_lower_precision() -> None:
    net, x = model(), torch.randn(64, 32)

    def saved(policy: str) -> Counter[tuple[torch.dtype, int]]:
        found: list[torch.Tensor] = []
        with region(policy), torch.autograd.graph.saved_tensors_hooks(found.append, lambda _: None):
            net(x)
        return Counter((tensor.dtype, tensor.nbytes) for tensor in found)

    assert saved("lower")
    for policy in CONFIGS:
        assert not saved(policy) - saved("lower")


def test_gradients_come_in_batches_and_have_no_derivatives() -> None:
    linear, x = nn.Linear(32, 48), torch.randn(5, 32, requires_grad=True)
    why = (
        "under the policy 'float8:tensorwise': a product in float8 has only a backward. .* give linear another policy: "
    )
    with region("float8:tensorwise"):
        result = linear(x)
        gradients = torch.randn(3, 5, 48).to(BF16)
        one_by_one = [torch.autograd.grad(result, x, gradient, retain_graph=True)[0] for gradient in gradients]
        (batched,) = torch.autograd.grad(result, x, gradients, is_grads_batched=True, retain_graph=True)
        assert_same(batched, torch.stack(one_by_one))
        (first,) = torch.autograd.grad(result, x, gradients[0], create_graph=True)
        assert torch.equal(first, one_by_one[0])
        with pytest.raises(tp.PolicyError, match=f"linear has no second derivative {why}"):
            first.sum().backward()
        with pytest.raises(tp.PolicyError, match=f"linear has no forward-mode AD {why}"), forward_ad.dual_level():
            linear(forward_ad.make_dual(x, x))


def test_under_torch_func_linear_is_other_ops() -> None:
    """PyTorch takes linear apart above autocast, under its own policies as well."""
    linear, x = nn.Linear(32, 48), torch.randn(5, 32)
    results = []
    for policy in ("float8", "lower"):
        with region(policy):
            results.append(torch.vmap(torch.func.grad_and_value(lambda x: linear(x).float().pow(2).sum()))(x))
    assert_same(*results)


@pytest.mark.usefixtures("nothing_persists", "no_cast_checks")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_persistent_weight_takes_half_the_bytes_until_it_changes(mode: Callable[[], Any]) -> None:
    linear, x = nn.Linear(64, 128, bias=False), torch.randn(5, 64)

    def run(policy: str = "float8", dtype: torch.dtype = BF16, cache: str = "persistent") -> torch.Tensor:
        with region(policy, dtype, cache=cache), mode():
            return linear(x)

    def scales() -> int:
        """The number of operands for which a call computes scales."""
        with CountingMode() as mode:
            run()
        return mode.counts["aten::exp2"]

    cases = [("float8", BF16), ("float8:tensorwise", BF16), ("float8", FP16), ("float8:rowwise_with_gw_hp", BF16)]
    sizes = [128 * 64 + 4 * count for count in (128, 1, 128)]  # the last case has the weight of the first
    for number, case in enumerate(cases, 1):
        for _ in range(2):
            assert_same(run(*case), run(*case, cache="none"))
        assert held() == (min(number, 3), sum(sizes[:number]))
    assert scales() == 1  # the input's
    with torch.no_grad():
        linear.weight.mul_(2)
    assert [scales(), scales()] == [2, 1]
    assert_same(run(), run(cache="none"))
    tp.clear_cache()
    assert held() == (0, 0)
    with region(cache="persistent"):
        linear(x).sum().backward()
    assert held() == (1, 128 * 64 * 2)  # a backward needs the cast that lower_precision_fp keeps


def test_tools_know_the_policy() -> None:
    net, x = model(), torch.randn(5, 32)
    with tp.crosscheck() as checked, tp.find_nonfinite(net) as found, region():
        trained(net, lambda: net(x))
    assert not checked.mismatches
    assert not found.found
    with tp.trace(net) as report, region(cache="persistent"):
        net(x)
        with torch.no_grad():
            net[3](x)
            net[3](x)
    calls = report.calls.where(op="linear")
    assert dict(report.explain("linear").facts)["product"] == "aten::mm, of the operands in float32 (5)"
    assert [call.dtypes for call in calls[:2]] == [
        "float32 -> float8_e4m3fn -> bfloat16",
        "bfloat16, float32 -> float8_e4m3fn -> bfloat16",
    ]
    reused = [[(cast.argument, cast.bytes, cast.reused) for cast in call.casts] for call in calls[-2:]]
    assert reused == [[("input", 160, False), ("weight", 1024, not first)] for first in (True, False)]
    with tp.trace(values=True) as report, region("float8:tensorwise"), torch.no_grad():
        F.linear(torch.tensor([[448.0, 2.0**-9, 2.0**-12, 0.0] * 4]), torch.ones(16, 16))
    first = next(call for call in report.calls if call.dtypes.endswith("float8_e4m3fn"))
    assert [getattr(report.values_of(first)[0], share) for share in ("saturated", "underflows", "zeros")] == [
        0.25,
        0.25,
        0.5,
    ]
