"""The float8 policies of `linear`: torchao's bits, what does not fit, and what runs around them."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

import torch_promote as tp
from helpers.gloo_ranks import in_ranks
from torch_promote.policy.legality import legal_policies
from torch_promote.policy.op_table import FLOAT8_POLICIES, op_table
from torch_promote.regions import float8
from torch_promote.regions.installation import installed_as

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def region(recipe: str = "rowwise", dtype: torch.dtype = BF16, **options: Any) -> tp.my_autocast:
    return tp.my_autocast("cpu", dtype=dtype, overrides={"linear": f"float8:{recipe}"}, **options)


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Linear(32, 32, bias=False))


def trained(net: nn.Module, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Returns the result of a step, and the gradients."""
    net.zero_grad()
    result = run()
    result.float().pow(2).sum().backward()
    return [result.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


class Products(TorchDispatchMode):
    """Counts the products of matrices that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[op._schema.name.removeprefix("aten::")] += 1
        return op(*args, **(kwargs or {}))

    def __getitem__(self, op: str) -> int:
        return self.counts[op]


# --- torchao's bits


def torchao(linear: nn.Linear, recipe: str, dtype: torch.dtype) -> nn.Linear:
    config = Float8LinearConfig.from_recipe_name(recipe)
    return Float8Linear.from_float(copy.deepcopy(linear).to(dtype), config=config)  # type: ignore[no-any-return]


SHAPES = [(16, 32), (5, 32), (1, 32), (32,), (2, 8, 32), (3, 5, 48), (2, 3, 5, 64)]


def inputs() -> Iterator[torch.Tensor]:
    """Inputs of 1 to 4 dimensions, contiguous and not, with numbers of rows that 16 does not divide."""
    for shape in SHAPES:
        yield torch.randn(shape)
        if len(shape) > 1:
            yield torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
            yield torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    yield torch.randn(5, 1, 32).expand(5, 3, 32)


def odd_values() -> Iterator[torch.Tensor]:
    """Inputs with rows of zeros, and with values that are tiny, large, infinite and not numbers."""
    for value in (0.0, 1e-30, 1e-8, 3e4, float("inf"), float("nan")):
        x = torch.randn(5, 32)
        x[1] = value
        x[2, 3] = value
        yield x
    yield torch.zeros(5, 32)
    yield torch.full((5, 32), 2.0**-20) * torch.arange(5)[:, None]


@each_recipe
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("own", [FP32, None], ids=["float32", "lower"])
@pytest.mark.parametrize("make", [inputs, odd_values])
def test_the_bits_are_those_of_torchao(
    recipe: str, dtype: torch.dtype, own: torch.dtype | None, make: Callable[[], Iterator[torch.Tensor]]
) -> None:
    torch.manual_seed(0)
    for x in make():
        for bias in (True, False):
            ours = nn.Linear(x.shape[-1], 48, bias=bias).to(own or dtype)
            theirs = torchao(ours, recipe, dtype)
            mine = x.detach().to(own or dtype, copy=True).requires_grad_()
            other = x.detach().to(dtype, copy=True)
            if x.dim() > 2:
                other = other.contiguous()  # torchao's rowwise recipes reshape no others
            other.requires_grad_()
            with region(recipe, dtype):
                result = ours(mine)
            expected = theirs(other)
            gradient = torch.randn_like(expected)
            result.backward(gradient)
            expected.backward(gradient)
            found = [result, mine.grad, *(p.grad for p in ours.parameters())]
            right = [expected, other.grad, *(p.grad for p in theirs.parameters())]
            assert [one.dtype for one in found] == [dtype, *[own or dtype] * (2 + bias)]
            for one, another in zip(found, right, strict=True):
                torch.testing.assert_close(one, another.to(one.dtype), rtol=0, atol=0, equal_nan=True)


def distributed(rank: int, world_size: int, kind: str, recipe: str) -> bool:
    def steps(net: nn.Sequential, with_region: bool) -> list[torch.Tensor]:
        wrapped: Any = net
        if kind == "fsdp":
            mesh = init_device_mesh("cpu", (world_size,))
            for layer in net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(net, mesh=mesh)
        else:
            wrapped = DistributedDataParallel(net)
        optimizer, results = torch.optim.SGD(net.parameters(), lr=0.1), []
        for _ in range(2):
            with tp.my_autocast("cpu", enabled=with_region, overrides={"linear": f"float8:{recipe}"}):
                result = wrapped(x)
            result.float().pow(2).mean().backward()
            optimizer.step()
            results.append(result.detach())
        return results + [p.full_tensor() if kind == "fsdp" else p.detach() for p in net.parameters()]

    torch.manual_seed(10 + rank)
    x = torch.randn(6, 32, dtype=BF16)
    theirs = model().to(BF16)
    convert_to_float8_training(theirs, config=Float8LinearConfig.from_recipe_name(recipe))
    return equal(steps(model().to(BF16), True), steps(theirs, False))


def test_ddp_and_fsdp2_have_torchaos_bits(tmp_path: Path) -> None:
    cases = {
        f"{kind}, {recipe}": functools.partial(distributed, kind=kind, recipe=recipe)
        for kind in ("ddp", "fsdp")
        for recipe in RECIPES
    }
    assert in_ranks(cases, 2, tmp_path) == [dict.fromkeys(cases, True)] * 2


# --- the policy


def test_only_linear_has_the_policies() -> None:
    legal = {row.name for row in op_table() if set(FLOAT8_POLICIES) & set(legal_policies(row))}
    assert legal == {"aten::linear"}
    assert set(FLOAT8_POLICIES) <= set(legal_policies("aten::linear"))


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
    ({"linear": torch.float8_e4m3fn}, "for linear also float8, which computes scales."),
]


@pytest.mark.parametrize(("overrides", "text"), ERRORS, ids=str)
def test_errors(overrides: dict[str, Any], text: str) -> None:
    with pytest.raises(tp.PolicyError) as error:
        tp.my_autocast("cpu", overrides=overrides)
    assert text in str(error.value)


def in_a_file(folder: Path) -> str:
    POLICY.save(folder / "policy.toml")
    return str(folder / "policy.toml")


POLICY = tp.Policy.stock().override({"linear": "float8"})
TABLES = tp.Policy.stock().override_modules({"*": {"linear": "float8"}})


@contextlib.contextmanager
def by_default(path: str) -> Iterator[None]:
    tp.set_default_policy(path)
    try:
        with tp.my_autocast("cpu"):
            yield
    finally:
        tp.set_default_policy(None)


@contextlib.contextmanager
def inside(outer: Any, inner: Callable[[], Any]) -> Iterator[None]:
    with outer, inner():
        yield


def with_module_policies(net: nn.Module) -> tp.my_autocast:
    tp.set_module_policy(net, {"*": {"linear": "float8"}})
    return tp.my_autocast("cpu")


ENTRANCES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "overrides": lambda net, folder: tp.my_autocast("cpu", overrides={"linear": "float8"}),
    "policy": lambda net, folder: tp.my_autocast("cpu", policy=POLICY),
    "file": lambda net, folder: tp.my_autocast("cpu", policy=in_a_file(folder)),
    "tables": lambda net, folder: tp.my_autocast("cpu", policy=TABLES, model=net),
    "modules": lambda net, folder: with_module_policies(net),
    "register": lambda net, folder: inside(tp.register_policy("linear", "float8"), lambda: tp.my_autocast("cpu")),
    "default": lambda net, folder: by_default(in_a_file(folder)),
    "install": lambda net, folder: inside(installed_as(policy=in_a_file(folder)), lambda: torch.autocast("cpu")),
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_every_way_to_give_a_policy_gives_this_one(entrance: str, tmp_path: Path) -> None:
    net, x = model(), torch.randn(5, 32)
    with region(), torch.no_grad():
        expected = net(x)
    with ENTRANCES[entrance](net, tmp_path), torch.no_grad():
        assert torch.equal(net(x), expected)


@pytest.mark.parametrize("policy", [POLICY, TABLES], ids=["ops", "modules"])
def test_a_file_keeps_the_policy(policy: tp.Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "policy.toml")
    assert '"aten::linear.default" = "float8:rowwise"' in tmp_path.joinpath("policy.toml").read_text()
    assert tp.Policy.load(tmp_path / "policy.toml") == policy


# --- what does not fit

MISFITS = {
    "in_features": (torch.randn(5, 30), nn.Linear(30, 32), "in_features is 30, which 16 does not divide"),
    "out_features": (torch.randn(5, 32), nn.Linear(32, 24), "out_features is 24, which 16 does not divide"),
    "empty": (torch.randn(0, 32), nn.Linear(32, 16), "an operand is empty"),
    "double": (torch.randn(5, 32).double(), nn.Linear(32, 16).double(), "autocast does not cast float64"),
    "nested": (
        torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(2, 32)]),
        nn.Linear(32, 16),
        "an operand is nested or sparse",
    ),
}


@pytest.mark.parametrize(("x", "linear", "reason"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_runs_in_lower_precision_and_says_so(x: torch.Tensor, linear: nn.Linear, reason: str) -> None:
    def run(policy: str) -> list[torch.Tensor]:
        with tp.my_autocast("cpu", overrides={"linear": policy}):
            result = linear(x)
        linear.zero_grad()
        flat = result.values() if result.is_nested else result
        flat.float().sum().backward()
        return [flat.detach(), *(p.grad for p in linear.parameters() if p.grad is not None)]

    with tp.trace(linear) as report, Products() as products:
        found = run("float8")
    assert equal(found, run("lower"))
    assert products["_scaled_mm"] == 0
    (call,) = (call for call in report.calls if call.op == "aten::linear")
    assert call.policy_name == "float8:rowwise"
    assert call.said_by.endswith(f"; ran as lower_precision_fp: {reason}")
    assert reason in dict(report.explain("linear").facts)["policies"]


def test_a_gpu_without_float8_runs_in_lower_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    float8._what_lacks.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    try:
        assert float8._what_lacks(torch.device("cuda", 0)) == (
            "NVIDIA A100 has compute capability 8.0, and 8.9 is the first with float8"
        )
    finally:
        float8._what_lacks.cache_clear()


@pytest.mark.parametrize("shapes", [((5, 32), (16, 48)), ((5, 32), (32,)), ((5, 32), (16, 32), (3, 5, 16))], ids=str)
def test_shapes_that_do_not_match_raise_pytorchs_error(shapes: Any) -> None:
    operands = list(map(torch.randn, shapes))
    errors = []
    for policy in ("float8", "lower"):
        try:
            with tp.my_autocast("cpu", overrides={"linear": policy}):
                errors.append(F.linear(*operands).shape)
        except RuntimeError as error:
            errors.append(str(error))
    assert errors[0] == errors[1]


# --- what runs around it


@each_recipe
@pytest.mark.parametrize("backend", ["noted", "inductor"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_has_the_scaled_products_and_the_bits(recipe: str, backend: str) -> None:
    net, x = model(), torch.randn(5, 32)
    with region(recipe):
        expected = trained(net, lambda: net(x))

    def inside(x: torch.Tensor) -> torch.Tensor:
        with region(recipe):
            return net(x)

    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, example: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    if backend == "noted":
        compiled = torch.compile(inside, backend=aot_autograd(fw_compiler=note, bw_compiler=note), fullgraph=True)
        assert equal(trained(net, lambda: compiled(x)), expected)
        products = Counter(node.target for graph in graphs for node in graph.graph.nodes)
        assert products[torch.ops.aten._scaled_mm.default] == (5 if recipe == "rowwise_with_gw_hp" else 8)
        assert len(graphs) == 2
        return
    linear = nn.Sequential(net[0])  # inductor computes gelu in another way
    with torch._inductor.config.patch(emulate_precision_casts=True), region(recipe):
        expected = trained(linear, lambda: linear(x))
        found, code = run_and_get_code(lambda: trained(linear, lambda: torch.compile(linear, fullgraph=True)(x)))
    assert equal(found, expected)
    assert sum(text.count("_scaled_mm") > 0 for text in code) == (1 if recipe == "rowwise_with_gw_hp" else 2)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_takes_other_numbers_of_rows() -> None:
    linear = nn.Linear(32, 48)
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (5, 16, 7, 31):
        x = torch.randn(rows, 32)
        with region():
            assert equal(trained(linear, lambda x=x: compiled(x)), trained(linear, lambda x=x: linear(x)))  # type: ignore[misc]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@each_recipe
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_recomputes_the_same(recipe: str, use_reentrant: bool) -> None:
    net, x = model(), torch.randn(5, 32, requires_grad=True)

    def run(function: Callable[..., torch.Tensor]) -> torch.Tensor:
        with region(recipe):
            return function(x)

    expected = trained(net, lambda: run(net))
    assert equal(trained(net, lambda: run(functools.partial(checkpoint, net, use_reentrant=use_reentrant))), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_result_is_the_same(mode: Callable[[], Any]) -> None:
    net, x = model(), torch.randn(5, 32)
    with region():
        expected = net(x)
        with mode():
            result = net(x)
    assert torch.equal(result, expected)
    assert not result.requires_grad


def test_what_is_saved_for_the_backward_takes_the_bytes_of_lower_precision() -> None:
    net, x = model(), torch.randn(64, 32)

    def saved(policy: str) -> Counter[tuple[torch.dtype, int]]:
        found: Counter[tuple[torch.dtype, int]] = Counter()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found[tensor.dtype, tensor.nbytes] += 1
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            tp.my_autocast("cpu", overrides={"linear": policy}),
        ):
            net(x)
        return found

    lower = saved("lower")
    assert lower
    for recipe in RECIPES:
        assert not saved(f"float8:{recipe}") - lower


def test_a_batch_of_gradients_is_a_gradient_at_a_time() -> None:
    linear, x = nn.Linear(32, 48), torch.randn(5, 32, requires_grad=True)
    with region():
        result = linear(x)
    gradients = torch.randn(3, 5, 48).to(BF16)
    (batched,) = torch.autograd.grad(result, x, gradients, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(result, x, gradient, retain_graph=True)[0] for gradient in gradients]
    assert torch.equal(batched, torch.stack(one_by_one))


def test_a_second_derivative_and_forward_mode_raise() -> None:
    linear, x = nn.Linear(32, 48), torch.randn(5, 32, requires_grad=True)
    ending = (
        "under the policy 'float8:tensorwise': a product in float8 has only a backward. Where you need it, give linear "
        "another policy: overrides={'linear': 'lower'}."
    )
    with region("tensorwise"):
        result = linear(x).float().pow(2).sum()
        (plain,) = torch.autograd.grad(result, x, retain_graph=True)
        (first,) = torch.autograd.grad(result, x, create_graph=True)
        assert torch.equal(first, plain)
        with pytest.raises(tp.PolicyError, match="linear has no second derivative") as error:
            first.sum().backward()
        assert str(error.value).endswith(ending)
        with torch.autograd.forward_ad.dual_level(), pytest.raises(tp.PolicyError, match="no forward-mode AD") as error:
            linear(torch.autograd.forward_ad.make_dual(x, x))
        assert str(error.value).endswith(ending)


def test_under_torch_func_linear_is_other_ops() -> None:
    """PyTorch takes linear apart above autocast, under its own policies as well."""
    linear, x = nn.Linear(32, 48), torch.randn(5, 32)
    with region(), Products() as products:
        result = torch.vmap(linear)(x)
        per_sample = torch.vmap(torch.func.grad(lambda x: linear(x).float().pow(2).sum()))(x)
    with torch.autocast("cpu"):
        assert torch.equal(result, torch.vmap(linear)(x))
    assert per_sample.shape == x.shape
    assert products["_scaled_mm"] == 0


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.usefixtures("fresh_dynamo")
def test_export_refuses(strict: bool) -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with region():
                return super().forward(x)

    with pytest.raises(Exception, match=r"a region with overrides .* cannot be exported"):
        torch.export.export(Net(32, 48), (torch.randn(5, 32),), strict=strict)


@pytest.mark.usefixtures("nothing_persists", "no_cast_checks")
def test_a_persistent_weight_takes_half_the_bytes_until_it_changes() -> None:
    linear, x = nn.Linear(64, 128, bias=False), torch.randn(5, 64)

    def run(recipe: str = "rowwise", dtype: torch.dtype = BF16, **options: Any) -> torch.Tensor:
        with region(recipe, dtype, **options), torch.no_grad():
            return linear(x)

    def kept() -> tuple[int, int]:
        info = tp.cache_info()
        return info["persistent_entries"], info["persistent_bytes"]

    cases = [("rowwise", BF16), ("tensorwise", BF16), ("rowwise", FP16), ("rowwise_with_gw_hp", BF16)]
    sizes = [128 * 64 + scales * 4 for scales in (128, 1, 128)]
    for number, case in enumerate(cases):
        for _ in range(2):
            assert torch.equal(run(*case, cache="persistent"), run(*case))
        assert kept() == (min(number + 1, 3), sum(sizes[: number + 1]))
    with Products() as first, torch.no_grad():
        before = run(cache="persistent")
        linear.weight.mul_(2)
    with Products() as second:
        after = run(cache="persistent")
    with Products() as third:
        run(cache="persistent")
    assert first["exp2"] == third["exp2"] == 1  # the input's scale
    assert second["exp2"] == 2
    assert torch.equal(after, run())
    assert not torch.equal(after, before)
    tp.clear_cache()
    assert kept() == (0, 0)
    with region(cache="persistent"):
        linear(x).sum().backward()
    assert kept() == (1, 128 * 64 * 2)  # a backward needs the cast that lower_precision_fp keeps


def test_tools_know_the_policy() -> None:
    net, x = model(), torch.randn(5, 32)

    def step() -> torch.Tensor:
        with region():
            return net(x)

    with tp.crosscheck() as checked:
        trained(net, step)
    assert not checked.mismatches
    with tp.trace(net) as report:
        trained(net, step)
        with tp.my_autocast("cpu", cache="persistent", overrides={"linear": "float8"}), torch.no_grad():
            net[3](x)
            net[3](x)
    calls = [call for call in report.calls if call.op == "aten::linear"]
    assert [call.dtypes for call in calls[:2]] == [
        "float32 -> float8_e4m3fn -> bfloat16",
        "bfloat16, float32 -> float8_e4m3fn -> bfloat16",
    ]
    reused = [[(cast.argument, cast.bytes, cast.reused) for cast in call.casts] for call in calls[-2:]]
    assert reused == [[("input", 160, False), ("weight", 1024, not first)] for first in (True, False)]
    with tp.trace(values=True) as report, region("tensorwise"), torch.no_grad():
        F.linear(torch.tensor([[448.0, 2.0**-9, 2.0**-12, 0.0] * 4]), torch.ones(16, 16))
    first = next(call for call in report.calls if call.dtypes.endswith("float8_e4m3fn"))
    assert [getattr(first.values[0], share) for share in ("saturated", "underflows", "zeros")] == [0.25, 0.25, 0.5]
    with tp.find_nonfinite(net) as found:
        trained(net, step)
    assert not found.found
    candidate = tp.Policy.stock().override({"linear": "float8"})

    def loss() -> torch.Tensor:
        with tp.my_autocast("cpu"):
            return net(x).float().pow(2).mean()

    comparison = tp.compare(loss, model=net, candidate=candidate, progress=False)
    assert {site.module for site in comparison.sites if "float8_e4m3fn" in site.dtypes} == {"0", "2", "3"}
