"""`infer` on single calls, compared with expected values and with PyTorch's results."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.testing._internal import common_methods_invocations as op_dbs
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_promote.reference.ops.call import Signature, signature_of
from torch_promote.reference.ops.call import described as described_tensor
from torch_promote.reference.ops.dtype_rules import DTYPE_RULES
from torch_promote.reference.ops.elementwise_rules import ELEMENTWISE_RULES
from torch_promote.reference.ops.infer import EACH, NO_RULE, Inference, infer, rule_table
from torch_promote.reference.promotion import Operand, PromotionError

# --- Calls of aten ops that PyTorch's op database makes, changed at random: another dtype, layout or size, a number


aten = torch.ops.aten
#: The dtypes that a tensor is changed to; the first are the likeliest.
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8),
    *(torch.int8, torch.int16, torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
)
NUMBERS = (True, 2, 1, 0, -1, 2.5, 1 + 1j)
DEFAULT_DTYPES = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: What to do with a sample.
Run = Callable[[OpInfo, SampleInput], None]
#: A change of one tensor.
Change = Callable[[torch.Tensor, random.Random], Any]


@dataclass(frozen=True)
class RandomCall:
    """A call of an op, and the default dtype to make it in."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    default_dtype: torch.dtype = torch.float32


class Recorder(TorchDispatchMode):
    """Keeps some calls of each aten op, with copies of their tensors: a call may write to its own."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.calls: dict[Any, dict[object, RandomCall]] = defaultdict(dict)
        self._most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and len(kept := self.calls[func]) < self._most:
            key = (tuple(x.dtype if torch.is_tensor(x) else type(x) for x in tree_leaves((args, kwargs))), len(args))
            if key not in kept:
                kept[key] = RandomCall(func, *copied((args, kwargs)))
        return func(*args, **kwargs)


def copied(tree: Any) -> Any:
    """Copies tensors as plain ones with their strides; memory that elements share, they go on sharing."""
    return mapped(lambda tensor: _copied(tensor.detach()), tree)


def mapped(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Maps the tensors of a call's arguments. `tree_map_only` takes longer than most of the functions."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) in (tuple, list):
        return type(tree)([mapped(function, each) for each in tree])
    return {name: mapped(function, each) for name, each in tree.items()} if type(tree) is dict else tree


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested:
        made = tensor.clone()  # faster than `deepcopy`, but closes gaps and resolves conjugates
        if made.stride() == tensor.stride() and not tensor.is_conj() and not tensor.is_neg():
            return made
    return copy.deepcopy(tensor)


def recorded(most: int, limit: int = 1) -> dict[Any, list[RandomCall]]:
    """Returns calls of each aten op that the op database makes, forward, backward, in place, with out= and foreach."""
    recorder = Recorder(most)
    foreach = [
        op
        for name in dir(op_dbs)
        if name.startswith("foreach_") and name.endswith("_db")
        for op in getattr(op_dbs, name)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usual, lists = (list(samples(ops, False, limit)) for ops in (op_dbs.op_db, foreach))
        sources: Iterable[tuple[Run, Iterable[tuple[OpInfo, SampleInput]]]] = (
            (forward, usual),
            (backward, samples(op_dbs.op_db, True, limit)),
            (variants, usual),
            (forward, lists),
            (in_place, lists),
        )
        for run, made in sources:
            for op, sample in made:
                try:
                    with recorder:
                        run(op, sample)
                except Exception:  # keep the calls dispatched until then
                    continue
    return {op: list(calls.values()) for op, calls in recorder.calls.items() if calls}


def differs(inferred: Inference, op: Any, result: Any) -> str | None:
    """The difference between an inference and a result, or None."""
    returns = op._schema.returns
    results = (
        [leaf for leaf in tree_leaves(result) if leaf is None or isinstance(leaf, torch.Tensor)] if returns else []
    )
    dtypes = tuple(None if leaf is None else leaf.dtype for leaf in results)
    if inferred.dtypes != dtypes:
        return f"dtypes {inferred.dtypes} against {dtypes}"
    if inferred.shape is not None and inferred.shape != tuple(results[0].shape):
        return f"shape {inferred.shape} against {tuple(results[0].shape)}"
    if inferred.strides is not None and inferred.strides != results[0].stride():
        return f"strides {inferred.strides} against {results[0].stride()}"
    return None


def described(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else tensor.layout


def forward(op: OpInfo, sample: SampleInput) -> None:
    """Runs a sample."""
    op(sample.input, *sample.args, **sample.kwargs)


def backward(op: OpInfo, sample: SampleInput) -> None:
    """Runs a sample and its backward."""
    outputs = [out for out in tree_leaves(op(sample.input, *sample.args, **sample.kwargs)) if torch.is_tensor(out)]
    outputs = [out for out in outputs if out.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])


def variants(op: OpInfo, sample: SampleInput) -> None:
    """Runs a sample's in-place and out= variants, where there are any."""
    inplace = op.get_inplace()
    if inplace is not None:
        copy = tree_map_only(torch.Tensor, torch.clone, (sample.input, sample.args, sample.kwargs))
        inplace(copy[0], *copy[1], **copy[2])
    if op.supports_out:
        made = op(sample.input, *sample.args, **sample.kwargs)
        op(sample.input, *sample.args, **sample.kwargs, out=tree_map_only(torch.Tensor, torch.empty_like, made))


