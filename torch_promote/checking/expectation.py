"""What is expected of one call of an op, autocast's casts included: by the reference, or by a custom op's fake.

Under a promotion rule other than PyTorch's own, each operand that takes part is replaced by a description in the common
dtype, which the rule computes (`PromotionRule.common`). The reference then infers the results from the descriptions.

NOTE [ Operands found by trial ]
Which arguments take part must not come from `torch_promote.regions.promotion_tables`: the extension registers its
kernels from that list, so neither side would promote an op that is missing there, and the check would pass.
`operands_of` asks the reference instead, without reading how the rule is written: it infers the call with all operands
in bool, makes one of them complex, and infers again. If the dtype that the op computes in changes, that operand takes
part. A matrix product refuses instead, and all its tensors take part. An op that computes bools in floating point
divides, as `true_divide` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton as _registry
from torch.utils._python_dispatch import _disable_current_modes

from torch_promote import _C
from torch_promote.errors import PromotionRuleError
from torch_promote.observe.ops import device_of, facts_of, find_overload, is_fake, leaves, tensor_arguments, tensors_in
from torch_promote.observe.policy_sources import my_autocast_is_in_force
from torch_promote.policy.op_table import LEFT_TO_STOCK, TABLE_VERSION
from torch_promote.reference import Operand, PromotionError, PromotionRule, ShapeError
from torch_promote.reference.autocast import AutocastPlan, AutocastState, autocast_plan, replace_tensors
from torch_promote.reference.autocast import tensors_in as tensors_by_path
from torch_promote.reference.ops.call import Call, TensorLike, described
from torch_promote.reference.ops.elementwise_rules import ELEMENTWISE_RULES
from torch_promote.reference.ops.infer import NO_RULE, Inference, NoRule, functional_of, infer, rule_table
from torch_promote.reference.strides import contiguous_strides, temporary_strides


@dataclass(frozen=True, slots=True)
class Finding:
    """One way in which a call differs from what was expected, in words."""

    kind: str  # "dtype", "shape", "strides", "casts", "bits", "error" or "row"
    expected: str
    got: str


@dataclass(slots=True, eq=False)
class CheckedCall:
    """A call that has begun, the token of a dispatch observer, with what the reference expects of it."""

    op: torch._ops.OpOverload
    args: list[Any]  # in the schema's order
    plan: AutocastPlan | None = None  # what autocast does with the call; None where autocast is off
    inference: Inference | NoRule | None = NO_RULE  # of the results; NO_RULE if no rule covers the op
    error: str | None = None  # why the call should raise
    # The dtype of each tensor that the op receives after autocast's casts, by path.
    arguments: Mapping[str, torch.dtype] = field(default_factory=dict)
    row_is_missing: bool = False  # whether PyTorch's autocast has a kernel for the op, which has no row in the op table
    # The dtype that the tensors may have instead, all of them: that of the promotion rule in force, if the op is a
    # matrix product for which the reference has no rule.
    if_product: torch.dtype | None = None
    rule: PromotionRule | None = None  # None if PyTorch's own acts on the call
    # What the op's registered fake gives, for a custom op that has one: the results, with lists flattened. If the fake
    # raises, there are none, and `error` says so.
    fake: tuple[torch.Tensor | None, ...] | None = None
    see_through: bool = True  # whether the ops that it calls are observed too
    stock_too: bool = False  # whether the call also runs under stock autocast
    # Of `crosscheck`: whether the call is checked, whether autocast has called the op with the cast arguments, whether
    # an op inside has a policy (the op's own rule assumes that none has), and the run under stock, once it has begun.
    is_checked: bool = True
    op_was_called: bool = False
    casts_inside: bool = False
    stock: Any = None
    # Of `why`: whether an override gives the op's policy, the calls inside, and the results; None if it raised.
    overridden: bool = False
    inner: list[CheckedCall] = field(default_factory=list)
    results: list[Any] | None = None

    @property
    def has_policy(self) -> bool:
        """Whether a cast policy applies to the call."""
        return self.plan is not None and self.plan.policy is not None

    def check(self, results: Sequence[Any]) -> Finding | None:
        """Returns the first difference of the results; None if there is none, or if no rule covers the op."""
        if self.row_is_missing:
            return Finding(
                "row", "a row with a policy in the op table", "a kernel of PyTorch's autocast, and no policy"
            )
        if self.error is not None:
            return Finding("error", f"an error: {self.error}", "a result")
        if isinstance(self.inference, Inference):
            dtypes, source = self.inference.dtypes, ""
            layouts: Sequence[Any] = [(self.inference.shape, self.inference.strides)]
        elif self.fake is not None:
            dtypes, source = _dtypes_in(self.fake), ", as the op's registered fake has"
            layouts = [(None, None) if fake is None else (fake.shape, fake.stride()) for fake in self.fake]
        else:
            return None
        tensors = list(leaves(results))
        if dtypes != _dtypes_in(tensors):
            return Finding("dtype", f"{_dtype_names(dtypes)}{source}", _dtype_names(_dtypes_in(tensors)))
        for index, ((shape, strides), tensor) in enumerate(zip(layouts, tensors, strict=False)):
            if tensor is None or (self.fake is not None and (tensor.layout is not torch.strided or tensor.is_nested)):
                continue
            of = f" of result[{index}]" if index else ""
            if shape is not None and (len(shape) != tensor.dim() or any(map(_differ, shape, tensor.shape))):
                return Finding("shape", f"{list(shape)}{of}{source}", f"{list(tensor.shape)}{of}")
            if strides is None:
                continue
            # The stride of a dimension of size 1 says nothing about the memory: fakes may have another one.
            matter = [self.fake is None or (size > 1 and tensor.numel() > 0) for size in tensor.shape]
            if any(m and _differ(a, b) for m, a, b in zip(matter, strides, tensor.stride(), strict=True)):
                return Finding("strides", f"{strides}{of}{source}", f"{tensor.stride()}{of}")
        return None

    def check_casts(self, args: Sequence[Any]) -> Finding | None:
        """Returns how the arguments of the call that autocast makes differ from the plan; None if they do not."""
        assert self.plan is not None
        runs = find_overload(self.plan.runs)
        got = {path: tensor.dtype for path, tensor in tensor_arguments(runs, args)}
        if got == self.arguments or (got and set(got.values()) == {self.if_product}):
            return None
        wrong = [path for path in self.arguments if got.get(path) is not self.arguments[path]]
        wrong += [path for path in got if path not in self.arguments]
        return Finding("casts", _dtypes_of(self.arguments, wrong), _dtypes_of(got, wrong))

    @property
    def name(self) -> str:
        """Its name with the overload."""
        return facts_of(self.op).name

    @property
    def is_composite(self) -> bool:
        """Whether the op is composite on the device of its tensors."""
        return facts_of(self.op).is_composite(device_of(tensors_in(self.args)))

    @property
    def returned(self) -> list[torch.dtype]:
        """The dtypes of its results; none if it raised."""
        return [tensor.dtype for tensor in tensors_in(self.results or ())]

    @property
    def expected(self) -> list[torch.dtype] | None:
        """The dtypes that the reference expects; None if it does not say."""
        if not isinstance(self.inference, Inference) or any(one.has_policy for one in self.inside()):
            return None
        return [dtype for dtype in self.inference.dtypes if dtype is not None]

    @property
    def is_view(self) -> bool:
        """Whether the op returns a view of its first argument, which has that argument's dtype."""
        return facts_of(self.op).shares and self.name != "aten::view.dtype"

    def inside(self) -> Iterator[CheckedCall]:
        """The calls inside that get a step: not views, and what composite ops call instead of these."""
        for call in self.inner:
            tensors = None if call.results is None else tensors_in(call.results)
            explained = call.error or call.fake is not None or isinstance(call.inference, Inference)
            facts = facts_of(call.op)
            if facts.is_cast:  # autocast and composite ops change a dtype with it
                before = tensors_in(call.args[:1])  # none for a Python number
                yield from [call] if before and tensors and before[0].dtype is not tensors[0].dtype else []
            elif call.is_view or facts.keeps_elements or tensors == []:
                continue
            elif call.has_policy or explained or not (call.is_composite and call.inner):
                yield call
            else:
                yield from call.inside()


