"""`why` of random expressions compared with what PyTorch does when they run on real tensors: dtypes and errors.

The expressions are PyTorch's samples of its ops with other dtypes, and the losses, operators, in-place and out=
calls of a small grammar; under promotion rules and default dtypes, and in regions.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

import torch_promote as tp
from torch_promote.checking.why import Derivation
from torch_promote.errors import ExpressionError
from torch_promote.reference.dtypes import named_dtype
from torch_promote.reference.promotion_rules import RULE_NAMES

COMMON = "bool uint8 int8 int16 int32 int64 bfloat16 float16 float32 float64 complex32 complex64 complex128"
ODD = "uint16 uint32 uint64 float8_e4m3fn float8_e5m2"
NUMBERS = ("2", "2.5", "True", "1j", "1000", "-3", "0")
SYMBOLS = ("+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<", "<=", ">", ">=", "==", "!=")
BINARY = (
    "add sub mul div maximum fmax atan2 matmul floor_divide bitwise_and remainder pow float_power ldexp copysign eq lt "
    "hypot nextafter logaddexp logical_and xlogy heaviside gcd bitwise_left_shift dot mv mm bmm outer cross igamma"
)
UNARY = "abs exp sqrt sum mean sign neg sigmoid reciprocal floor logical_not bitwise_not isnan angle relu"
LOSSES = (
    "l1_loss mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy poisson_nll_loss kl_div "
    "binary_cross_entropy_with_logits hinge_embedding_loss multilabel_soft_margin_loss cross_entropy pairwise_distance"
)
LOSSES_OF_THREE = "gaussian_nll_loss triplet_margin_loss margin_ranking_loss cosine_embedding_loss"


class Expressions:
    """Makes random expressions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.samples: dict[str, list[Any]] = {}

    def dtype(self) -> str:
        return self.random.choice((COMMON if self.random.random() < 0.93 else ODD).split())

    def tensor(self, shape: str = "") -> str:
        return f"{self.dtype()}[{shape or self.random.choice(['2, 2', '2, 2', '2', '1, 2', ''])}]"

    def operand(self) -> str:
        return self.tensor() if self.random.random() < 0.8 else self.random.choice(NUMBERS)

    def made(self) -> str:
        return self.of_a_sample() if self.random.random() < 0.5 else self.of_the_grammar()

    def of_the_grammar(self) -> str:
        pick = self.random.choice
        a, b, c, x = self.tensor(), self.tensor(), self.tensor(), self.operand()
        square = [self.tensor("2, 2") for _ in range(3)]
        forms = [
            f"{a} {pick(SYMBOLS)} {x}",
            f"{x} {pick(SYMBOLS)} {a}",
            f"({a} {pick(SYMBOLS)} {x}) {pick(SYMBOLS)} {b}",
            f"torch.{pick(BINARY.split())}({a}, {x})",
            f"{a}.{pick(BINARY.split())}_({x})",
            f"torch.{pick(BINARY.split())}({a}, {x}, out={c})",
            f"torch.{pick(UNARY.split())}({a}, out={c})",
            f"F.{pick(LOSSES.split())}({', '.join(square[:2])})",
            f"F.{pick(LOSSES_OF_THREE.split())}({', '.join(square[:2])}, {self.tensor(pick(['2, 2', '2']))})",
            f"where({pick(['bool[2, 2]', a])}, {b}, {x})",
            f"clamp({a}, {x}, {b})",
            f"{a}.lerp_({b}, {x})",
            f"{a}.addcmul_({b}, {c})",
            f"cat([{a}, {b}])",
            f"addmm({', '.join(square)})",
            f"F.linear({', '.join(square[:2])}, {self.tensor('2')})",
            f"{a}.copy_({b})",
            f"cumsum({a}, 0, dtype={self.dtype()})",
        ]
        return pick(forms)

    def of_a_sample(self) -> str:
        while True:
            op = self.random.choice(op_db)
            name = re.sub(r"^nn\.functional\.", "F.", op.name)
            if name.startswith(("masked.", "_refs", "signal.", "jiterator")) or "._" in name or name[0] == "_":
                continue
            samples = self._samples_of(op)
            if not samples:
                continue
            sample = self.random.choice(samples)
            name = name if "." in name else f"torch.{name}"
            chance = self.random.choice([0.0, 0.2, 0.5, 1.0])
            try:
                first = self._spell(sample.input, chance)
                rest = [self._spell(one, chance) for one in sample.args]
                named = [f"{name}={self._spell(one, chance)}" for name, one in sample.kwargs.items()]
            except TypeError:
                continue
            if not re.match(r"\w+\[", first):
                continue
            draw = self.random.random()
            if draw < 0.15 and op.inplace_variant is not None and hasattr(torch.Tensor, f"{op.name}_"):
                return f"{first}.{op.name}_({', '.join([*rest, *named])})"
            if draw < 0.3 and op.supports_out:
                named.append(f"out={self.dtype()}[{first.partition('[')[2]}")
            return f"{name}({', '.join([first, *rest, *named])})"

    def _samples_of(self, op: Any) -> list[Any]:
        if op.full_name not in self.samples:
            dtype = next((one for one in (torch.float32, torch.int64, torch.bool) if one in op.dtypes), torch.complex64)
            samples = op.sample_inputs("cpu", dtype)
            self.samples[op.full_name] = [one for one, _ in zip(samples, range(8), strict=False)]
        return self.samples[op.full_name]

    def _spell(self, value: Any, chance: float) -> str:
        match value:
            case torch.Tensor() if value.layout is torch.strided and value.numel() <= 200:
                own = str(value.dtype).removeprefix("torch.")
                shape = list(value.shape) if self.random.random() < 0.9 else []
                return f"{self.dtype() if self.random.random() < chance else own}{shape}"
            case list():
                return f"[{', '.join(self._spell(one, chance) for one in value)}]"
            case tuple():
                return f"({''.join(f'{self._spell(one, chance)}, ' for one in value)})"
            case bool() | int() | str() | None | torch.dtype():
                return str(value) if isinstance(value, torch.dtype) else repr(value)
            case float() if math.isfinite(value):
                return repr(value)
        raise TypeError(f"{value!r} has no place in an expression")