def samples(ops: Iterable[OpInfo], grad: bool, limit: int | None) -> Iterator[tuple[OpInfo, SampleInput]]:
    """Yields samples of every dtype that an op supports, or is differentiable in."""
    for op in ops:
        if grad and not op.supports_autograd:
            continue
        torch.manual_seed(0)
        for dtype in sorted(op.supported_dtypes("cpu"), key=str):
            if not grad or dtype.is_floating_point or dtype.is_complex:
                # Not through op.sample_inputs, which walks the stack for each sample to name the test that it is for.
                for sample in itertools.islice(op.sample_inputs_func(op, "cpu", dtype, grad), limit):
                    yield op, sample


def in_place(op: OpInfo, sample: Any) -> None:
    """Runs the in-place form of a foreach sample."""
    op.inplace_variant(sample.input, *sample.args, **sample.kwargs)


def forms(call: RandomCall) -> Iterator[RandomCall]:
    """Yields a call, and the same call of the op's in-place and out= overloads, which the outputs are new for."""
    yield call
    signature = signature_of(call.op)
    inputs = _inputs(signature)
    namespace, name = signature.name.split(".")[0].split("::")
    if any(argument.written for argument in signature.arguments):
        return
    for packet in (getattr(getattr(torch.ops, namespace), found, None) for found in (name, name + "_")):
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            other = signature_of(op)
            outs = [argument for argument in other.arguments if argument.is_out]
            if op is call.op or _inputs(other) != inputs or any("List" in out.type for out in outs):
                continue
            yield RandomCall(op, call.args, call.kwargs | {out.name: torch.empty(0) for out in outs})


def _inputs(signature: Signature) -> list[tuple[str, str]]:
    return [(argument.name, argument.type) for argument in signature.arguments if not argument.is_out]


