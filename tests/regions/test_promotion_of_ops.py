"""Under any rule, an op computes in the rule's common dtype, and gives the values of operands cast by hand."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import operator
import random
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_methods_invocations import foreach_binary_op_db, foreach_pointwise_op_db, op_db
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from torch_promote.errors import PromotionRuleError, PromotionWriteError
from torch_promote.reference.dtypes import ALL_DTYPES
from torch_promote.reference.promotion_rules import PromotionRule, promotion_rule
from torch_promote.reference.promotion_rules.rule import NUMBER_TYPES
from torch_promote.regions.promotion_tables import promoting_ops

pytestmark = pytest.mark.filterwarnings("ignore")

# --- Every overload of an op that promotes does, or has a reason

#: Overloads on which no rule acts although it acts on another overload of the op, and why.
UNPROMOTED = {
    "aten::where": "it has no operands beside the condition, and returns indices",
    **dict.fromkeys(("aten::cat.names", "aten::cat.names_out"), "it calls cat"),  # up to 2.11
    **dict.fromkeys(
        (f"aten::{op}.{overload}" for op in ("addmm", "baddbmm", "bmm", "mm") for overload in ("dtype", "dtype_out")),
        "the call names the result's dtype, which has to go with the operands' own",
    ),
}


def overloads_without_a_decision() -> set[str]:
    """The overloads of promoting ops, their in-place forms included, that neither promote nor have a reason."""
    promoting = {op.name for op in promoting_ops()}
    ops = {name.partition(".")[0] for name in promoting}
    ops |= {op.removesuffix("_") for op in ops} | {f"{op}_" for op in ops}
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        if name.partition(".")[0] in ops and torch._C._dispatch_has_kernel(name):
            found.add(name)
    return found - promoting - UNPROMOTED.keys()


def test_every_overload_of_a_promoting_op_promotes_or_has_a_reason() -> None:
    assert overloads_without_a_decision() == set()
    assert not UNPROMOTED.keys() & {op.name for op in promoting_ops()}
    with torch.library._scoped_library("aten", "FRAGMENT") as library:
        library.define("hypot.thirds(Tensor self, Tensor other, int places) -> Tensor")
        library.impl("hypot.thirds", lambda a, b, places: torch.hypot(a, b), "CPU")
        assert overloads_without_a_decision() == {"aten::hypot.thirds"}


# --- Under "strict" no call on tensors of one dtype raises: PyTorch's whole op database


#: What PyTorch has written in Python, of ops that promote; docs/promotion_regions.md says so.
WRITTEN_IN_PYTHON = {
    "__rdiv__": "the reciprocal of integers times integers",
    "nn.functional.local_response_norm": "integers times a float",
}


def refused(entry: Any, dtype: torch.dtype, region: Any) -> tuple[int, set[str]]:
    """The number of calls, and the rule's errors for refused calls."""
    calls, messages = 0, set()
    # Not through entry.sample_inputs, which walks the stack for each sample to name the test that it is for.
    for sample in itertools.islice(entry.sample_inputs_func(entry, "cpu", dtype, False), 4):
        given = (sample.input, sample.args, sample.kwargs)
        if len({leaf.dtype for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)}) > 1:
            continue
        for rule in (contextlib.nullcontext(), region):
            copied, args, kwargs = tree_map_only(torch.Tensor, torch.clone, given)
            try:
                with rule:
                    entry(copied, *args, **kwargs)
                calls += rule is not region
            except PromotionRuleError as error:
                messages.add(str(error))
            except Exception:
                break  # PyTorch does not accept the sample either
    return calls, messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64], ids=str)
def test_the_op_database(dtype: torch.dtype) -> None:
    region, calls, wrong = tp.promotion("strict", matmul=True), 0, {}
    for entry in op_db:
        if dtype in entry.dtypes and entry.name not in WRITTEN_IN_PYTHON:
            count, messages = refused(entry, dtype, region)
            calls += count
            if messages:
                wrong[entry.name, entry.variant_test_name] = messages
    assert wrong == {}
    assert calls > 300


# --- A call of one dtype gives the same bits as without a rule, and its indices may be integers


def has_one_dtype(entry: Any, sample: Any) -> bool:
    """Whether the floating tensors of a sample have one dtype, and integers beside them are no operands."""
    leaves = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    dtypes = {x.dtype for x in leaves if x.dtype.is_floating_point or x.dtype.is_complex}
    is_clamp_to_integers = entry.name == "clamp" and len({x.dtype for x in leaves}) > 1
    return len(dtypes) == 1 and not is_clamp_to_integers