TENSOR = re.compile(r"\b(bool|u?int\d+|bfloat16|float\d\w*|complex\d+)\[([\d, ]*)\](?!\()")
NAMES = {
    **{name: getattr(torch, name) for name in f"where clamp cat addmm cumsum linalg fft {COMMON} {ODD}".split()},
    "torch": torch,
    "special": torch.special,
    "F": torch.nn.functional,
}


def run(expression: str, fill: float) -> Any:
    """What PyTorch returns, or the exception that it raises."""

    def full(shape: tuple[int, ...], name: str) -> torch.Tensor:
        return torch.full(shape, fill).to(named_dtype(name))

    text = TENSOR.sub(lambda match: f"full(({match[2]}{',' * bool(match[2])}), '{match[1]}')", expression)
    try:
        return eval(text, {**NAMES, "full": full})
    except Exception as error:
        return error


def described(result: Any) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    if isinstance(result, torch.Tensor):
        return [(result.dtype, tuple(result.shape))]
    return [pair for one in result for pair in described(one)] if isinstance(result, tuple | list) else []


def one_line(error: Exception) -> str:
    text = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    return text.partition(" - got")[0].rstrip(". ")


@contextlib.contextmanager
def regions(options: dict[str, Any]) -> Iterator[None]:
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, before)
        torch.set_default_dtype(options.get("default_dtype", before))
        stack.enter_context(torch.no_grad())
        if "autocast" in options:  # the CPU stands in for CUDA
            on_cuda = options["autocast"] == "cuda"
            dtype = options.get("dtype") or (torch.float16 if on_cuda else torch.bfloat16)
            stack.enter_context(tp.my_autocast("cpu", dtype, policy="cuda" if on_cuda else None))
        stack.enter_context(tp.promotion(options.get("rule", "torch")))
        yield


def drawn(kind: str, draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if kind in ("cpu", "cuda"):
        options["autocast"] = kind
        options |= {"dtype": draw.choice([torch.bfloat16, torch.float16])} if draw.random() < 0.5 else {}
    if kind == "rule" or draw.random() < 0.1:
        options["rule"] = draw.choice(RULE_NAMES)
    if draw.random() < 0.3:
        options["default_dtype"] = draw.choice([torch.float64, torch.bfloat16, torch.float16])
    return options


def wrong(derivation: Derivation, results: list[Any]) -> str | None:
    """What a derivation says that is not so; None if all of it is. `results` has those of several fills."""
    text = " ".join(derivation.text(None).split())
    if "Report it" in text or re.search(r"\(\+|\ba (int|uint8 of)\b", text):
        return "words"
    given = [result for result in results if not isinstance(result, Exception)]
    if given:
        found = derivation.results or ((derivation.dtype, derivation.shape),)
        return None if list(found) == described(given[0]) else f"PyTorch returns {described(given[0])}"
    errors = [one_line(error) for error in results]
    # Others than the fills may be taken, as indices are, or a matrix that has an inverse.
    if derivation.error is None and len(set(errors)) > 1:
        return None
    said = str(derivation.error).rstrip(".").replace("autocast on cuda", "autocast on cpu")
    return None if said in errors else f"PyTorch raises {errors[0]}"


@pytest.mark.parametrize("kind", ["plain", "rule", "cpu", "cuda"])
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 1500), marks=pytest.mark.slow)], ids=len)
def test_random_expressions(seeds: range, kind: str) -> None:
    checked = raised = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expressions = Expressions(seeds.start)
        for seed in seeds:
            expression, options = expressions.made(), drawn(kind, random.Random(seed))
            with regions(options), torch.random.fork_rng():
                results = [run(expression, fill) for fill in (1.0, 0.0, 2.0)]
            refusals = " ".join(str(one) for one in results if isinstance(one, Exception))
            if options.get("autocast") == "cuda" and "not implemented for '" in refusals:
                continue  # the CPU has no kernel, which says nothing of CUDA
            try:
                derivation = tp.why(expression, **options)
            except ExpressionError:
                assert all(isinstance(result, Exception) or not described(result) for result in results), expression
                continue
            problem = wrong(derivation, results)
            assert problem is None, f"{expression} {options}: {problem}\n{derivation}"
            checked += 1
            raised += derivation.error is not None
    assert checked > len(seeds) / 2
    assert raised > len(seeds) / 10