def changed(call: RandomCall, rng: random.Random) -> RandomCall:
    """Applies random changes to a call, on copies of its tensors."""
    tree = copied((call.args, call.kwargs))
    changes = changes_of(call.op)
    outs = {a.name for a in signature_of(call.op).arguments if a.is_out}
    for name in sorted(outs & call.kwargs.keys()):
        tree[1][name] = mapped(lambda own: _output(own, tree, rng), tree[1][name])
    if rng.random() < 0.3:
        tree = _other_argument(signature_of(call.op), tree, rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        leaves = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
        if not leaves:
            break
        chosen, change = rng.choice(leaves), rng.choice(changes)
        tree = mapped(lambda x: change(x, rng) if x is chosen else x, tree)  # noqa: B023
    return RandomCall(call.op, *tree, rng.choice(DEFAULT_DTYPES))


def _other_argument(signature: Signature, tree: Any, rng: random.Random) -> Any:
    """Another value for an argument that is no tensor: a dtype, a number, a flag."""
    args, kwargs = tree
    values = {
        "Optional[ScalarType]": (None, *DTYPES),
        "ScalarType": DTYPES,
        "number": NUMBERS,
        "Optional[number]": (None, *NUMBERS),
        "bool": (False, True),
    }
    places = [(place, a) for place, a in enumerate(signature.arguments) if a.type in values]
    if not places:
        return tree
    place, argument = rng.choice(places)
    value = rng.choice(values[argument.type])
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, kwargs | {argument.name: value}


def _output(own: torch.Tensor, tree: Any, rng: random.Random) -> torch.Tensor:
    """An output of some tensor's dtype and shape, or of another dtype, or with no elements."""
    tensors = [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.layout is torch.strided]
    like = rng.choice(tensors) if tensors and own.numel() == 0 else own
    dtype = rng.choice((like.dtype, like.dtype, torch.float32, torch.bool, torch.int64, rng.choice(DTYPES)))
    return torch.empty(like.shape if rng.random() < 0.5 else (0,), dtype=dtype)


@functools.cache
def changes_of(op: Any) -> tuple[Change, ...]:
    """The changes that an op's kernels refuse or support without corrupting memory.

    Those of layers and of gradients read past the end of tensors of other sizes, and LAPACK's of tensors with gaps.
    """
    name, family = _name(op), _family(op)
    if family is None:
        return KEEPING_LAYOUT
    unchecked = family in ("layers", "matrices") or (name.startswith("aten::_") and family != "foreach")
    if not unchecked or name.removeprefix("aten::").removesuffix("_backward") in CHECKED:
        return CHANGES
    return KEEPING_LAYOUT if family == "matrices" else KEEPING_SIZES


def _name(op: Any) -> str:
    return signature_of(op).name.split(".")[0].removesuffix("_")


@functools.cache
def _family(op: Any) -> str | None:
    name = _name(op)
    return next((entry.family for entry in rule_table().values() if entry.op.split(".")[0] == name), None)


#: Layers and products that are made of elementwise ops, or check their sizes.
CHECKED = frozenset(
    (
        *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"),
        *("binary_cross_entropy_with_logits", "mm", "bmm", "addmm", "mv", "addmv", "dot", "vdot", "addr", "baddbmm"),
        *("addbmm", "glu", "rrelu_with_noise", "native_dropout", "log_sigmoid_forward", "linalg_cross", "_softmax"),
        *("_log_softmax", "_to_copy"),
    )
)


# --- what can be changed of one tensor


def other_dtype(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Another dtype, in the same place in memory as far as `to` keeps it."""
    return tensor.to(rng.choice(DTYPES[: rng.choice((4, 12, 12, len(DTYPES)))]))


def zero_dim(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    return tensor.flatten()[0].clone() if tensor.numel() else tensor.new_ones(())


def number(tensor: torch.Tensor, rng: random.Random) -> Any:
    return rng.choice(NUMBERS)


def other_strides(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same values in memory of another order, with gaps, or expanded from one slice."""
    kind, ndim = rng.choice(("permute", "permute", "slice", "expand", "channels_last")), tensor.ndim
    if ndim == 0 or tensor.layout is not torch.strided:
        return tensor
    if kind == "channels_last" and ndim in (4, 5):
        memory_format = torch.channels_last if ndim == 4 else torch.channels_last_3d
        return tensor.contiguous(memory_format=memory_format)
    dim = rng.randrange(ndim)
    if kind == "slice":
        wide = torch.repeat_interleave(tensor, 2, dim)
        return wide.index_select(dim, torch.arange(wide.shape[dim])).unfold(dim, 1, 2).squeeze(-1)
    if kind == "expand" and tensor.shape[dim] > 0:
        return tensor.narrow(dim, 0, 1).expand(tensor.shape)
    perm = rng.sample(range(ndim), ndim)
    return tensor.permute(perm).contiguous().permute([perm.index(d) for d in range(ndim)])


def other_size(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """A size of 0 or 1, a dimension of size 1 more, or one dimension less."""
    if tensor.ndim == 0 or tensor.layout is not torch.strided:
        return tensor
    dim, size = rng.randrange(tensor.ndim), rng.choice((0, 1, 1, None, -1))
    if size is None:
        return tensor.unsqueeze(dim)
    if size == -1:
        return tensor.select(dim, 0) if tensor.shape[dim] else tensor
    return tensor.narrow(dim, 0, min(size, tensor.shape[dim]))


#: Changes of one tensor, by how often they are made.
KEEPING_LAYOUT: tuple[Change, ...] = (*itertools.repeat(other_dtype, 4), number)
KEEPING_SIZES = (*KEEPING_LAYOUT, *itertools.repeat(other_strides, 2))
CHANGES = (*KEEPING_SIZES, zero_dim, other_size)


def overload(name: str) -> torch._ops.OpOverload | None:
    op, _, overload_name = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, op, None), overload_name or "default", None)


def test_a_line_has_a_rule_for_each_result() -> None:
    for entry in rule_table().values():
        op = overload(entry.op)
        signature = None if op is None else signature_of(op)  # None: an op that another release has
        if entry.terms[0].rule == EACH:
            ((inner,),) = (term.names for term in entry.terms)
            assert rule_table()[f"aten::{inner}"].terms[0].rule != EACH
            assert signature is None or [type_ for type_, _ in signature.returns] == ["List[Tensor]"]
            continue
        for term in entry.terms:
            is_rule = term.rule in DTYPE_RULES or term.rule in ELEMENTWISE_RULES
            assert is_rule != isinstance(getattr(torch, term.rule, None), torch.dtype), entry
        if signature is not None:
            assert len(entry.terms) == len(signature.returns), entry
            names = {argument.name for argument in signature.arguments}
            assert {name for term in entry.terms for name in term.names if not name.isdigit()} <= names, entry
            assert len(entry.terms) == 1 or not any(term.rule in ELEMENTWISE_RULES for term in entry.terms), entry


def test_every_rule_is_used() -> None:
    used = {term.rule for entry in rule_table().values() for term in entry.terms}
    assert set(DTYPE_RULES) | set(ELEMENTWISE_RULES) | {EACH} <= used


F, D, H, I8 = torch.float32, torch.float64, torch.float16, torch.int64


def t(dtype: torch.dtype, *shape: int) -> Operand:
    return Operand(dtype, shape or (2, 2))


@pytest.mark.parametrize(
    ("op", "args", "text"),
    [
        (aten.mm.default, (t(F), t(D)), "aten::mm takes tensors of one dtype, got float32 and float64"),
        (aten.dot.default, (t(F, 2), t(H, 2)), "aten::dot takes tensors of one dtype"),
        (aten.mean.default, (t(I8),), "aten::mean is defined for floating and complex dtypes, got int64"),
        (aten.var.correction, (t(torch.bool),), "aten::var.correction is defined for floating and complex dtypes"),
        (aten.add.Tensor, (t(torch.uint16), t(I8)), "uint16 and int64 have no common dtype"),
    ],
)
def test_what_pytorch_refuses(op: Any, args: Any, text: str) -> None:
    with pytest.raises(PromotionError, match=text):
        infer(op, args)
    tensors = [torch.empty(x.shape, dtype=x.dtype) if isinstance(x, Operand) else x for x in args]
    with pytest.raises(RuntimeError):
        op(*tensors)


def test_an_op_without_a_rule() -> None:
    assert infer(torch.ops.prims.svd.default, (torch.ones(2, 2),)) is NO_RULE
    assert not NO_RULE


@dataclass
class Comparison:
    """The counts of compared calls, calls without a rule, and calls that PyTorch refuses, by overload."""

    compared: Counter[str] = field(default_factory=Counter)
    unruled: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)

    def make(self, call: RandomCall) -> None:
        """Infers a call, makes it, and compares."""
        name, before = str(call.op), mapped(described, (call.args, call.kwargs))
        with default_dtype(call.default_dtype), torch.no_grad():
            try:
                inferred: Any = infer(call.op, call.args, call.kwargs)
            except Exception as error:
                inferred = error
            try:
                result = call.op(*call.args, **call.kwargs)
            except Exception:
                self.refused[name] += 1
                return
        if isinstance(inferred, Inference):
            difference = differs(inferred, call.op, result)
        elif isinstance(inferred, Exception):
            difference = f"raises {inferred!r}"
        else:
            self.unruled[name] += 1
            return
        self.compared[name] += 1
        if difference is not None:
            self.wrong.setdefault(name, f"{before}, default dtype {call.default_dtype}: {difference}")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compare(calls: dict[Any, list[RandomCall]], count: int) -> Comparison:
    """Makes and compares `count` changed calls of each op, and five times as many of elementwise ops."""
    comparison = Comparison()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, kept in calls.items():
            rng = random.Random(f"{op} ")
            started = [form for call in kept for form in forms(call)]
            is_elementwise = _family(op) == "elementwise"
            for number in range(count * 5 if is_elementwise else count):
                try:
                    call = changed(started[number % len(started)], rng)
                except (RuntimeError, TypeError, NotImplementedError):  # a change that its tensors do not take
                    continue
                comparison.make(call)
    return comparison


