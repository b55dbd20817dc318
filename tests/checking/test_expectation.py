"""What a crosscheck expects of calls: overrides, promotion regions, custom ops, transforms, ops that kernels call."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.subprocesses import run_python
from torch_promote.observe.ops import find_overload

BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
levels = pytest.mark.parametrize("level", ["dtype", "bits"])
aten = torch.ops.aten
X, W = torch.randn(4, 4), torch.randn(4, 4)


# --- overrides


@pytest.fixture
def custom_ops() -> Iterator[None]:
    def add_all(*args: Any, **kwargs: Any) -> Tensor:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return torch.stack([leaf.to(leaves[0].dtype) for leaf in leaves]).sum(0)

    with torch.library._scoped_library("crosschecked", "FRAGMENT") as library:
        library.define("mixed(Tensor x, Dict(str, Tensor) named, (Tensor, Tensor?) pair, *, Tensor? z=None) -> Tensor")
        library.impl("mixed", add_all, "CompositeExplicitAutograd")
        library.define("into(Tensor(a!) x, Tensor?[] ys) -> Tensor(a!)")
        library.impl("into", lambda x, ys: x.copy_(add_all(ys)), "CompositeExplicitAutograd")
        yield


def pointwise(x: Tensor) -> Any:
    return torch.relu(x) + torch.sin(x.bfloat16()) * x, torch.maximum(x, x.half())


def lists(x: Tensor) -> Any:
    return torch.block_diag(x, x.bfloat16()), torch.broadcast_tensors(x, x.half()), torch.meshgrid(x[0], x[1])


def composite(x: Tensor) -> Any:
    return F.linear(x, x), torch.chain_matmul(x, x, x), torch.einsum("ij,jk->ik", x, x)


def writes(x: Tensor) -> Any:
    y = x.bfloat16()
    y[torch.tensor([0, 1])] = x[:2].detach()
    y[1:] = x[1:].detach()
    y.addmm_(x, x).mul_(0.3).add_(x.double())
    torch.mm(x.detach(), x.detach(), out=(out := torch.empty(3, 3, dtype=F16)))
    return y, out, torch.zeros(3, 3, dtype=BF16).scatter_add_(0, torch.tensor([[0, 1, 2]] * 3), x)


def custom(x: Tensor) -> Any:
    made = torch.ops.crosschecked.mixed(x, {"a": x.bfloat16(), "b": x.double()}, (x.half(), None), z=x)
    return made, torch.ops.crosschecked.into(torch.zeros(3, 3, dtype=BF16), [None, x, x.double()])


MATCHING = ("index_put_", "copy_", "addmm_", "mm.out", "scatter_add_", "add_.Tensor", "mul_.Tensor")
BLOCKS: list[tuple[Callable[[Tensor], Any], dict[Any, Any]]] = [
    (pointwise, {"relu": F64, "sin.default": "fp32", "add.Tensor": "promote", "maximum": "fp16", "mul.Tensor": "keep"}),
    (lists, {"block_diag": "promote", "broadcast_tensors": F16, "meshgrid": "fp16"}),
    (composite, {"linear": "fallthrough", "addmm": "fp32", "einsum": "fp32", "bmm": F64, "tril": "fp16", "mm": F16}),
    (writes, dict.fromkeys(MATCHING, "match_self")),
    (custom, {"crosschecked::mixed": F16, "crosschecked::into": "match_self"}),
    (custom, {"crosschecked::mixed": "promote", "crosschecked::into": "match_self", "stack": "fp32", "sum": F64}),
]
each_block = pytest.mark.parametrize(("block", "overrides"), BLOCKS, ids=[block.__name__ for block, _ in BLOCKS])


def made() -> Tensor:
    return torch.linspace(-1, 2, 9).reshape(3, 3).requires_grad_()


@levels
@pytest.mark.parametrize("device_types", ["cpu", ["cpu", "cuda"]], ids=str)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("custom_ops")
@each_block
def test_correct_calls_give_no_mismatch(block: Any, overrides: dict[Any, Any], device_types: Any, level: Any) -> None:
    with tp.crosscheck(level=level) as report:
        with tp.my_autocast(device_types, overrides=overrides):
            results = block(made())
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    assert report.ok, str(report)
    assert report.with_policy.total() >= 2


@levels
@pytest.mark.parametrize("policy", ["cuda", "cpu", "fp32_safe", "fp32", "off"])
@pytest.mark.filterwarnings("ignore")
def test_named_policies(policy: str, level: Any) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    h = torch.rand(3).half()
    with tp.crosscheck(level=level) as report:
        with tp.my_autocast("cpu", policy=policy):
            loss = F.cross_entropy(model(torch.rand(2, 3, 8)).sum(1), torch.tensor([1, 2])) + h.exp().sum()
            loss = loss + torch.cosine_similarity(X, W).sum() + torch.softmax(h, 0).sum() + torch.norm(h)
        loss.backward()
    assert report.ok, str(report)
    assert (report.with_policy.total() == 0) is (policy == "off")
    overridden = report.not_compared["the op's policy is overridden"]
    assert (overridden > 0) == (level == "bits" and policy != "cpu"), "on the CPU, the policy cpu is stock's"


@pytest.mark.usefixtures("custom_ops")
@pytest.mark.parametrize("device_types", [None, "cpu", "cuda"])
def test_registered_policies(device_types: str | None) -> None:
    mixed = torch.ops.crosschecked.mixed.default
    args = torch.ones(2), {"a": torch.ones(2, dtype=F64)}, (torch.ones(2, dtype=F16), None)
    handle = tp.register_policy(mixed, "promote", device_type=device_types)
    try:
        with tp.crosscheck() as report, tp.my_autocast("cpu", overrides={"relu": "fp16"}):
            mixed(*args)
    finally:
        handle.remove()
    with tp.crosscheck() as removed, tp.my_autocast("cpu"):
        mixed(*args)
    assert report.ok, str(report)
    assert report.with_policy[str(mixed)] == (0 if device_types == "cuda" else 1)
    assert (removed.ok, removed.with_policy[str(mixed)]) == (True, 0)


@pytest.mark.parametrize("op", ["batch_norm", "native_batch_norm", "instance_norm", "_foreach_add_.List", "copy_"])
def test_what_an_op_writes_is_written_once(op: str) -> None:
    """An op that some region names has a kernel on our key, so it runs again under stock."""

    def write() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.InstanceNorm2d(8, track_running_stats=True))
        one, gaps = torch.ones(2), torch.zeros(3, 8)[:, :4]
        for _ in range(3):
            with tp.my_autocast("cpu"):
                model(torch.randn(2, 3, 8, 8))
                torch._foreach_add_([one], [torch.ones(2)])
                gaps.copy_(torch.ones(3, 4))
        return [model[1].running_var, model[2].running_var, one, gaps]

    with tp.my_autocast("cpu", overrides={op: "keep"}):
        pass
    expected = write()
    with tp.crosscheck(level="bits") as report:
        assert all(map(torch.equal, write(), expected))
    assert report.mismatches == []


# --- transforms, and what raises in the middle of a call

HOOK = "the call raised, possibly in a saved-tensor hook"


@pytest.mark.parametrize("raises", [False, True])
def test_a_recomputation_that_stops_early(raises: bool) -> None:
    """The hook of torch.utils.checkpoint raises as soon as it has what the backward needs: here, in the last Linear."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    leaf = X.clone().requires_grad_()
    with tp.crosscheck(level="bits", raise_on_mismatch=raises) as report, tp.my_autocast("cpu"):
        checkpoint(model, leaf, use_reentrant=False).float().sum().backward()
    assert report.mismatches == []
    # Twice the first layer, once the last: its second run is the one that is not compared.
    assert (report.not_compared[HOOK], report.with_stock["aten.linear.default"]) == (1, 3)


