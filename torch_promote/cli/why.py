"""The command `torch-promote why`: prints the derivation that torch_promote/checking/why.py makes."""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING, Any

from torch_promote.cli.output import width_of_output, write
from torch_promote.errors import ExpressionError, OptionError
from torch_promote.policy.cast_policy import DEVICE_TYPES

if TYPE_CHECKING:
    import torch

    from torch_promote.checking.why import Derivation

DESCRIPTION = """\
Explains the dtype of an expression, step by step: which casts autocast makes,
how the operands are promoted, and which values overflow.
"""

#: The promotion rules, `reference.RULE_NAMES`; tests/cli/test_cli.py compares them.
RULES = ("torch", "jax", "numpy", "array_api", "strict")

#: Command lines with what they print in their last line. `--help` shows them.
EXAMPLES = (
    ('"int32[3] + 5.5"', "Result: float32 of shape [3]"),
    ('"half[3] * 1e6"', "Result: float16 of shape [3]"),
    ('"cat([i1[2], f2[2]])"', "Result: float16 of shape [4]"),
    ('"where(bool[2], int8[2], 2.5)"', "Result: float32 of shape [2]"),
    ('"-(bf16[2, 3] @ bf16[3, 4])"', "Result: bfloat16 of shape [2, 4]"),
    ('"f4[2, 3].sum(1, dtype=double)"', "Result: float64 of shape [2]"),
    ('--autocast cpu "linear(f4[2, 3], f4[4, 3])"', "Result: bfloat16 of shape [2, 4]"),
    ('--autocast cuda "F.softmax(f2[2, 3], -1)"', "Result: float32 of shape [2, 3]"),
    ('--rule jax "int32[3] + 5.5"', "Result: float32 of shape [3]"),
)

EPILOG = """\
expressions:
  int32[2, 3], f2[3]     a tensor: its dtype and its sizes
  int64[]                a 0-dim tensor
  5.5, True, 2j          Python numbers
  bf16, half, f4, i1     short names of dtypes: PyTorch's, fp16, fp32, fp64 and
                         those of docs/promotion.md
  + - * / // % ** @ & | ^ ~ < <= > >= == !=  and parentheses
  cat([int8[2], f2[2]])  functions of torch, torch.nn.functional (F),
  F.gelu(f2[3])          torch.linalg and so on, and ops: torch.ops.aten.mm
  f2[2, 3].softmax(-1)   methods
  sort(f2[3])[1]         one of several results

Quote the expression: the shell has meanings of its own for * ( < > & and [.

examples:
{examples}

exit status: 0 for a result, 1 if PyTorch or the rule raises, 2 if the
expression is invalid.
""".format(examples="\n".join(f"  torch-promote why {line}\n{' ' * 25}{result}" for line, result in EXAMPLES))


def _dtype(text: str) -> torch.dtype:
    from torch_promote.reference.dtypes import named_dtype

    dtype = named_dtype(text)
    if dtype is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype. Names are PyTorch's, or short ones: bf16, half, f4")
    return dtype


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    # argparse would take -int8[3] for an option.
    parser._negative_number_matcher = re.compile(r"-(?=[^-])[^=]*[\[(\d]")  # type: ignore[assignment]
    parser.add_argument("expression", nargs="+", help='such as "int32[2, 3] + 5.5" or "cat([int8[2], f2[2]])"')
    parser.add_argument(
        "--autocast",
        choices=DEVICE_TYPES,
        help="explain the expression in a region of my_autocast, with the casts that it makes; needs no GPU",
    )
    parser.add_argument(
        "--dtype", type=_dtype, help="the region's dtype (default: bfloat16 on cpu, else float16)", metavar="DTYPE"
    )
    parser.add_argument("--policy", help="the region's policy: the name of a policy, or a policy file", metavar="P")
    parser.add_argument(
        "--default-dtype",
        type=_dtype,
        metavar="DTYPE",
        help="the dtype of Python floats (default: float32)",
    )
    parser.add_argument(
        "--rule",
        choices=RULES,
        metavar="RULE",
        default="torch",
        help="the promotion rule: torch (the default) is PyTorch's; jax and numpy are those libraries'; array_api is "
        "the standard's; strict refuses tensors of different dtypes",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status: 1 if PyTorch or the rule raises for the expression."""
    if args.autocast is None and (args.dtype is not None or args.policy is not None):
        raise OptionError("--dtype and --policy need --autocast.")
    from torch_promote.checking.why import why

    options = {name: getattr(args, name) for name in ("autocast", "dtype", "policy", "default_dtype", "rule")}
    try:
        derivation = why(" ".join(args.expression), **options)
    except ExpressionError as error:
        hint = " The shell may have changed it: put the expression in quotes." if len(args.expression) > 1 else ""
        raise OptionError(f"{error}{hint}") from error
    text = json.dumps(_as_data(derivation), indent=2) if args.json else derivation.text(width_of_output())
    write(f"{text}\n")
    return 0 if derivation.error is None else 1


def _as_data(derivation: Derivation) -> dict[str, Any]:
    from torch_promote.reference.dtypes import dtype_name

    results = derivation.results or (
        () if derivation.dtype is None or derivation.shape is None else ((derivation.dtype, derivation.shape),)
    )
    return {
        "expression": derivation.expression,
        "rule": derivation.rule,
        "autocast": derivation.autocast,
        "steps": list(derivation.steps),
        "dtype": None if derivation.dtype is None else dtype_name(derivation.dtype),
        "shape": None if derivation.shape is None else list(derivation.shape),
        "results": [{"dtype": dtype_name(dtype), "shape": list(shape)} for dtype, shape in results],
        "inferred": derivation.inferred,
        "error": derivation.error,
        "raised_by": None if derivation.error is None else "the rule" if derivation.by_rule else "PyTorch",
    }
