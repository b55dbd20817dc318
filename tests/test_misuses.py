"""Misuses of the Python API: each raises an error that says what was asked for, what is legal and what to write.

Those of the command line are in tests/cli/test_cli.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_promote as tp
from torch_promote import errors as e

api: Any = tp  # misuses are no errors of types here


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.decoder(self.encoder(x))


x, model, numbered = torch.ones(2, 8), TwoLayers(), nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def step() -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).square().mean()


def region(**options: Any) -> Callable[[], object]:
    return lambda: api.my_autocast("cpu", **options)


def in_block(use: Callable[[Any], object]) -> None:
    with tp.trace() as report:
        pass
    use(report)


ARGUMENTS_OF_REGIONS = "Legal: device_type, dtype, enabled, cache_enabled, cache, policy, overrides, model."

#: Calls, the classes of their errors, and parts of the texts.
MISUSES: list[tuple[Callable[[], object], type[Exception], str]] = [
    # names
    (lambda: api.autocast, AttributeError, "has no attribute 'autocast'. Closest: my_autocast"),
    (lambda: api.find_nan, AttributeError, "has no attribute 'find_nan'. Closest: find_nonfinite"),
    (lambda: api.errors.PolicyErorr, AttributeError, "has no attribute 'PolicyErorr'. Closest: PolicyError"),
    (lambda: api.reference.promote_type, AttributeError, "has no attribute 'promote_type'. Closest: promote_types"),
    (lambda: api.trce, AttributeError, "has no attribute 'trce'. Closest: trace"),
    (lambda: api.GradScaler, AttributeError, "module 'torch_promote' has no attribute 'GradScaler'"),
    # arguments of regions
    (
        region(override={"mm": "fp32"}),
        e.ArgumentError,
        f"my_autocast() has no argument 'override'. Closest: overrides. {ARGUMENTS_OF_REGIONS}",
    ),
    (region(overides={}), e.ArgumentError, "'overides'. Closest: overrides."),
    (lambda: api.my_autocast(device="cpu"), e.ArgumentError, "'device'. Closest: device_type."),
    (region(precision="bf16"), e.ArgumentError, f"'precision'. {ARGUMENTS_OF_REGIONS}"),
    (region(polices="fp32"), e.ArgumentError, "'polices'. Closest: policy."),
    (lambda: api.my_autocast(torch.bfloat16), e.DeviceTypeError, "The dtype is the second argument: dtype=..."),
    (
        region(overrides=["mm"]),
        e.PolicyError,
        'overrides must be a mapping of ops to policies, got list. Write {op: policy}, such as {"softmax": "fp32"}.',
    ),
    (region(overrides={nn.Linear: "fp32"}), e.PolicyError, "set_module_policy(model, {nn"),
    (region(overrides={"mm": "fp_32"}), e.PolicyError, "'fp_32'. Closest: fp32. Legal: "),
    (region(overrides={"mmm": "fp32"}), e.PolicyError, "no op is called 'mmm'. Closest: mm"),
    (region(policy="cuuda"), e.PolicyError, "'cuuda'. Closest: cuda. Legal: stock, cpu,"),
    (lambda: api.promotion("jaxx"), e.RuleDefinitionError, "'jaxx'. Legal: torch, jax, numpy, array_api, strict."),
    (
        lambda: api.promotion("jax", on_promote="warn"),
        e.ArgumentError,
        "promotion() has no argument 'on_promote'. Closest: on_promotion. Legal: rule, on_promotion, matmul, kinds.",
    ),
    (lambda: api.promotion(), e.ArgumentError, "promotion() needs rule, too. Write promotion(rule)."),
    (
        lambda: api.promotion("jax", "warn", 1),
        e.ArgumentError,
        "takes rule and on_promotion by position, got 3: str, str",
    ),
    # tools: arguments
    (
        lambda: api.compare(model, step),
        e.ArgumentError,
        "compare() takes step by position, got 2: TwoLayers, function. Give the others by name. Write compare(step, "
        "model=...).",
    ),
    (lambda: api.compare(step, model), e.ArgumentError, "got 2: function, TwoLayers. Give the others by name."),
    (lambda: api.compare(step), e.ArgumentError, "compare() needs model, too. Write compare(step, model=...)."),
    (lambda: api.compare(step, model=model, candidat="fp32"), e.ArgumentError, "'candidat'. Closest: candidate."),
    (lambda: api.compare(step, step=step, model=model), e.ArgumentError, "compare() got step twice, by position"),
    (lambda: api.compare(step(), model=model), e.OptionError, "got a Tensor. Pass the function itself."),
    (lambda: api.compare(step, model=model, batches=[x]), e.OptionError, "must be 1 or more, got [tensor([["),
    (
        lambda: api.tune(step, model, tolerance=1e-3),
        e.ArgumentError,
        "Write tune(step, model=..., tolerance=...).",
    ),
    (lambda: api.tune(step, model=model), e.ArgumentError, "tune() needs tolerance, too."),
    (lambda: api.tune(step, model=model, tolerence=1), e.ArgumentError, "'tolerence'. Closest: tolerance."),
    (
        lambda: api.tune(step, model=model, tolerance="1"),
        e.OptionError,
        "For example tolerance=1e-3 or tolerance={",
    ),
    (
        lambda: api.tune(step, model=model, tolerance=1, level="layer"),
        e.OptionError,
        "level must be 'op' or 'module' or 'site', got 'layer'. A layer is a module: level=\"module\".",
    ),
    (
        lambda: api.tune(step, model=model, tolerance=1, resume=5),
        e.ArgumentError,
        "resume is the name of a file, a str or os.PathLike, got 5.",
    ),
    (
        lambda: api.why(x),
        e.ExpressionError,
        'why() explains an expression, a str such as "int32[2, 3] + 5.5", got a value of type Tensor. This one is '
        "written float32[2, 8].",
    ),
    (lambda: api.why(torch.mm, x, x), e.ArgumentError, "why() takes expression by position, got 3: builtin"),
    (lambda: api.why("x + 1"), e.ExpressionError, "with their dtype and sizes, such as float32[2, 3]."),
    (lambda: api.why("f4[2]", rule="numpi"), e.RuleDefinitionError, "Closest: numpy."),
    (lambda: api.why("f4[2]", autocast="gpu"), e.OptionError, "got 'gpu'. Legal: 'cpu', 'cuda', 'xpu', 'mps'."),
    # blocks, at the call
    (lambda: api.trace(step), e.OptionError, ". Write `with trace(...) as report:` inside the function."),
    (
        lambda: api.trace(step()),
        e.OptionError,
        "must be an nn.Module or None, got Tensor(...). Write `with trace(...) as report:` around the code.",
    ),
    (lambda: api.trace(where=torch.ones(9, 9)), e.OptionError, "got Tensor(...)."),
    (lambda: api.compare(step, model=[model]), e.OptionError, "the nn.Module that the step runs, got [TwoLayers( ...."),
    (lambda: api.trace(value=True), e.ArgumentError, "trace() has no argument 'value'. Closest: values."),
    (lambda: api.trace(model, True), e.ArgumentError, "trace() takes model by position, got 2: TwoLayers, bool."),
    (lambda: api.trace(where="cast"), e.OptionError, "got 'cast'. Closest: casts."),
    (lambda: api.trace(record="a.json"), e.OptionError, "the name of a recording has to end in .jsonl.gz."),
    (lambda: api.trace(record=True), e.OptionError, '`record` is the name of a file, "NAME.jsonl.gz", or None'),
    (lambda: api.trace().calls, AttributeError, "Write `with trace(...) as report:`, and use the report."),
    (lambda: api.find_nonfinite(step), e.OptionError, ". Write `with find_nonfinite(...) as report:` inside the"),
    (lambda: api.trace()(step), e.DecoratorError, "trace() as a decorator loses its report. Write `with trace(...) as"),
    (lambda: api.find_nonfinite()(step), e.DecoratorError, "Only find_nonfinite(raise_at_first=...) decorates, which"),
    (lambda: api.find_nonfinite(allow="log"), e.OptionError, "`allow` expects a sequence of names, such as"),
    (lambda: api.find_nonfinite(raise_on_first=True), e.ArgumentError, "Closest: raise_at_first."),
    (lambda: api.crosscheck(level="bit"), e.OptionError, "Closest: bits. Legal: 'dtype', 'bits'."),
    (lambda: api.crosscheck(raise_mismatch=True), e.ArgumentError, "Closest: raise_on_mismatch."),
    (lambda: api.check_casts(model), e.FlagError, "enabled is a bool, got TwoLayers(...) of type TwoLayers."),
    # reports
    (lambda: in_block(lambda report: report.calls.where(opp="mm")), e.ArgumentError, "no argument 'opp'. Closest: op."),
    (
        lambda: in_block(lambda report: report.calls.where(op=torch.mm)),
        e.OptionError,
        "op is a str or None, got <built-",
    ),
    (
        lambda: in_block(lambda report: report.calls.where(phase="fwd")),
        e.OptionError,
        "'fwd'. Closest: forward. Legal:",
    ),
    (lambda: in_block(lambda report: report.explain()), e.ArgumentError, "explain() needs pattern, too."),
    (lambda: in_block(lambda report: report.explain(torch.mm)), e.OptionError, "explain what? Got <built-in method mm"),
    (lambda: in_block(lambda report: report.diff(model)), e.OptionError, "expects reports of trace(), or the files"),
    (lambda: api.diff(model, model), e.OptionError, "or the files of recordings, got TwoLayers(...)."),
    (
        lambda: in_block(lambda report: api.diff(report, report, tolerance=1)),
        e.OptionError,
        "takes a tolerance only with match=True. For two runs, ask the difference: is_within().",
    ),
    (
        lambda: in_block(lambda report: api.diff(report, report, match=True)),
        e.OptionError,
        "values",
    ),
    (lambda: in_block(lambda report: report.save("no/x.html")), e.OptionError, "there is no folder 'no'. Create it"),
    # files
    (lambda: api.load(5), e.ArgumentError, "path is the name of a file, a str or os.PathLike, got 5."),
    (lambda: api.load("run.html"), e.OptionError, "its name does not end in .jsonl.gz. Pass a file that trace("),
    (lambda: api.diff("a.jsonl.gz"), e.ArgumentError, "diff() needs b, too. Write diff(a, b)."),
    (lambda: in_block(lambda report: report.save(5)), e.ArgumentError, "path is the name of a file, a str or"),
    (lambda: in_block(lambda report: report.save("x.pdf")), e.OptionError, "Legal: .jsonl.gz (a recording, which"),
    (lambda: api.Policy.load("gone.toml"), e.PolicyError, "there is no policy file 'gone.toml'."),
    # modules
    (
        lambda: api.set_module_policy(numbered, {"3": "fp32"}),
        e.PolicyError,
        "no module of the model is named '3'. Legal: 0, 1.",
    ),
    (
        lambda: api.set_module_policy(model, {"encodr": "fp32"}),
        e.PolicyError,
        "no module of the model is named 'encodr'. Closest: encoder, decoder. Legal: encoder, decoder.",
    ),
    (
        lambda: api.set_module_policy(nn.Sequential(*[numbered] * 9), {"x": "off"}),
        e.PolicyError,
        ", and 19 others.",
    ),
    (lambda: api.set_module_policy(model, "fp32"), e.PolicyError, 'Write {key: policy}, such as {"": "fp32"} for'),
    (lambda: api.set_module_policy({"encoder": "fp32"}, model), e.PolicyError, "The model is the first argument."),
    (lambda: api.set_module_policy(model, {model.encoder: "off"}), e.PolicyError, "this module is 'encoder'."),
    (
        lambda: api.set_module_policy(model, policy={}),
        e.ArgumentError,
        "Closest: policies. Legal: model, policies.",
    ),
    (lambda: api.set_module_policy(model, "0", "off"), e.ArgumentError, "takes model and policies by position"),
    (lambda: api.module_policies(step), e.PolicyError, "model must be an nn.Module, got function."),
    (lambda: api.remove_module_policy("encoder"), e.PolicyError, "model must be an nn.Module, got str."),
    (
        lambda: api.set_module_policy(model, {nn.Conv2d: "fp32"}),
        e.PolicyError,
        "no module of the model is of type Conv2d. Its types: Linear, TwoLayers.",
    ),
    (lambda: api.set_module_policy(model, {"class:Linar": "off"}), e.PolicyError, "of type Linar. Closest: Linear."),
    (
        lambda: api.set_module_policy(model, {"encoder": {"sofmax": "fp32"}}),
        e.PolicyError,
        "'encoder': no op is called 'sofmax'. Closest: softmax",
    ),
    (
        lambda: api.set_module_policy(model, {"encoder": "fp_32"}),
        e.PolicyError,
        "'encoder': no policy is called 'fp_32'. Closest: fp32.",
    ),
    (
        lambda: api.set_module_policy(model.encoder.weight, {"": "off"}),
        e.PolicyError,
        "got Parameter. The model is the",
    ),
    # policies of the program
    (lambda: api.install(override={}), e.ArgumentError, "Closest: overrides. Legal: policy, overrides, cache."),
    (lambda: api.install("cuda"), e.ArgumentError, "install() takes no argument by position, got 1: str. Give"),
    (lambda: api.set_default_policy(), e.ArgumentError, "needs policy, too. Write set_default_policy(policy)."),
    (lambda: api.register_policy("mm", "fp32", device_types="cpu"), e.ArgumentError, "Closest: device_type."),
    (
        lambda: api.make_rule("mine"),
        e.ArgumentError,
        "needs tensors, too. Write make_rule(name, tensors)",
    ),
    (
        lambda: api.Policy.stock().override(mm="fp32"),
        e.ArgumentError,
        "Policy.override() has no argument 'mm'",
    ),
    (
        lambda: api.CastPolicy("fp33"),
        e.PolicyError,
        "no cast policy is called 'fp33'. Closest: fp32. Legal: lower",
    ),
    (lambda: api.installed("cuda"), e.ArgumentError, "takes no argument by position, got 1: str. Write installed()."),
    (lambda: api.installed(policy="cuda"), e.ArgumentError, "has no argument 'policy'. Write installed()."),
    (lambda: api.clear_cache(model), e.ArgumentError, "got 1: TwoLayers. Write clear_cache()."),
    (lambda: api.install(cache="on"), e.OptionError, "got 'on'. Legal: 'weights', 'persistent', 'all', 'none'."),
    (lambda: api.install(cache="persistant"), e.OptionError, "Closest: persistent."),
    (lambda: api.register_policy("exp", "fp32", device_type="gpu"), e.UnsupportedDeviceError, "no device type 'gpu'."),
    (lambda: api.Policy.stock().lookup("mm"), e.ArgumentError, "Write Policy.lookup(op, device_type)."),
    (lambda: api.Policy.stock().override_modules({"a": 3}), e.PolicyError, "a mapping of overrides, 'fp32' or 'off'"),
    (lambda: api.Policy.stock().apply_to(model), e.PolicyError, "Add some: policy.override_modules({name: overrides})"),
    (lambda: api.Policy.of("mine.json"), e.PolicyError, "the path of a file, which contains a separator or ends with"),
    (lambda: api.make_rule("mine", {(1, 2): 3}), e.RuleDefinitionError, "rule 'mine': 1 is not a dtype."),
    (lambda: api.monitor("logs"), e.ArgumentError, "monitor() needs to, too. Write monitor(to=...)."),
    (lambda: api.monitor(to="logs", evry=3), e.ArgumentError, "'evry'. Closest: every."),
    (region(overrides={"Linear": "fp32"}), e.PolicyError, "nn.Linear is a module, and overrides"),
    (region(overrides={"sdpa": "fp32"}), e.PolicyError, "Closest: scaled_dot_product_attention"),
    (region(policy=tp.CastPolicy.fp32), e.PolicyError, "For every op, write 'fp32'."),
    (lambda: api.trace()(lambda: (yield)), e.DecoratorError, "a generator function: the block would end before its"),
    (lambda: api.crosscheck("bits"), e.ArgumentError, "got 1: str. Give the others by name. Legal: level, raise_on"),
    (lambda: api.why("f4[2]", dtype=torch.half), e.OptionError, 'pass autocast="cpu" or another device type, too.'),
    (lambda: api.why("float23[2]"), e.ExpressionError, "Closest: float32"),
    (
        lambda: api.compare(step, model=model, reference="fp16"),
        e.PolicyError,
        "'fp16' is for single ops, and means the",
    ),
    (
        lambda: api.compare(lambda: None, model=model),
        e.StepError,
        "Return the loss, the outputs, or a dict of metrics.",
    ),
    (
        lambda: api.check_ranks(model),
        e.OptionError,
        "no process group is initialized. Start several ranks, as torchrun",
    ),
    (lambda: api.check_ranks(step), e.OptionError, "model must be an nn.Module or None, got <function step at"),
    (lambda: api.check_ranks(modle=model), e.ArgumentError, "Closest: model. Legal: model, group."),
]


@pytest.mark.parametrize(
    ("misuse", "kind", "text"),
    MISUSES,
    ids=[re.sub(r"\W+", "-", f"{at} {text}") for at, (_, _, text) in enumerate(MISUSES)],
)
def test_a_misuse_is_an_error_that_says_what_to_write(
    misuse: Callable[[], object], kind: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind) as caught:
        misuse()
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert type(caught.value) is kind
    assert tp.installed() is None or "override" not in str(tp.installed())
    assert tp.module_policies(model) == tp.module_policies(numbered) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_type_error_of_a_function_itself_is_not_explained() -> None:
    def broken() -> Any:
        raise TypeError("of the step")

    with pytest.raises(TypeError, match=r"^of the step$") as caught:
        tp.compare(broken, model=model, progress=False)
    assert not isinstance(caught.value, e.ArgumentError)


def test_calls_of_an_op_that_none_is_of_name_the_closest() -> None:
    with tp.trace() as report:
        step()
    assert repr(report.calls.where(op="linaer")) == "no calls; closest op: linear"
    assert repr(report.calls.where(op="linear", phase="optimizer")) == "no calls"
    assert repr(report.calls.where(op="softmax")) == "no calls"


def test_dir_lists_the_public_names() -> None:
    assert dir(tp) == sorted(tp.__all__)
    assert all(hasattr(tp, name) for name in dir(tp))
