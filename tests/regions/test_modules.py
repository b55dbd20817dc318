"""Calls of modules with policies, of their own and of a region's tables: copies, wrappers, compilers, threads."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import torch_promote as tp
from helpers.checkpointing import Block
from helpers.comparison import assert_same
from helpers.subprocesses import run_python
from torch_promote.errors import OptionError
from torch_promote.regions.module_policies import module_policies, remove_module_policy, set_module_policy

OVERRIDES = {"linear": "float16"}
POLICIES = pytest.mark.parametrize("policy", ["fp32", OVERRIDES], ids=["fp32", "overrides"])


ours = functools.partial(tp.my_autocast, "cpu")


def model_of(policy: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    if policy is not None:
        set_module_policy(model, {"2": policy})
    return model


def dtype_of(model: Callable[..., torch.Tensor], around: Callable[[], Any] = ours) -> torch.dtype:
    with around():
        return model(torch.ones(2, 4)).dtype


def expected_dtype(policy: Any) -> torch.dtype:
    return torch.float32 if policy == "fp32" else torch.float16


def train(model: Callable[..., torch.Tensor], parameters: list[Any], around: Callable[[], Any] = ours) -> list[Any]:
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for parameter in parameters:
        parameter.grad = None
    with around():
        output = model(x)
        output.float().square().sum().backward()  # a compiled function has the backward of the region of its call
    return [output, x.grad, *(parameter.grad for parameter in parameters)]


LOW, HALF, SINGLE = torch.bfloat16, torch.float16, torch.float32
X = torch.ones(2, 4)


def policy_of(tables: Any) -> tp.Policy:
    return tp.Policy.stock().override_modules(tables)


#: Tables for the last layer of `model_of`.
FP32 = policy_of({"2": "fp32"})
FP16 = policy_of({"2": {"linear": "float16"}})


def region(policy: Any, model: nn.Module | None, **more: Any) -> Any:
    return tp.my_autocast("cpu", policy=policy, model=model, **more)


def state_of(model: nn.Module) -> dict[str, Any]:
    """The attributes and forward pre-hooks of every module."""
    return {
        name: [dict(vars(module)), dict(module._forward_pre_hooks), dict(module._forward_pre_hooks_with_kwargs)]
        for name, module in model.named_modules()
    }


# --- copies, files, parametrizations and wrappers of modules


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": through_torch_save,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@POLICIES
@pytest.mark.parametrize("how", COPIES)
def test_copies_have_the_policy(policy: Any, how: str) -> None:
    model = model_of(policy)
    copied = COPIES[how](model)
    assert module_policies(copied) == {"2": policy}
    assert repr(copied) == repr(model)
    assert_same(train(copied, list(copied.parameters())), train(model, list(model.parameters())))
    remove_module_policy(copied)
    if how != "copy":  # a shallow copy has the same modules in it
        assert type(copied[2]) is nn.Linear
        assert dtype_of(copied) is torch.bfloat16
        assert module_policies(model) == {"2": policy}
        assert dtype_of(model) is expected_dtype(policy)


def test_file_read_in_another_process(tmp_path: Any) -> None:
    """The number of a set of overrides is valid only in one process."""
    torch.save(model_of(OVERRIDES), tmp_path / "model.pt")
    script = """
import sys, torch, torch_promote as tp
tp.my_autocast("cpu", overrides={"mm": "fp32"}); tp.my_autocast("cpu", overrides={"exp": "fp32"})
model = torch.load(sys.argv[1], weights_only=False)
with tp.my_autocast("cpu"):
    print(model(torch.ones(2, 4)).dtype)