def expect(op: torch._ops.OpOverload, args: list[Any], state: AutocastState | None) -> CheckedCall:
    """Asks the reference what a call should do, before it runs and may change its arguments."""
    planned = {path: tensor.dtype for path, tensor in tensor_arguments(op, args)}
    nested = any(tensor.is_nested for _, tensor in tensor_arguments(op, args))
    plan = None
    runs, values = op, dict(zip(facts_of(op).arguments, args, strict=False))
    if state is not None:
        plan = autocast_plan(op, args, {}, state)
        if plan.error is not None:
            return CheckedCall(op, args, plan, None, plan.error, planned)
        for cast in plan.all_casts():
            planned[cast.argument] = cast.to
        if not nested:
            values = _cast_values(plan, values)
        runs = find_overload((plan.then or plan).runs)
        values |= plan.dtype_arguments
    if plan is not None and plan.left_to_stock:
        # The table describes one release, and PyTorch's own ops.
        name, is_described = facts_of(op).name, torch.__version__.startswith(f"{TABLE_VERSION}.")
        row_is_missing = is_described and name.startswith("aten::") and name not in LEFT_TO_STOCK
        return CheckedCall(op, args, plan, NO_RULE, None, planned, row_is_missing)
    if nested:
        return CheckedCall(op, args, plan, NO_RULE, None, planned)
    (rule, matmul), if_product = rule_in_force() or (None, False), None
    try:
        found = None if rule is None else operands_of(runs, values)
        if found is not None and not _C.promotion_acts_on(found.tensors(values)):
            rule = found = None
        if rule is not None:
            if found is not None and (matmul or not found.is_product):
                values = dict(_promoted_values(runs, values, found, rule))
            # The reference has rules for products with a kernel, such as `mm`, not for composites, such as `matmul`.
            if matmul and planned and (functional_of(runs) or facts_of(runs).name) not in rule_table():
                with contextlib.suppress(PromotionRuleError):
                    if_product = rule.common(list(planned.values()))
        planned |= _dtypes_of_operands(values)
        inference = infer(runs, (), values)
        by_fake = isinstance(inference, NoRule) and has_fake(runs)
        fake, error = _run_fake(runs, values) if by_fake else (None, None)
        return CheckedCall(op, args, plan, inference, error, planned, if_product=if_product, rule=rule, fake=fake)
    except (PromotionError, PromotionRuleError, ShapeError) as error:
        return CheckedCall(op, args, plan, None, str(error), planned, rule=rule)