@pytest.mark.slow
@pytest.mark.parametrize("inference", [False, True], ids=["with gradients", "inference mode"])
@pytest.mark.parametrize("rule", ["strict", "numpy"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_call_of_one_dtype_runs_unchanged(dtype: torch.dtype, rule: str, inference: bool) -> None:
    region, calls = tp.promotion(rule, matmul=True), 0
    for entry in op_db:
        # The bits of linalg.lstsq depend on where its arguments lie in memory.
        if dtype not in entry.dtypes or "empty" in entry.name or entry.name == "linalg.lstsq":
            continue
        for sample in itertools.islice(entry.sample_inputs_func(entry, "cpu", dtype, False), 16):
            if not has_one_dtype(entry, sample):
                continue
            arguments = ([sample.input, *sample.args], sample.kwargs)
            call = functools.partial(run, entry.op, arguments, gradients=not inference)
            with torch.inference_mode(inference):
                stock = outcome(call)
                with region:
                    ours = outcome(call)
                assert ours == stock, (entry.name, sample)
            calls += stock[0] == "result"
    assert calls > 4000


X = torch.linspace(-2, 3, 20).reshape(4, 5)
TARGET, WEIGHT = torch.tensor([1, 2, 0, 4]), torch.tensor([0.1, 0.7, 1.3, 0.4, 2.0])
SIGNS = torch.tensor([1, -1, 1, -1])
CHUNKED = getattr(torch.nn, "LinearCrossEntropyOptions", None)

#: Calls of functions that PyTorch composes of others: of a tensor, and of what casts other tensors to its dtype.
COMPOSED: dict[str, Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], Any]] = {
    "cross_entropy, smoothed": lambda x, to: F.cross_entropy(x, TARGET, label_smoothing=0.1),
    "cross_entropy, smoothed and weighted": lambda x, to: F.cross_entropy(
        x, TARGET, to(WEIGHT), ignore_index=2, label_smoothing=0.2
    ),
    "cross_entropy of probabilities": lambda x, to: F.cross_entropy(x, x.softmax(1), label_smoothing=0.1),
    "CrossEntropyLoss": lambda x, to: torch.nn.CrossEntropyLoss(to(WEIGHT), label_smoothing=0.1)(x, TARGET),
    "nll_loss": lambda x, to: F.nll_loss(x, TARGET, to(WEIGHT), ignore_index=0),
    "rms_norm": lambda x, to: F.rms_norm(x, (5,), to(WEIGHT)),
    "RMSNorm": lambda x, to: torch.nn.RMSNorm(5, dtype=x.dtype)(x),
    "layer_norm": lambda x, to: F.layer_norm(x, (5,), to(WEIGHT)),
    "cosine_similarity": lambda x, to: F.cosine_similarity(x, x.flip(0)),
    "cosine_embedding_loss": lambda x, to: F.cosine_embedding_loss(x, x.flip(0), SIGNS, margin=0.1),
    "margin_ranking_loss": lambda x, to: F.margin_ranking_loss(x, x.flip(0), SIGNS[:, None], margin=0.1),
    "hinge_embedding_loss": lambda x, to: F.hinge_embedding_loss(x, SIGNS[:, None]),
    "triplet_margin_loss": lambda x, to: F.triplet_margin_loss(x, x.flip(0), x.flip(1), swap=True),
    "triplet_margin_with_distance_loss": lambda x, to: F.triplet_margin_with_distance_loss(x, x.flip(0), x.flip(1)),
    "poisson_nll_loss": lambda x, to: F.poisson_nll_loss(x, x.abs(), full=True),
    "gaussian_nll_loss": lambda x, to: F.gaussian_nll_loss(x, x.flip(0), x.abs() + 1, full=True),
    "kl_div": lambda x, to: F.kl_div(x, x.softmax(1), reduction="batchmean"),
    "bce_with_logits": lambda x, to: F.binary_cross_entropy_with_logits(x, x.abs(), pos_weight=to(WEIGHT)),
    "multilabel_soft_margin_loss": lambda x, to: F.multilabel_soft_margin_loss(x, (x > 0).to(x.dtype), to(WEIGHT)),
    "soft_margin_loss": lambda x, to: F.soft_margin_loss(x, to(SIGNS[:, None].expand(4, 5))),
    "huber_loss": lambda x, to: F.huber_loss(x, x.flip(0), delta=0.7),
    "smooth_l1_loss": lambda x, to: F.smooth_l1_loss(x, x.flip(0), beta=0.7),
    "ctc_loss": lambda x, to: F.ctc_loss(
        x.float()[:, None].log_softmax(2), TARGET[None, :2], torch.tensor([4]), torch.tensor([2])
    ).to(x.dtype),
    "pairwise_distance": lambda x, to: F.pairwise_distance(x, x.flip(0)),
    "normalize": lambda x, to: F.normalize(x),
    "masked.mean": lambda x, to: torch.masked.mean(x, dim=1, mask=x > 0),
    "masked.var": lambda x, to: torch.masked.var(x, dim=1, mask=x > -1),
    "embedding_bag": lambda x, to: F.embedding_bag(
        TARGET[None, :2], x, mode="sum", per_sample_weights=to(WEIGHT[None, :2])
    ),
    "attention": lambda x, to: F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=x[:, :4] > -1),
    "gumbel_softmax": lambda x, to: F.gumbel_softmax(x, hard=True),
    "linear_cross_entropy": lambda x, to: F.linear_cross_entropy(x, to(X), TARGET % 4, label_smoothing=0.1),
    "linear_cross_entropy, chunked": lambda x, to: F.linear_cross_entropy(
        x, to(X), TARGET % 4, reduction="sum", options=CHUNKED and CHUNKED()
    ),
}
if CHUNKED is None:  # torch 2.12 and older
    COMPOSED = {name: call for name, call in COMPOSED.items() if not name.startswith("linear_cross")}