"""
    done = run_python(script, str(tmp_path / "model.pt"))
    assert done.stdout == "torch.float16\n", done.stderr


def test_module_dies_with_its_last_reference() -> None:
    module = nn.Linear(4, 4)
    set_module_policy(module, {"": "fp32"})
    train(module, [])
    died = weakref.ref(module)
    gc.collect()
    gc.disable()
    try:
        del module
        assert died() is None
    finally:
        gc.enable()


# --- what else extends or wraps a module


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


@POLICIES
@pytest.mark.parametrize("of_a_copy", [True, False])
@pytest.mark.parametrize("policy_first", [True, False])
def test_parametrized(policy: Any, policy_first: bool, of_a_copy: bool) -> None:
    model = model_of(policy if policy_first else None)
    weight = model[2].weight.detach().clone()
    parametrize.register_parametrization(model[2], "weight", Double())
    if not policy_first:
        set_module_policy(model, {"2": policy})
    parametrize.register_parametrization(model[2], "bias", Double())
    model = copy.deepcopy(model) if of_a_copy else model
    assert dtype_of(model) is expected_dtype(policy)
    assert torch.equal(model[2].weight, weight * 2)
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(model[2], name, leave_parametrized=True)
        assert module_policies(model) == {"2": policy}
        assert dtype_of(model) is expected_dtype(policy)
    remove_module_policy(model)
    assert type(model[2]) is nn.Linear
    assert dtype_of(model) is torch.bfloat16
    assert torch.equal(model[2].weight, weight * 2)


# --- Accelerate replaces forward, and restores it

# As Accelerate 1.15 does it (hooks.py, accelerator.py, utils/other.py, utils/operations.py), so that no test needs it.


def add_hook_to_module(module: Any) -> None:
    """A hook that doubles the inputs, and adds 1 to the output."""
    old_forward = module.forward
    module._old_forward = old_forward

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module._old_forward(*(arg * 2 for arg in args), **kwargs) + 1

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old_forward)


def remove_hook_from_module(module: Any) -> None:
    module.forward = module._old_forward
    del module._old_forward


@POLICIES
@pytest.mark.parametrize("policy_first", [True, False])
@pytest.mark.parametrize("removed_first", ["policy", "hook"])
def test_accelerate_hook(policy: Any, policy_first: bool, removed_first: str) -> None:
    model = model_of(policy if policy_first else None)
    add_hook_to_module(model[2])
    if not policy_first:
        set_module_policy(model, {"2": policy})
    x = torch.ones(2, 4)
    with ours():
        hidden = model[1](model[0](x))
        assert_same(model(x), model_of(policy)[2](hidden * 2) + 1)
    if removed_first == "policy":
        remove_module_policy(model)
        assert dtype_of(model) is LOW
        with ours():
            assert_same(model(x), model_of()[2](hidden * 2) + 1)
        remove_hook_from_module(model[2])
    else:
        remove_hook_from_module(model[2])
        if policy_first:
            assert dtype_of(model) is expected_dtype(policy)
        remove_module_policy(model)
    with ours():
        assert_same(model(x), model_of()(x))


def test_captured_forward() -> None:
    model = model_of("fp32")
    captured, x = model[2].forward, torch.ones(2, 4)
    with ours():
        assert captured(x).dtype is model[2].forward(x).dtype is SINGLE
        set_module_policy(model, {"2": OVERRIDES})
        assert captured(x).dtype is torch.float16
        remove_module_policy(model)
        assert captured(x).dtype is LOW
        set_module_policy(model, {"2": "fp32"})
        assert captured(x).dtype is SINGLE
    assert captured.__self__ is model[2]
    assert captured.__name__ == "forward"
    del model
    gc.collect()
    with pytest.raises(tp.errors.RegionError, match=r"the module of this forward no longer exists"):
        captured(x)


# --- modules with a forward of their own


@POLICIES
@pytest.mark.parametrize("kind", ["function", "method", "partial"])
def test_instance_forward(policy: Any, kind: str) -> None:
    model = model_of()
    module = model[2]

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) + 1

    own: Callable[..., Any] = {
        "function": lambda x: forward(module, x),
        "method": types.MethodType(forward, module),
        "partial": functools.partial(forward, module),
    }[kind]
    module.forward = own
    with ours():
        without = model(torch.ones(2, 4))
    set_module_policy(model, {"2": policy})
    assert dtype_of(model) is expected_dtype(policy)
    assert dtype_of(copy.deepcopy(model)) is expected_dtype(policy)
    assert inspect.signature(module.forward) == inspect.signature(own)
    remove_module_policy(model)
    assert module.forward is own
    with ours():
        assert_same(model(torch.ones(2, 4)), without)


def test_deleted_forward() -> None:
    """Libraries that delete it believe that the forward of the class is back."""
    model = model_of("fp32")
    del model[2].forward
    with pytest.raises(tp.errors.RegionError, match="attribute 'forward' of a module of type Linear was deleted"):
        dtype_of(model)
    set_module_policy(model, {"2": "fp32"})
    assert dtype_of(model) is SINGLE
    del model[2].forward
    remove_module_policy(model)
    assert dtype_of(model) is LOW


# --- copies that share the dict of a module


class Scales(nn.Module):
    factor = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x * self.factor


def in_dict(module: nn.Module) -> nn.Module:
    result = type(module).__new__(type(module))
    result.__dict__ = module.__dict__.copy()
    return result


@pytest.mark.parametrize("make", [copy.copy, in_dict, nn.Module._replicate_for_data_parallel])
@pytest.mark.parametrize("then", ["called", "copied", "pickled", "called directly"])
@pytest.mark.parametrize("original_dies", [True, False])
def test_shallow_copies_run_as_themselves(make: Any, then: str, original_dies: bool) -> None:
    """Not as the original module, whose forward they share."""
    module = Scales()
    set_module_policy(module, {"": "fp32"})
    copied = make(module)
    copied.factor = 3
    if original_dies:
        del module
        gc.collect()
    if then == "copied":
        copied = copy.deepcopy(copied)
    elif then == "pickled":
        copied = pickle.loads(pickle.dumps(copied))
    x, expected = torch.ones(2, 2, dtype=LOW), torch.full((2, 2), 6.0)
    with ours():
        for _ in range(2):
            assert_same(copied(x), expected)
            if then == "called directly":
                assert_same(copied.forward(x), expected)
        if not original_dies:
            assert_same(module(x), expected / 3)
    assert module_policies(copied) == {"": "fp32"}


def test_lazy_module() -> None:
    """It changes its class at the first call."""
    model = nn.Sequential(nn.LazyLinear(3))
    set_module_policy(model, {"0": "fp32"})
    for _ in range(2):
        assert dtype_of(model) is SINGLE
    assert type(model[0]) is nn.Linear


# --- PyTorch's compilers


compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)


@POLICIES
@pytest.mark.parametrize("around", [ours, functools.partial(tp.stock_autocast, "cpu")], ids=["ours", "stock"])
@pytest.mark.parametrize("what", ["model", "module", "in place", "function with the region"])
def test_compiled(policy: Any, what: str, around: Any, fresh_dynamo: None) -> None:
    model, expected = model_of(policy), model_of(policy)
    call: Any = model
    outside = around
    if what == "model":
        call = compiled(model)
    elif what == "module":
        call = nn.Sequential(model[0], model[1], compiled(model[2]))
    elif what == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
    else:

        @compiled
        def call(x: torch.Tensor) -> torch.Tensor:
            with around():
                return model(x)

    if what == "function with the region":
        result = train(call, list(model.parameters()), lambda: ours(enabled=False))[0]
        assert_same(result, train(expected, list(expected.parameters()), outside)[0])
    else:
        result = train(call, list(model.parameters()), outside)
        assert_same(result, train(expected, list(expected.parameters()), outside))
        assert result[0].dtype is expected_dtype(policy)


#: The same happens to a `forward` that the program itself replaces.
notices_forward = pytest.mark.xfail(
    torch.__version__.startswith("2.11") and sys.version_info[:3] == (3, 13, 0),
    reason="PyTorch 2.11 on Python 3.13.0 does not notice that the forward of a compiled module has changed",
    strict=True,
)


@notices_forward
def test_compiled_again_when_the_policy_changes(fresh_dynamo: None) -> None:
    model = model_of()
    call = compiled(model)
    dtypes = [dtype_of(call)]
    for policy in ("fp32", OVERRIDES, {"linear": "float64"}, "fp32", None):
        if policy is None:
            remove_module_policy(model)
        else:
            set_module_policy(model, {"2": policy})
        dtypes.append(dtype_of(call))
    assert dtypes == [
        torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32, torch.bfloat16,
    ]  # fmt: skip


@POLICIES
def test_compiled_with_a_graph_break(policy: Any, fresh_dynamo: None) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.first(x)
            torch._dynamo.graph_break()
            return self.second(first)

    def model() -> nn.Module:
        torch.manual_seed(0)
        result = nn.Sequential(nn.Linear(4, 4), Breaks())
        set_module_policy(result, {"1": policy})
        return result

    broken, plain = model(), model()
    result = train(torch.compile(broken, backend="aot_eager"), list(broken.parameters()))
    assert_same(result, train(plain, list(plain.parameters())))


class Whole(nn.Module):
    """A model with the region in it, as export wants it."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.inner = model_of(policy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu"):
            return self.inner(x)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("policy", ["fp32", "off"])