@pytest.fixture
def tensors_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch prints all arguments in the error of a call that does not fit the schema; thousands do not fit."""
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda tensor: "tensor")


@functools.cache
def calls_of_the_op_database(most: int, limit: int) -> dict[Any, list[RandomCall]]:
    """Several tests use them. `changed` copies the tensors that it changes."""
    return recorded(most, limit)


def test_calls_of_the_op_database() -> None:
    """Calls of each overload in each dtype: forward, backward, in place, with out= and on lists."""
    result = Comparison()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op, calls in calls_of_the_op_database(12, 2).items():
            for call in calls:
                result.make(RandomCall(op, *copied((call.args, call.kwargs))))
    assert result.wrong == {}, "\n".join(f"{name}: {text}" for name, text in result.wrong.items())
    ruled, unruled = result.compared.keys(), result.unruled.keys() - result.compared.keys()
    assert len(ruled) > 700
    assert len(ruled) > 0.95 * len(ruled | unruled), unruled


@pytest.mark.usefixtures("tensors_are_not_printed")
@pytest.mark.parametrize(
    ("most", "limit", "count"),
    [(12, 2, 5), pytest.param(12, 3, 300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_changed_calls_of_the_op_database(most: int, limit: int, count: int) -> None:
    """`count` changed calls of each overload and its in-place and out= forms."""
    result = compare(calls_of_the_op_database(most, limit), count)
    assert result.wrong == {}, "\n".join(f"{name}: {text}" for name, text in result.wrong.items())
    assert result.unruled == {}
    assert len(result.compared) > 1000
    assert result.compared.total() > count * 400
    # Each kind of form takes part.
    assert sum(name.startswith("aten._foreach") for name in result.compared) > 80
    assert sum("_." in name for name in result.compared) > 150
    assert sum("out" in name for name in result.compared) > 150


def test_no_rule_loses_the_device() -> None:
    """An op's result for CPU tensors equals that for the same tensors on another device."""

    def moved(tensor: torch.Tensor) -> Operand:
        return described_tensor(tensor)._replace(device="cuda")

    compared = 0
    for op, calls in calls_of_the_op_database(12, 2).items():
        for call in calls:
            try:
                on_cpu = infer(call.op, call.args, call.kwargs)
            except PromotionError:  # PyTorch refuses some of its own samples
                continue
            args, kwargs = mapped(moved, (call.args, call.kwargs))
            elsewhere = infer(call.op, args, kwargs)
            # CUDA's kernels keep the statistics of half precision in float32.
            if isinstance(on_cpu, Inference) and "statistics" not in on_cpu.rule:
                assert isinstance(elsewhere, Inference), op
                assert (elsewhere.dtypes, elsewhere.shape) == (on_cpu.dtypes, on_cpu.shape), op
                compared += 1
    assert compared > 1000