@pytest.mark.parametrize("rule", ["strict", "array_api", "numpy", "jax"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", COMPOSED)
def test_a_composed_call_of_one_dtype_runs_unchanged(name: str, dtype: torch.dtype, rule: str) -> None:
    """Forward and backward, and no check of dtypes finds anything."""

    def call(x: torch.Tensor) -> Any:
        return COMPOSED[name](x, lambda other: other.to(dtype))

    arguments = ([X.to(dtype)], {})
    stock = outcome(lambda: run(call, arguments, gradients=True))
    with tp.promotion(rule, matmul=True):
        assert outcome(lambda: run(call, arguments, gradients=True)) == stock
    assert stock[0] == "result", stock
    with tp.crosscheck() as report, tp.promotion(rule, matmul=True):
        call(X.to(dtype))
    assert report.mismatches == []


STEPS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ASGD, foreach": lambda parameters: torch.optim.ASGD(parameters, foreach=True),
    "Adagrad, foreach, lr in a tensor": lambda parameters: torch.optim.Adagrad(
        parameters, lr=torch.tensor(0.1), foreach=True
    ),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "SGD, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "LBFGS, lr in a tensor": lambda parameters: torch.optim.LBFGS(parameters, lr=torch.tensor(0.1)),
}


@pytest.mark.parametrize("rule", ["strict", "numpy"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_an_optimizer_runs_unchanged(name: str, dtype: torch.dtype, rule: str) -> None:
    """It is given no tensors, and PyTorch chose the dtypes of its states."""
    results = []
    for region in (contextlib.nullcontext(), tp.promotion(rule)):
        parameters = [torch.nn.Parameter(X.to(dtype)), torch.nn.Parameter(WEIGHT.to(dtype))]
        optimizer = STEPS[name](parameters)

        def closure(parameters: list[torch.nn.Parameter] = parameters) -> torch.Tensor:
            for parameter in parameters:
                parameter.grad = parameter.detach() * 0.1
            return torch.tensor(1.0)

        with region:
            for _ in range(3):
                closure()
                optimizer.step(closure)
        results.append(described(parameters))
    assert results[0] == results[1]


@pytest.mark.parametrize("rule", ["strict", "array_api", "numpy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_scaled_step_runs_unchanged(dtype: torch.dtype, rule: str) -> None:
    """GradScaler multiplies a loss of any dtype with a scale in float32."""
    results = []
    for region in (contextlib.nullcontext(), tp.promotion(rule)):
        parameter, scaler = torch.nn.Parameter(X.to(dtype)), torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        with region:
            loss, *others = scaler.scale([parameter.square().sum(), parameter[0]])
            loss.backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append(described([loss, *others, parameter]))
    assert results[0] == results[1]


INTEGERS = torch.tensor([[1, 2, 0, 4, 3]])

#: Calls in which the user mixes dtypes, or integers are operands: the rule acts inside.
MIXED: dict[str, Callable[[torch.Tensor], Any]] = {
    "kron": lambda x: torch.kron(x, INTEGERS),
    "outer": lambda x: torch.outer(x[0], INTEGERS[0]),
    "hstack": lambda x: torch.hstack([x[0], INTEGERS[0]]),
    "clip": lambda x: torch.clip(x, INTEGERS),
    "diff": lambda x: torch.diff(x, dim=0, append=INTEGERS),
    "l1_loss": lambda x: F.l1_loss(x, INTEGERS.expand(4, 5)),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, INTEGERS.expand(4, 5), x.abs() + 1),
    "poisson_nll_loss": lambda x: F.poisson_nll_loss(x, INTEGERS.expand(4, 5)),
    "l1_loss of two dtypes": lambda x: F.l1_loss(x, x.double()),
    "pairwise_distance of two dtypes": lambda x: F.pairwise_distance(x, x.double()),
    "cosine_similarity of two dtypes": lambda x: F.cosine_similarity(x, x.double()),
    "normalize by another dtype": lambda x: F.normalize(x) * x.double(),
    "a Python number": lambda x: torch.kron(x[0, 0] > 0, INTEGERS) * 2.5,
}


@pytest.mark.parametrize("name", MIXED)
def test_a_composed_call_of_several_dtypes_does_not(name: str) -> None:
    x = X.half()
    with tp.promotion("numpy"):
        assert MIXED[name](x).dtype is torch.float64
    with tp.promotion("strict"), pytest.raises(PromotionRuleError):
        MIXED[name](x)


class PassesOn(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Passed(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("how", ["mode", "subclass"])
def test_composed_calls_that_a_torch_function_passes_on(how: str) -> None:
    x = X.half() if how == "mode" else X.half().as_subclass(Passed)
    with PassesOn() if how == "mode" else contextlib.nullcontext():
        for call in (torch.masked.mean, torch.masked.var):
            expected = call(x, dim=1, mask=x > -9)
            with tp.promotion("strict"):
                assert torch.equal(call(x, dim=1, mask=x > -9), expected)
        for mixed in (torch.add, F.l1_loss):
            with tp.promotion("numpy"):
                assert mixed(x, INTEGERS.expand(4, 5)).dtype is torch.float64
            with tp.promotion("strict"), pytest.raises(PromotionRuleError):
                mixed(x, X)


TRANSFORMED: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "vmap": lambda call: torch.vmap(lambda x: call(x[None], lambda other: other)),
    "grad": lambda call: torch.func.grad(lambda x: call(x, lambda other: other).sum()),
    "checkpoint": lambda call: lambda x: checkpoint(call, x, lambda other: other.to(x.dtype), use_reentrant=False),
    "compiled": lambda call: torch.compile(lambda x: call(x, lambda other: other.to(x.dtype)), backend="aot_eager"),
    "compiled with its region": lambda call: torch.compile(
        lambda x: in_strict(lambda: call(x, lambda other: other.to(x.dtype))), backend="aot_eager"
    ),
}


def in_strict(call: Callable[[], Any]) -> Any:
    with tp.promotion("strict"):
        return call()


@pytest.mark.parametrize("how", TRANSFORMED)
def test_composed_calls_under_transforms(how: str) -> None:
    calls: list[Callable[..., Any]] = [
        lambda x, to: F.cross_entropy(x, TARGET[: len(x)], label_smoothing=0.1),
        lambda x, to: F.rms_norm(x, (5,)),
        lambda x, to: torch.masked.mean(x, mask=x > -9),
    ]
    for call in calls:
        torch._dynamo.reset()
        x, function = X.half().requires_grad_(how == "checkpoint"), TRANSFORMED[how](call)
        expected = function(x)
        with tp.promotion("strict"):
            assert torch.equal(function(x), expected)


# --- Under the rule "torch", every op equals stock


#: The dtypes that stock promotes, and the unsigned ones that it promotes in part.
DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


_VALUES = (1.1, 2.7, -3.3, 0.5, 100.3, 1.0)


def operand(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Values that rounding changes; integers for integer dtypes."""
    values = torch.tensor(list(itertools.islice(itertools.cycle(_VALUES), math.prod(shape))), dtype=torch.float64)
    if dtype in (torch.complex32, torch.complex64, torch.complex128):
        values = torch.complex(values, -values / 3)
    return (values.abs() if dtype in (torch.uint8, *UNSIGNED) else values).to(dtype).reshape(shape)


Outcome = tuple[str, Any]


def outcome(function: Callable[[], Any]) -> Outcome:
    """The outcome of a call as comparable values: dtypes, strides, bits; or its error."""
    try:
        result = function()
    except Exception as error:
        return type(error).__name__, str(error).partition("\n")[0]
    return "result", described(result)


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.to_dense() if value.layout is not torch.strided else value
        dense = value.detach().resolve_conj().resolve_neg()
        data = torch.empty(value.numel(), dtype=value.dtype).copy_(dense.reshape(-1))
        return str(value.dtype), tuple(value.shape), value.stride(), bytes(data.view(torch.uint8).tolist())
    if isinstance(value, list | tuple):
        return tuple(map(described, value))
    return value


def retyped(value: Any, generator: random.Random) -> Any:
    """Copies of the arguments of a call, whose tensors have random dtypes."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to(generator.choice(DTYPES)), value)


def run(function: Callable[..., Any], arguments: Any, gradients: bool) -> Any:
    """A call on copies: its results, what it leaves of the arguments, and the gradients."""
    args, kwargs = copied = tree_map_only(torch.Tensor, torch.clone, arguments)
    floats = [x for x in tree_leaves(copied) if isinstance(x, torch.Tensor) and x.dtype.is_floating_point]
    for leaf in floats if gradients else []:
        leaf.requires_grad_()
    torch.manual_seed(0)
    result = function(*args, **kwargs)
    tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    loss = sum(x.abs().double().sum() for x in tensors if x.requires_grad)
    found = torch.autograd.grad(loss, floats, allow_unused=True) if isinstance(loss, torch.Tensor) else None
    return result, tree_leaves(copied), found


@pytest.mark.parametrize("part", range(4))
def test_the_rule_torch_is_stock(part: int) -> None:
    """Results, strides, bits, writes, gradients and errors of promoting ops with operands of random dtypes."""
    generator, compared, mixed = random.Random(part), 0, 0
    packets = {op.name.removeprefix("aten::").partition(".")[0].removesuffix("_") for op in promoting_ops()}
    for entry in [*op_db, *foreach_binary_op_db, *foreach_pointwise_op_db]:
        if entry.name not in packets or torch.float32 not in entry.dtypes:
            continue
        for sample in itertools.islice(entry.sample_inputs_func(entry, "cpu", torch.float32, False), 4):
            arguments = retyped(([sample.input, *sample.args], sample.kwargs), generator)
            for function in filter(None, (entry.op, entry.inplace_variant)):
                gradients = function is entry.op and generator.random() < 0.5
                call = functools.partial(run, function, arguments, gradients)
                stock = outcome(call)
                with tp.promotion("torch"):
                    ours = outcome(call)
                assert ours == stock, (entry.name, arguments)
                compared, mixed = compared + 1, mixed + (stock[0] == "result")
    assert compared > 200
    assert mixed > 100


def widest(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if a is b else max(a, b, key=DTYPES.index) if {a, b} <= set(DTYPES) else torch.float64


RULES = ("jax", "numpy", "array_api", "strict")
OWN_RULES: dict[str, Callable[[], PromotionRule]] = {
    "a table over strict": lambda: tp.make_rule("half", {(torch.float16, torch.bfloat16): torch.bfloat16}),
    "a table over torch": lambda: tp.make_rule("low", {(torch.float16, torch.float32): torch.float16}, over="torch"),
    "a table over numpy": lambda: tp.make_rule("ints", {(torch.int32, torch.float32): torch.float32}, over="numpy"),
    "a function": lambda: tp.make_rule("widest", widest, over="torch"),
}
ALL = (*DTYPES, *UNSIGNED)
PAIRS_OF_SHAPES = (((2, 3), (2, 3)), ((2, 3), ()), ((), (3,)), ((), ()))
FLOATS = (torch.true_divide, torch.atan2, torch.xlogy)
TWO = (torch.true_divide, torch.add)
COMMON = (torch.add, torch.mul, torch.maximum, torch.eq, torch.logical_xor)


def expected(rule: PromotionRule, function: Callable[..., Any], operands: list[Any], floats: bool) -> Any:
    """The rule's dtype by the reference, and the op on operands cast to it, run by stock."""
    try:
        dtype = rule.common(operands, floats=floats)
    except PromotionRuleError:
        return "raises"
    return outcome(lambda: function(*[x.to(dtype) if isinstance(x, torch.Tensor) else x for x in operands]))


def got(rule: str | PromotionRule, function: Callable[..., Any], operands: list[Any]) -> Any:
    with tp.promotion(rule):
        found = outcome(lambda: function(*operands))
    return "raises" if found[0] == "PromotionRuleError" else found


def twin(over: Literal["numpy", "jax", "strict"]) -> PromotionRule:
    """NumPy's tables over a rule: of three dtypes, two of which have another common dtype there, all orders decide."""
    numpy = promotion_rule("numpy")
    return tp.make_rule(
        "twin",
        {(a, b): numpy.of_pair(a, b) for a in ALL_DTYPES for b in ALL_DTYPES},
        over=over,
        numbers={(one, dtype): numpy.of_number(one, dtype) for one in NUMBER_TYPES for dtype in ALL_DTYPES},
        floats={dtype: numpy.of_float(dtype) for dtype in ALL_DTYPES},
    )


@pytest.mark.usefixtures("fresh_dynamo")
def test_rules_with_equal_tables_may_differ_for_three_dtypes() -> None:
    one, other, again = twin("numpy"), twin("jax"), twin("numpy")
    assert (one.floats, one.zero_dims) == (other.floats, other.zero_dims)
    assert all(one.of_pair(a, b) is other.of_pair(a, b) for a in ALL_DTYPES for b in ALL_DTYPES)
    assert one is again is copy.deepcopy(one)
    three = [torch.ones(1, dtype=dtype) for dtype in (torch.bfloat16, torch.int16, torch.uint16)]

    def cat(region: tp.promotion, compiles: bool) -> torch.Tensor:
        def run() -> torch.Tensor:
            with region:
                return torch.cat(three)

        return torch.compile(run, backend="aot_eager")() if compiles else run()  # type: ignore[no-any-return]

    for compiles in (False, True):
        assert cat(tp.promotion(one), compiles).dtype is one.common(three) is torch.float32
        with pytest.raises(RuntimeError, match="depend on the order"):  # Dynamo wraps a PromotionRuleError
            cat(tp.promotion(other), compiles)


#: The everyday run has every function with half of the other libraries' rules, and two with rules of one's own.
PAIRED = [
    pytest.param(
        *(name, f),
        id=f"{f.__name__}-{name}",
        marks=pytest.mark.slow if (f not in TWO if name in OWN_RULES else (i + j) % 2) else (),
    )
    for i, name in enumerate((*RULES, *OWN_RULES))
    for j, f in enumerate((*FLOATS, *COMMON))
]


@pytest.mark.parametrize(("name", "function"), PAIRED)
def test_every_pair(name: str, function: Callable[..., Any]) -> None:
    rule = OWN_RULES[name]() if name in OWN_RULES else promotion_rule(name)
    kinds = set()
    for (a, b), (first, second) in itertools.product(itertools.product(ALL, ALL), PAIRS_OF_SHAPES):
        operands = [operand(a, first), operand(b, second)]
        wanted = expected(rule, function, operands, function in FLOATS)
        assert got(rule, function, operands) == wanted, (name, function, a, b, first, second)
        kinds.add(wanted if wanted == "raises" else wanted[0])
    assert "result" in kinds


CHOICE = torch.tensor([True, False, True])
POLYNOMIALS = [
    function for name in dir(torch.special) if "_polynomial_" in name for function in [getattr(torch.special, name)]
]
#: Calls on a tensor and a number, most of which have an overload of their own, and whether they compute floats.
OF_NUMBERS: dict[str, tuple[Callable[..., Any], bool]] = {
    **{f.__name__: (f, False) for f in (operator.add, operator.mul, operator.eq)},
    "where.ScalarOther": (lambda x, number: torch.where(CHOICE, x, number), False),
    "where.ScalarSelf": (lambda x, number: torch.where(CHOICE, number, x), False),
    "Tensor.where": (lambda x, number: x.where(CHOICE, number), False),
    **{f"{f.__name__}.n_scalar": (f, True) for f in POLYNOMIALS},
    **{f"{f.__name__}.x_scalar": (lambda x, number, f=f: f(number, x), True) for f in POLYNOMIALS},
}


@pytest.mark.parametrize("rule", ["torch", *RULES])
def test_overloads_of_numbers(rule: str) -> None:
    assert len(POLYNOMIALS) > 10
    for name, (function, floats) in OF_NUMBERS.items():
        results = set()
        for dtype, number, shape in itertools.product(ALL, (True, 3, 2.5, 1j), ((3,), ())):
            operands = [operand(dtype, shape), number]
            if rule == "torch":  # it is stock's
                assert got(rule, function, operands) == outcome(functools.partial(function, *operands)), (name, dtype)
                continue
            wanted = expected(promotion_rule(rule), function, operands, floats)
            assert got(rule, function, operands) == wanted, (name, rule, dtype, number, shape)
            results.add(wanted if wanted == "raises" else wanted[0])
        assert results >= ({"result", "raises"} if rule in ("array_api", "strict") else set()), name


def test_where_of_two_numbers_has_the_dtype_of_the_rule() -> None:
    stock = {(2.5, 1): torch.float32, (1j, 0.1): torch.complex64, (1, 2): torch.int64, (True, False): torch.bool}
    wide = {**stock, (2.5, 1): torch.float64, (1j, 0.1): torch.complex128}
    own = tp.make_rule("half", {}, numbers={(float, torch.bool): torch.float16})
    rules: list[Any] = [(rule, wide if rule == "numpy" else stock) for rule in ("torch", *RULES)]
    rules.append((own, {**stock, (2.5, 1): torch.float16}))
    for (rule, dtypes), choice in itertools.product(rules, (CHOICE, CHOICE[0], CHOICE.expand(2, 3).t())):
        for numbers, dtype in dtypes.items():
            a, b = (torch.tensor(number, dtype=dtype) for number in numbers)
            with tp.promotion(rule):
                found = torch.where(choice, *numbers)
            assert described(found) == described(torch.where(choice, a, b)), (rule, numbers)
            assert promotion_rule(rule).common(numbers) is dtype


def test_out_of_an_overload_of_numbers() -> None:
    ints, polynomial = torch.arange(3, dtype=torch.int32), torch.special.chebyshev_polynomial_t
    with tp.promotion("numpy"):
        single = polynomial(0.1, ints, out=torch.empty(3))
        with pytest.raises(PromotionWriteError, match=r"chebyshev_polynomial_t.n_scalar_out.*does not write to int32"):
            polynomial(ints, 2, out=ints)
    assert torch.equal(single, polynomial(0.1, ints.double()).float())
    assert torch.equal(ints, torch.arange(3, dtype=torch.int32))
    with tp.promotion("strict"), pytest.raises(PromotionRuleError, match="a Python float would change"):
        polynomial(0.1, ints, out=torch.empty(3))
    with tp.promotion("numpy"), pytest.raises(PromotionWriteError, match=r"aten::polygamma_"):
        ints.polygamma_(1)


def test_gradients_through_where_of_a_number() -> None:
    half = operand(torch.float16, (3,)).requires_grad_()
    for rule, dtype, number in (("numpy", torch.complex64, 1j), ("jax", torch.float16, 2.5)):
        with tp.promotion(rule):
            results = [torch.where(CHOICE, half, number), torch.where(CHOICE, number, half)]
        for result, wanted in zip(results, (CHOICE, ~CHOICE), strict=True):
            assert result.dtype is dtype
            (gradient,) = torch.autograd.grad(result.abs().sum(), half)
            assert torch.equal(gradient, torch.where(wanted, half.sign(), 0).half())


def test_where_of_a_number_on_another_device() -> None:
    with FakeTensorMode(), tp.promotion("numpy"):
        choice, ints = torch.empty(3, dtype=torch.bool, device="cuda"), torch.empty(3, dtype=torch.int32, device="cuda")
        results = [torch.where(choice, ints, 2.5), torch.where(choice, 2.5, ints), torch.where(choice, 2.5, 1)]
        assert [(result.dtype, result.device.type) for result in results] == [(torch.float64, "cuda")] * 3


@pytest.mark.parametrize("rule", RULES)
def test_where_lists_and_three_operands(rule: str) -> None:
    condition = torch.tensor([True, False, True])
    a, b = operand(torch.float32, (3,)), operand(torch.float64, ())
    calls: dict[str, Callable[..., Any]] = {
        "where": lambda x, y: torch.where(condition, x, y),
        "stack": lambda x, y: torch.stack([x, y.expand(3)]),
        "hstack": lambda x, y: torch.hstack([x, y.expand(3)]),
        "concat": lambda x, y: torch.concat([x, y.expand(3)]),
        "lerp": lambda x, y: torch.lerp(x, y, y),
        "addcmul": lambda x, y: torch.addcmul(x, x, y),
        "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
        "clamp": lambda x, y: torch.clamp(x, y, x),
        "minimum": torch.minimum,
        "pow": torch.pow,
        "remainder": torch.remainder,
        "foreach": lambda x, y: torch._foreach_add([x, x], [y, x]),
    }
    for name, call in calls.items():
        wanted: Any
        if rule == "strict":
            wanted = "raises"
        elif name == "foreach":
            wanted = outcome(lambda: [a.double() + b, a + a])
        else:
            wanted = outcome(lambda call=call: call(a.double(), b))
        assert got(rule, call, [a, b]) == wanted, (rule, name)


def test_in_place_computes_in_the_common_dtype() -> None:
    for other_shape in ((3,), ()):
        x, y = operand(torch.float32, (3,)), operand(torch.float64, other_shape)
        wanted = (x.double() * y).float()
        version, address = x._version, x.data_ptr()
        with tp.promotion("numpy"):
            x *= y
        assert torch.equal(x, wanted)
        assert x._version > version
        assert x.data_ptr() == address


@pytest.mark.parametrize("rule", ["jax", "numpy"])
def test_a_higher_kind_is_not_written(rule: str) -> None:
    x = torch.ones(3, dtype=torch.int32)
    with tp.promotion(rule), pytest.raises(PromotionWriteError, match=r"aten::add_.Tensor .*int32.*does not write"):
        x += torch.ones(3)
    with tp.promotion(rule), pytest.raises(PromotionWriteError):
        x /= x
    with tp.promotion(rule), pytest.raises(PromotionWriteError, match=r"aten::add.out"):
        torch.add(x.float(), x.float(), out=x)
    assert torch.equal(x, torch.ones(3, dtype=torch.int32))
    assert x._version == 0


@pytest.mark.parametrize("rule", RULES)
def test_real_results_of_complex_operands_are_written_to_real_tensors(rule: str) -> None:
    z = operand(torch.complex64, (3,))
    angles, distance = z.angle(), torch.dist(z, 2 * z)
    with tp.promotion(rule):
        assert torch.equal(torch.angle(z, out=torch.empty(3)), angles)
        assert torch.equal(torch.ops.aten.dist.out(z, 2 * z, out=torch.empty(())), distance)
    if rule == "numpy":
        with tp.promotion(rule):
            assert torch.dist(z.to(torch.complex128), z.real.int()).dtype is torch.float64
            assert torch.dist(z.real, z.real.int()).dtype is torch.float64
        with tp.promotion(rule), pytest.raises(PromotionWriteError):
            torch.angle(z, out=torch.empty(3, dtype=torch.int32))


def test_numpy_writes_unsigned_to_signed_and_not_back() -> None:
    x, y = torch.ones(3, dtype=torch.uint8), torch.ones(3, dtype=torch.int8)
    with tp.promotion("numpy"):
        y += x
        assert torch.equal(y, torch.full((3,), 2, dtype=torch.int8))
        with pytest.raises(PromotionWriteError):
            x += y


@pytest.mark.parametrize("rule", ["array_api", "strict"])
def test_what_is_computed_is_what_is_written(rule: str) -> None:
    x = torch.ones(3)
    with tp.promotion(rule), pytest.raises(PromotionRuleError):
        x += torch.ones(3, dtype=torch.float64)
    with tp.promotion(rule):
        x += 2
        x += torch.ones(3)
    assert torch.equal(x, torch.full((3,), 4.0))


WITHOUT_OPERANDS: dict[str, Callable[[], Any]] = {
    "no tensors": lambda: torch.cat([]),
    "numbers alone": lambda: torch.where(torch.ones(3) > 0, 1.0, 2),
    "empty lists": lambda: torch._foreach_add([], []),
    "lists of different lengths": lambda: torch._foreach_add([torch.ones(3)], [torch.ones(3), torch.ones(3)]),
    "an undefined tensor": lambda: torch.ops.aten.atan2.default(None, torch.ones(3)),
    "an undefined tensor of an op outside of the table": lambda: torch.ops.aten.add.Tensor(None, torch.ones(3)),
}


@pytest.mark.parametrize("rule", ["torch", *RULES])
@pytest.mark.parametrize("call", WITHOUT_OPERANDS.values(), ids=WITHOUT_OPERANDS)
def test_a_call_that_lacks_operands_is_left_to_pytorch(rule: str, call: Callable[[], Any]) -> None:
    def told() -> Any:
        try:
            return call().tolist()
        except (RuntimeError, ValueError) as error:
            return type(error), str(error).partition("Exception raised from")[0]

    expected = told()
    with tp.promotion(rule):
        assert told() == expected


PRODUCTS: dict[str, Callable[..., Any]] = {
    "matmul": operator.matmul,
    "mm": torch.mm,
    "bmm": lambda a, b: torch.bmm(a[None], b[None]),
    "linear": torch.nn.functional.linear,
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "tensordot": lambda a, b: torch.tensordot(a, b, 1),
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "mv": lambda a, b: torch.mv(a, b[0]),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "inner": torch.inner,
}


@pytest.mark.parametrize("call", PRODUCTS.values(), ids=PRODUCTS)
def test_matmul_true_brings_products(call: Callable[..., Any]) -> None:
    a, b = (operand(dtype, (3, 3)).requires_grad_() for dtype in (torch.float16, torch.bfloat16))
    with pytest.raises(RuntimeError):
        call(a, b)
    with tp.promotion("jax"), pytest.raises(RuntimeError):
        call(a, b)
    for rule in ("jax", "torch"):
        with tp.promotion(rule, matmul=True):
            product = call(a, b)
        assert torch.equal(product, call(a.float(), b.float()))
        assert [grad.dtype for grad in torch.autograd.grad(product.sum(), (a, b))] == [a.dtype, b.dtype]
    with tp.promotion("strict", matmul=True), pytest.raises(PromotionRuleError, match="strict"):
        call(a, b)