@pytest.mark.usefixtures("nothing_installed")  # which an exported program's regions become
def test_exported(policy: Any, strict: bool, fresh_dynamo: None) -> None:
    model = Whole(policy)
    if policy == "off":
        model.inner[2].to(torch.bfloat16)
    x = torch.randn(2, 4)
    exported = torch.export.export(model, (x,), strict=strict).module()
    assert_same(exported(x), model(x))


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_not_scripted() -> None:
    model = nn.Sequential(Twice())
    set_module_policy(model, {"0": "fp32"})
    with pytest.raises(Exception, match=r"torch\.jit\.script cannot compile the forward of a module with a policy"):
        torch.jit.script(model)


def test_traced_by_fx() -> None:
    """Modules that a graph calls keep their policies; a policy is not traced into the graph."""
    model = model_of("fp32")
    traced = torch.fx.symbolic_trace(model)
    assert module_policies(traced) == {"2": "fp32"}
    assert dtype_of(traced) is torch.float32
    model = nn.Sequential(Twice())
    set_module_policy(model, {"0": "fp32"})
    with pytest.raises(tp.errors.RegionError, match=r"torch\.fx traces a module of type Twice with a policy\."):
        torch.fx.symbolic_trace(model)
    remove_module_policy(model)
    torch.fx.symbolic_trace(model)