def _cast_values(plan: AutocastPlan, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments by name, each cast tensor replaced by an `Operand` that describes its cast."""
    by_path = {path: tensor for name, value in values.items() for path, tensor in tensors_by_path(name, value)}
    made: dict[str, Operand] = {}
    for cast in plan.all_casts():
        made[cast.argument] = _cast(described(made.get(cast.argument, by_path[cast.argument])), cast.to)
    return {name: replace_tensors(name, value, made) for name, value in values.items()}


def _dtypes_of_operands(values: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """Returns the dtypes of the casts that autocast and the promotion rule make, by argument path."""
    found = {}
    for name, value in values.items():
        if isinstance(value, Operand):  # a NamedTuple, which is a tuple too
            found[name] = value.dtype
        elif isinstance(value, list | tuple):
            found |= {f"{name}[{i}]": one.dtype for i, one in enumerate(value) if isinstance(one, Operand)}
    return found


def _dtypes_in(tensors: Iterable[torch.Tensor | None]) -> tuple[torch.dtype | None, ...]:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def _dtype_names(dtypes: Sequence[torch.dtype | None]) -> str:
    return ", ".join("none" if dtype is None else str(dtype).removeprefix("torch.") for dtype in dtypes) or "no tensors"


def _dtypes_of(dtypes: Mapping[str, torch.dtype], paths: Sequence[str]) -> str:
    return ", ".join(f"{path} in {_dtype_names([dtypes[path]])}" if path in dtypes else f"no {path}" for path in paths)


# --- custom ops: the registered fake is the rule

#: The namespaces of PyTorch's own ops. Some have kernels on Meta that PyTorch does not use as fakes.
_OF_PYTORCH = frozenset([
    "aten", "prim", "prims", "profiler", "quantized", "_quantized", "mkldnn", "mkldnn_prepacked", "onednn", "xnnpack",
    "prepacked", "inductor", "rngprims", "debugprims", "c10d", "_c10d_functional", "_c10d_functional_autograd",
    "c10d_functional", "fsdp", "symm_mem", "higher_order", "export", "static_runtime", "sparse", "streams", "_dtensor",
    "dtensor",
])  # fmt: skip


def _differ(expected: Any, real: int) -> bool:
    """Whether a size or stride is another one. A symbol, which depends on data, equals any."""
    return not isinstance(expected, torch.SymInt) and expected != real


def has_fake(op: torch._ops.OpOverload) -> bool:
    """Whether an op is not PyTorch's own and has a registered fake. Not cached: one may be registered at any time."""
    if op.namespace in _OF_PYTORCH:
        return False
    name = facts_of(op).name
    defined = OPDEFS.get(name)
    if defined is not None:  # torch.library.custom_op registers a fake that raises until the author registers one
        return defined._abstract_fn is not None
    if _registry.find(name).fake_impl.kernel is not None:
        return True
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")) and not bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    )


def _run_fake(op: torch._ops.OpOverload, values: Mapping[str, Any]) -> tuple[Any, str | None]:
    """Returns the results of an op's fake, and the error that it raises; an `Operand` stands for a tensor."""
    # (None, None): it does not say; results depend on data, or fakes do not support the arguments.
    tensors = [tensor for name, value in values.items() for _, tensor in tensors_by_path(name, value)]
    if any(is_fake(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        return None, None
    # Symbolic shapes need sympy, which takes a second to import, and most programs have no custom op.
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    unknown = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
        GuardOnDataDependentSymNode,
        NotImplementedError,
    )
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._DisableAutocast(), torch.no_grad():
        mode = fake_tensor.FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        try:
            given = {name: _faked(mode, value) for name, value in values.items()}
        except Exception:  # fake tensors do not support every tensor
            return None, None
        try:
            with mode:
                result = op(**given)
        except unknown:
            return None, None
        except Exception as error:  # the fake is the user's code
            first_line = str(error).strip().partition("\n")[0]
            return (), f"the op's registered fake raises {type(error).__name__}: {first_line}"
    return tuple(leaves(result if isinstance(result, tuple) else [result])), None


def _faked(mode: Any, value: Any) -> Any:
    if isinstance(value, Operand):
        strides = contiguous_strides(value.shape) if value.strides is None else value.strides
        with mode:
            return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value, static_shapes=True)
    if isinstance(value, list | tuple):
        return type(value)(_faked(mode, one) for one in value)
    if isinstance(value, Mapping):
        return {key: _faked(mode, one) for key, one in value.items()}
    return value


# --- promotion regions (NOTE [ Operands found by trial ])

#: Ops whose reference rule joins dtypes, and that a promotion rule leaves alone: see docs/promotion_regions.md, "Which
#: ops". The backward formulas (`*_backward`) and the factories, such as linspace, are left alone too.
_LEFT_ALONE = frozenset(
    {
        "aten::ldexp.Tensor",  # a mantissa and an exponent: not operands of one dtype
        "aten::logsumexp",
        "aten::mvlgamma",
        "aten::special_multigammaln",
    }
)
#: The files of op rules in which an op that refuses two dtypes is a matrix product.
_PRODUCTS = ("matrices", "foreach")
#: Takes vectors of one dtype, and is not a matrix product.
_NOT_A_PRODUCT = "aten::linalg_cross"

_NUMBERS = (bool, int, float, complex)
#: An argument's name, and the position in it if it is a list.
_Path = tuple[str, int | None]


def rule_in_force() -> tuple[PromotionRule, bool] | None:
    """Returns the promotion rule in force, and whether it acts on matrix products; None for PyTorch's own."""
    number = _C.promotion_in_force() if my_autocast_is_in_force() else None
    if number is None:
        return None
    from torch_promote.regions.promotion_tables import registered, rule_of

    rule = rule_of(number)
    return None if rule.name == "torch" else (rule, registered(number).matmul)


def _promoted_values(
    runs: torch._ops.OpOverload, values: Mapping[str, Any], found: JoinedOperands, rule: PromotionRule
) -> Mapping[str, Any]:
    """Returns a call's arguments by name, with descriptions of the operands that a rule casts."""
    name = facts_of(runs).name
    written = {argument.name for argument in runs._schema.arguments if argument.alias_info is not None}
    result = values
    for paths in found.joins(values):
        operands = [described(x) if isinstance(x, TensorLike) else x for x in (_at(values, path) for path in paths)]
        if operands and all(isinstance(operand, _NUMBERS) for operand in operands):  # as where(condition, 2.5, 1)
            operands = [Operand(rule.common(operands, name, found.divides), (), ())] * len(operands)
            result = {**result, **dict(zip(found.names, operands, strict=True))}
        if not any(isinstance(operand, Operand) and not operand.wrapped for operand in operands):
            continue
        dtype = rule.common(operands, name, found.divides)
        for path, operand in zip(paths, operands, strict=True):
            if isinstance(operand, Operand) and not operand.wrapped and path[0] not in written:
                result = _with(result, path, _cast(operand, dtype))
    return result


@dataclass(frozen=True, slots=True)
class JoinedOperands:
    """The operands of one call that a promotion rule joins."""

    names: tuple[str, ...]
    divides: bool = False  # whether the op computes in floating point, whatever the operands are
    # Whether lists go in step, one call for each position, as in `_foreach_add`. Otherwise all elements are joined, as
    # in `cat`.
    in_step: bool = False
    is_product: bool = False  # whether it is a matrix product, on which rules act with `matmul=True` alone

    def tensors(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        """Returns the operands that are tensors."""
        operands = (_at(values, path) for name in self.names for path in _paths(name, values[name]))
        return [operand for operand in operands if isinstance(operand, torch.Tensor)]

    def joins(self, values: Mapping[str, Any]) -> Iterator[list[_Path]]:
        """Yields the operands that are joined: once, or once for each position of lists that go in step."""
        paths = [path for name in self.names for path in _paths(name, values[name])]
        if not self.in_step:
            yield paths
            return
        count = max(element for _, element in paths if element is not None) + 1
        for index in range(count):
            yield [(name, element) for name, element in paths if element in (None, index)]


def operands_of(runs: torch._ops.OpOverload, values: Mapping[str, Any]) -> JoinedOperands | None:
    """Returns the operands of a call that a promotion rule joins; None if rules do not act on it."""
    # `runs` is the overload that runs. See NOTE [ Operands found by trial ].
    op = find_overload(functional_of(runs) or facts_of(runs).name)
    name = facts_of(op).name
    entry = rule_table().get(name)
    is_backward = name.partition(".")[0].endswith("_backward")
    if entry is None or name in _LEFT_ALONE or entry.family == "factories" or is_backward:
        return None
    call = Call.of(op, (), {name: values[name] for name in facts_of(op).arguments if name in values}, torch.float32)
    candidates = [a.name for a in call.signature.arguments if "Tensor" in a.type or "number" in a.type]
    trial = {**call, **{name: _in_bool(call[name]) for name in candidates}}
    joined, refused = [], []
    try:
        base = _computes_in(op, trial)
    except PromotionError:
        return None
    for path in (path for name in candidates for path in _paths(name, trial[name])):
        try:
            operand = _at(trial, path)
            made = operand._replace(dtype=torch.complex128) if isinstance(operand, Operand) else 1j
            if _computes_in(op, _with(trial, path, made)) is not base:
                joined.append(path)
        except PromotionError:
            refused.append(path)
    if not joined and len(refused) > 1 and entry.family in _PRODUCTS and name != _NOT_A_PRODUCT:
        tensors = [argument.name for argument in call.signature.arguments if argument.is_tensor or argument.is_list]
        return JoinedOperands(tuple(tensors), in_step=entry.family == "foreach", is_product=True)
    names = tuple(dict.fromkeys(name for name, _ in joined))
    has_lists = any(element is not None for _, element in joined)
    in_step = has_lists and not any(element == 1 for _, element in joined)
    divides = base is not None and base.is_floating_point
    if len(names) > 1 or (names and (divides or (has_lists and not in_step))):
        return JoinedOperands(names, divides, in_step)
    return None  # one operand, which keeps its dtype


def _computes_in(op: torch._ops.OpOverload, values: Mapping[str, Any]) -> torch.dtype | None:
    """Returns the dtype that an op computes in, by the reference."""
    term = rule_table()[facts_of(op).name].terms[0]
    if term.rule in ELEMENTWISE_RULES:
        call = Call.of(op, (), values, torch.get_default_dtype())
        return ELEMENTWISE_RULES[term.rule](call, *term.names).computation_dtype
    inferred = infer(op, (), values)
    assert isinstance(inferred, Inference)
    return inferred.dtypes[0] if inferred.dtypes else None


def _in_bool(value: Any) -> Any:
    """An argument with its operands in bool. Of a list, the first two tell how its elements take part."""
    if isinstance(value, TensorLike):
        return described(value)._replace(dtype=torch.bool)
    if isinstance(value, list | tuple):
        return [_in_bool(element) for element in value[:2]]
    return True if isinstance(value, _NUMBERS) else value


def _paths(name: str, value: Any) -> Iterator[_Path]:
    """Yields the places of the operands in an argument."""
    if isinstance(value, list | tuple) and not isinstance(value, Operand):
        yield from ((name, index) for index, element in enumerate(value) if _is_operand(element))
    elif _is_operand(value):
        yield name, None


def _is_operand(value: Any) -> bool:
    return isinstance(value, (TensorLike, *_NUMBERS))


def _at(values: Mapping[str, Any], path: _Path) -> Any:
    name, element = path
    return values[name] if element is None else values[name][element]


def _with(values: Mapping[str, Any], path: _Path, operand: Any) -> Mapping[str, Any]:
    """The arguments with one operand replaced."""
    name, element = path
    if element is None:
        return {**values, name: operand}
    return {**values, name: [operand if i == element else one for i, one in enumerate(values[name])]}


def _cast(operand: Operand, dtype: torch.dtype) -> Operand:
    if operand.dtype is dtype:
        return operand
    strides = None if operand.strides is None else temporary_strides(operand.shape, operand.strides)
    return Operand(dtype, operand.shape, strides, operand.device)