#: Functorch repeats a call on plain tensors before autocast runs; that is not the call that autocast makes.
TRANSFORMED: list[Callable[[], Any]] = [
    lambda: vmap(lambda row: (row @ W).log_softmax(0))(X),
    lambda: vmap(grad(lambda row: (row @ W).float().sum()))(X),
    lambda: vmap(lambda row: X @ W + row)(X),
    lambda: vmap(lambda row: torch.mm(X, W) + row)(X),
    lambda: grad(lambda a: (X @ W + a).sum())(X),
    lambda: vmap(grad(lambda a: (torch.mm(X, W) @ a).sum()))(X),
]


@pytest.mark.parametrize("call", TRANSFORMED)
@pytest.mark.parametrize("region", [tp.my_autocast, tp.stock_autocast])
def test_transforms(call: Callable[[], Any], region: Any) -> None:
    reports: dict[str, tp.types.CrosscheckReport] = {}
    for level in ("dtype", "bits"):
        with tp.crosscheck(level=level) as reports[level], region("cpu"):  # type: ignore[arg-type]
            call()
        assert reports[level].mismatches == []
        assert all(count > 0 for count in reports[level].with_policy.values())
        assert reports[level].with_policy.total() > 0
    once, twice = reports["dtype"], reports["bits"]
    for counts in ("checked", "composite", "no_rule", "with_policy"):
        assert getattr(twice, counts) == getattr(once, counts), "the second run is not counted"
    assert (twice.with_stock.total() > 0) == (region is tp.my_autocast)


AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1).add(torch._C.DispatchKey.AutocastCPU)


@contextlib.contextmanager
def uncast_kernel(op: str) -> Iterator[None]:
    """Replaces our wrapper of an op by one that casts nothing."""

    def uncast(a: Tensor, b: Tensor) -> Tensor:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            result = getattr(torch, op)(a, b)
        return result.bfloat16() if op == "mm" else result

    library = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch tells of the one before
        library.impl(op, uncast, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def bilinear() -> Tensor:
    """Of a kernel that calls bmm."""
    return F.bilinear(torch.ones(2, 3), torch.ones(2, 4), torch.ones(5, 3, 4))


@pytest.mark.parametrize(("op", "call"), [("mm", TRANSFORMED[3]), ("bmm", bilinear)])
def test_a_bug_inside_a_transform_or_a_kernel(op: str, call: Callable[[], Any]) -> None:
    with uncast_kernel(op), tp.crosscheck() as report, tp.my_autocast("cpu"):
        call()
    assert (f"aten.{op}.default", "casts") in {(mismatch.op, mismatch.kind) for mismatch in report.mismatches}
    with tp.crosscheck() as again, tp.my_autocast("cpu"):
        call()
    assert again.mismatches == []


# --- promotion regions: the operands that a rule joins are found without the extension's list


#: Bugs in the extension's list: its entry of an op, as it is planted (None: the op is missing), a call, the promotion
#: rule of the region, and the mismatch: its kind, the start of the expected value, and the actual value.
WIDER = ("dtype", "float64", "float32")
STRICT = ("error", "an error: aten::", "a result")
PLANTED: dict[str, tuple[str, str, str, tuple[str, str, str]]] = {
    "aten::mul.Tensor": ("None", "torch.mul(ints, singles)", "numpy", WIDER),
    "aten::mul_.Tensor": ("None", "singles.clone().mul_(halves)", "strict", STRICT),
    "aten::lt.Tensor": ("None", "torch.lt(ints, singles)", "strict", STRICT),  # its result is bool under every rule
    "aten::cat": ("None", "torch.cat([ints, singles])", "numpy", WIDER),
    "aten::sqrt": ("None", "torch.sqrt(ints)", "numpy", WIDER),
    "aten::where.ScalarOther": ("None", "torch.where(halves > 0, ints, 2.5)", "numpy", WIDER),
    "aten::where.ScalarSelf": ("None", "torch.where(halves > 0, 2.5, ints)", "strict", STRICT),
    "aten::where.Scalar": ("None", "torch.where(halves > 0, 2.5, 1)", "numpy", WIDER),
    "aten::special_hermite_polynomial_h.x_scalar": (
        *("None", "torch.special.hermite_polynomial_h(2.5, ints)", "numpy", WIDER),
    ),
    "aten::special_hermite_polynomial_h.n_scalar_out": (
        *("None", "torch.special.hermite_polynomial_h(ints, 2.5, out=singles.clone())", "strict", STRICT),
    ),
    "aten::addcmul": (
        "op._replace(participants=(0, 1))",
        "torch.addcmul(halves, halves, torch.tensor(1.0))",
        "jax",
        ("dtype", "float32", "float16"),
    ),
    "aten::div.Tensor": ("op._replace(computes=0)", "torch.div(ints, ints)", "numpy", WIDER),  # as if it were a product
}

SCRIPT = """
import torch, torch_promote as tp
from torch_promote.regions import promotion_tables as hooks

ops = hooks.promoting_ops()
planted = {planted}
if planted:  # before the first region, which registers the kernels
    changed = [planted.get(op.name, lambda op: op)(op) for op in ops]
    hooks.promoting_ops = lambda: [op for op in changed if op is not None]
halves, singles = torch.ones(2, 2).half(), torch.ones(2, 2)
ints = singles.int()
for rule, call in {calls}:
    with tp.crosscheck() as report, tp.promotion(rule):
        try:
            call()
        except tp.errors.PromotionRuleError:
            pass
    for found in report.mismatches:
        print(found.op, found.kind, found.expected, found.got, sep="|")
"""


def mismatches_with(planted: str) -> list[str]:
    calls = ", ".join(f"({rule!r}, lambda: {call})" for _, call, rule, _ in PLANTED.values())
    done = run_python(SCRIPT.format(planted=planted, calls=f"[{calls}]"))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_bugs_in_the_list_of_promoting_ops_are_found() -> None:
    assert mismatches_with("{}") == []
    planted = ", ".join(f"{name!r}: lambda op: {change}" for name, (change, *_) in PLANTED.items())
    lines = mismatches_with(f"{{{planted}}}")
    for line, (name, (_, _, _, expected)) in zip(lines, PLANTED.items(), strict=True):
        op, kind, should_be, got = line.split("|")
        assert find_overload(name) is eval(op, {"aten": aten})
        assert (kind, got) == (expected[0], expected[2]), line
        assert should_be.startswith(expected[1]), line


def test_an_op_without_a_rule_is_no_product_that_should_raise() -> None:
    calls = (lambda x: torch.equal(x, x.double()), lambda x: x.view_as(x.double()), lambda x: F.linear(x, x.double()))
    with tp.crosscheck() as report, tp.promotion("strict", matmul=True):
        for call in calls:
            with contextlib.suppress(tp.errors.PromotionRuleError):
                call(torch.ones(2, 2))
    assert report.mismatches == []


# --- custom ops: the registered fake is the rule


def refuse(x: Tensor) -> Tensor:
    raise ValueError("only for matrices")


def positive(x: Tensor) -> Tensor:
    return x.new_empty((torch.library.get_ctx().new_dynamic_size(), 3))


HAS = ", as the op's registered fake has"
RAISES = "an error: the op's registered fake raises ValueError: only for matrices"
#: The kernel, the fake, and the mismatch: its kind, the expected and the actual value. None: there is none. "no rule":
#: there is no fake.
FAKES: dict[str, tuple[Any, Any, Any]] = {
    "right": (lambda x: x * 2, torch.empty_like, None),
    "dtype": (lambda x: (x * 2).double(), torch.empty_like, ("dtype", f"float32{HAS}", "float64")),
    "shape": (lambda x: x[:1] * 2, torch.empty_like, ("shape", f"[2, 3]{HAS}", "[1, 3]")),
    "strides": (lambda x: (x * 2).t().contiguous().t(), torch.empty_like, ("strides", f"(3, 1){HAS}", "(1, 2)")),
    "error": (lambda x: x * 2, refuse, ("error", RAISES, "a result")),
    "size that depends on data": (lambda x: x[x[:, 0] > 0].clone(), positive, None),
    "another size": (lambda x: x[:, :2].clone(), positive, ("shape", f"[u0, 3]{HAS}", "[2, 2]")),
    "another layout": (lambda x: x.double().to_sparse(), torch.empty_like, ("dtype", f"float32{HAS}", "float64")),
    "none": (lambda x: x.double(), None, "no rule"),
}


@pytest.mark.parametrize(("kernel", "fake", "expected"), FAKES.values(), ids=FAKES)
def test_a_kernel_is_compared_with_its_fake(kernel: Any, fake: Any, expected: Any) -> None:
    with torch.library._scoped_library("fakes", "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", kernel, "CPU")
        if fake is not None:
            torch.library.register_fake("fakes::op", fake, lib=library)
        op = torch.ops.fakes.op.default
        with tp.crosscheck() as report:
            line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
            op(torch.ones(2, 3))
    assert (report.by_fake[str(op)], report.no_rule[str(op)]) == ((0, 1) if expected == "no rule" else (1, 0))
    found = [(mismatch.op, mismatch.kind, mismatch.expected, mismatch.got) for mismatch in report.mismatches]
    assert found == ([(str(op), *expected)] if isinstance(expected, tuple) else [])
    assert all(f"{__file__}:{line}" in mismatch.where for mismatch in report.mismatches)