@notices_forward
@pytest.mark.parametrize("key", ["2", "_orig_mod.2", "[2-9]", "**.2"])
def test_names_are_those_of_the_original_model(key: str) -> None:
    model = torch.compile(model_of(), backend="eager")
    assert dtype_of(model) is torch.bfloat16
    tp.set_module_policy(model, {key: "fp32"})
    assert dtype_of(model) is torch.float32
    tp.remove_module_policy(model, key)
    assert dtype_of(model) is torch.bfloat16


# --- Module tables of a policy under torch.compile


def test_compiled_once_for_each_policy(fresh_dynamo: None) -> None:
    model = model_of()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        for policy, dtype in ((FP32, torch.float32), (FP16, torch.float16)):
            with region(policy, model):  # made anew each time
                assert call(X).dtype is dtype
        assert dtype_of(call) is torch.bfloat16
    assert counter.frame_count == 3


def test_a_region_that_a_compiled_function_enters(fresh_dynamo: None) -> None:
    model = model_of()
    around = region(FP32, model)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with around:
            inside = model(x)
        with tp.my_autocast("cpu"):
            return inside, model(x)

    assert [result.dtype for result in step(X)] == [torch.float32, torch.bfloat16]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def applied(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu", policy=FP16):
            result: torch.Tensor = model(x)
            return result

    with FP16.apply_to(model):
        assert applied(X).dtype is torch.float16


def test_a_region_that_a_compiled_function_makes(fresh_dynamo: None) -> None:
    model = model_of()

    def step(x: torch.Tensor) -> torch.Tensor:
        with region(FP32, model):
            result: torch.Tensor = model(x)
            return result

    assert torch.compile(step, backend="aot_eager")(X).dtype is torch.float32
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"changes modules: make the region outside"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(X)


# --- where tables hold


@pytest.mark.parametrize(
    ("own", "tables", "expected"),
    [
        (None, {"2": "fp32"}, SINGLE),
        (None, {"2": {"linear": "float16"}}, HALF),
        (None, {"*": {"linear": "float16"}, "2": "fp32"}, SINGLE),
        (None, {"": "fp32"}, SINGLE),
        (None, {"": {"linear": "float16"}, "2": {"linear": "float64"}}, torch.float64),
        (None, {"1": "fp32"}, LOW),
        ({"linear": "float16"}, {"2": {"linear": "float64"}}, HALF),
        ({"gelu": "fp32"}, {"2": {"linear": "float64"}}, torch.float64),
        ("fp32", {"2": {"linear": "float16"}}, SINGLE),
        ({"linear": "float16"}, {"2": "fp32"}, SINGLE),
        ("off", {"2": "fp32"}, SINGLE),
    ],
    ids=str,
)
def test_tables_hold_in_the_region_alone_and_around_the_modules_own(own: Any, tables: Any, expected: Any) -> None:
    model = model_of(own)
    before = state_of(model)
    with region(policy_of(tables), model):
        assert model(X).dtype is expected
    assert state_of(model) == before
    assert tp.module_policies(model) == ({} if own is None else {"2": own})
    assert own is not None or dtype_of(model) is LOW


def test_nested_regions() -> None:
    model, other = model_of(), model_of()
    with region(FP32, model):
        with tp.my_autocast("cpu", overrides={"gelu": "fp32"}):
            assert model(X).dtype is SINGLE, "overrides add to the policy around"
        with tp.my_autocast("cpu", policy="stock"):
            assert model(X).dtype is LOW, "a policy replaces the policy around, with its tables"
        with region(FP16, other):
            assert (model(X).dtype, other(X).dtype) == (LOW, HALF)
        with region(FP16, model):
            assert model(X).dtype is HALF
            with region(FP32, model):
                assert model(X).dtype is SINGLE
            assert model(X).dtype is HALF
        with tp.stock_autocast("cpu", torch.float16):
            assert (model[:1](X).dtype, model(X).dtype) == (HALF, SINGLE)
        with tp.my_autocast("cpu", enabled=False):
            assert model(X).dtype is SINGLE
        assert model(X).dtype is SINGLE
    assert dtype_of(model) is LOW


def test_objects_of_one_policy_do_not_end_each_other() -> None:
    model = model_of()
    before = state_of(model)
    first, second = region(FP32, model), region(FP32, model)
    with second:
        del first
        assert model(X).dtype is SINGLE
    del second
    assert state_of(model) == before


def test_two_threads_with_one_model() -> None:
    model = model_of()
    before = state_of(model)
    barrier = threading.Barrier(3)
    found: dict[Any, set[torch.dtype]] = {}

    def run(policy: tp.Policy | None) -> None:
        for _ in range(20):
            with tp.my_autocast("cpu") if policy is None else region(policy, model):
                barrier.wait()
                found.setdefault(policy, set()).add(model(X).dtype)
                barrier.wait()

    threads = [threading.Thread(target=run, args=(policy,)) for policy in (FP32, FP16, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {FP32: {SINGLE}, FP16: {HALF}, None: {LOW}}
    assert state_of(model) == before


# --- apply_to


def test_applied_to_a_model() -> None:
    model = model_of()
    before = state_of(model)
    handle = FP32.apply_to(model)
    assert dict(handle.modules) == {"2": "fp32"}
    assert dtype_of(model) is LOW, "a region of another policy"
    with tp.my_autocast("cpu", policy=FP32):
        assert model(X).dtype is SINGLE
    with tp.my_autocast("cpu", policy=FP32.override({"gelu": "fp32"})):
        assert model(X).dtype is SINGLE, "the tables are the same"
    handle.remove()
    handle.remove()
    assert state_of(model) == before
    with pytest.raises(tp.PolicyError, match="no model to find them in"):
        tp.my_autocast("cpu", policy=FP32)


def test_applied_without_keeping_the_model_alive() -> None:
    model = model_of()
    FP32.apply_to(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(tp.PolicyError, match="no model to find them in"):
        tp.my_autocast("cpu", policy=FP32)


@pytest.mark.usefixtures("nothing_installed")
def test_applied_under_install_and_as_the_default() -> None:
    model = model_of()
    with FP32.apply_to(model):
        with tp.install(policy=FP32), torch.autocast("cpu"):
            assert model(X).dtype is SINGLE
        before = tp.set_default_policy(FP32)
        try:
            assert dtype_of(model) is SINGLE
            tp.set_module_policy(model, {"0": FP32})
        finally:
            tp.set_default_policy(before)
        assert dtype_of(model) is LOW


# --- errors

NO_MODEL = (
    "the policy has tables for modules ('2'), and no model to find them in. Legal: my_autocast(..., policy=policy,"
)

ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: tp.my_autocast("cpu", policy=FP32), tp.PolicyError, NO_MODEL),
    (lambda: tp.install(policy=FP32), tp.PolicyError, NO_MODEL),
    (lambda: tp.my_autocast("cpu", model=model_of()), OptionError, "got a model and no policy. Give both,"),
    (lambda: region(FP32, model_of), OptionError, "model is an nn.Module, or None; got "),  # type: ignore[arg-type]
    (
        lambda: region(policy_of({"haed": "fp32"}), nn.ModuleDict({"head": nn.Linear(2, 2)})),
        tp.PolicyError,
        "no module of the model is named 'haed'. Closest: head.",
    ),
    (lambda: tp.Policy.named("cuda").apply_to(model_of()), tp.PolicyError, "Policy.named('cuda') has none. Add some:"),
]


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(("ask", "kind", "text"), ERRORS)
def test_wrong_use(ask: Callable[[], Any], kind: type[Exception], text: str) -> None:
    before = tp.default_policy()
    with pytest.raises(kind) as error:
        ask()
    assert text in str(error.value)
    assert tp.installed() is None
    assert tp.default_policy() is before


# --- copies


def _pickled(model: nn.Module) -> nn.Module:
    data = pickle.dumps(model)
    assert b"torch_promote" not in data
    made: nn.Module = pickle.loads(data)
    return made


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, _pickled], ids=lambda way: way.__name__)
def test_a_copy_made_inside_is_another_model(way: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    before = state_of(model)
    with region(policy_of({"1": "fp32"}), model):
        copied = nn.Sequential(way(model[0]), way(model[1]))
        assert (copied(X).dtype, model(X).dtype) == (LOW, SINGLE)
    assert state_of(model) == before
    assert vars(copied[1]).keys() == vars(model[1]).keys()
    assert not copied[1]._forward_pre_hooks
    assert dtype_of(copied) is LOW


# --- what runs later, elsewhere, or is traced


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_runs_again_under_the_tables(use_reentrant: bool) -> None:
    block = Block()
    model = nn.Sequential(nn.Linear(8, 8), block)
    before = state_of(model)
    policy = policy_of({"1": {"softmax": "fp16"}, "1.first": "fp32"})
    torch.manual_seed(0)
    with region(policy, model):  # which has ended, and is gone, when the backward begins
        loss = checkpoint(model, torch.ones(2, 8, requires_grad=True), use_reentrant=use_reentrant).float().sum()
    if use_reentrant:
        with tp.my_autocast("cpu"):
            loss.backward()
    else:
        loss.backward()
    assert block.seen == [(SINGLE, LOW)] * 2
    del loss
    gc.collect()
    assert state_of(model) == before
