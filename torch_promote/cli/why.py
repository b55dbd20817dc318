"""The command `torch-promote why`: prints the derivation that torch_promote/reference/derivation makes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

import torch

from torch_promote.reference.derivation.derivation import Derivation, why
from torch_promote.reference.derivation.expression import ExpressionError
from torch_promote.reference.dtypes import Family, dtype_name, family
from torch_promote.reference.promotion_rules import RULE_NAMES

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = Any

__all__ = ["add_parser", "run"]


def _default_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) and family(dtype) is Family.FLOAT:
        return dtype
    raise argparse.ArgumentTypeError(f"{name!r} is not a default dtype. Legal: float16, bfloat16, float32, float64.")


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Adds the command `why`.

    Args:
        subparsers: The result of `ArgumentParser.add_subparsers`.

    Returns:
        The command's parser; its `run` default is `run`.

    Example:
        >>> parser = add_parser(argparse.ArgumentParser().add_subparsers())
        >>> run(parser.parse_args(["int8[3] * int64[]"]))
        int8[3] * int64[]
        1. int8[3] is a tensor with dimensions: state dim, int8.
        2. int64[] is a 0-dim tensor: state zero, int64.
        3. dim int8 with zero int64: int64 is not of a higher kind than int8, so int8 stays: a weaker state
           does not widen.
        4. * computes in int8 and returns int8.
        Result: int8 of shape [3]
        0
    """
    parser = subparsers.add_parser(
        "why",
        help="explain the dtype of an expression, step by step",
        description="Explains the dtype of an expression of tensors and Python numbers, step by step, by PyTorch's "
        "rule or by another promotion rule.",
        epilog="Exit status: 0 for a result, 1 if PyTorch or the rule raises, 2 if the expression is invalid.",
    )
    parser.add_argument(
        "expression", help='such as "int32[2, 3] + 5.5"; write a tensor as its dtype and sizes, a 0-dim one as int64[]'
    )
    parser.add_argument(
        "--default-dtype",
        type=_default_dtype,
        metavar="DTYPE",
        help=f"the dtype of Python floats (default: {dtype_name(torch.get_default_dtype())})",
    )
    parser.add_argument(
        "--rule",
        choices=RULE_NAMES,
        default="torch",
        help="the promotion rule: torch (the default) is PyTorch's; jax and numpy are those libraries'; array_api is "
        "the standard's; strict refuses tensors of different dtypes",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: The parsed command line: `expression`, `default_dtype`, `rule` and `json`.

    Returns:
        The exit status: 0, 1 if PyTorch or the rule raises for the expression, 2 if it is invalid.
    """
    try:
        derivation = why(args.expression, default_dtype=args.default_dtype, rule=args.rule)
    except ExpressionError as error:
        print(f"torch-promote why: {error}", file=sys.stderr)
        return 2
    print(json.dumps(_as_data(derivation), indent=2) if args.json else derivation)
    return 0 if derivation.error is None else 1


def _as_data(derivation: Derivation) -> dict[str, Any]:
    return {
        "expression": derivation.expression,
        "rule": derivation.rule,
        "steps": list(derivation.steps),
        "dtype": None if derivation.dtype is None else dtype_name(derivation.dtype),
        "shape": None if derivation.shape is None else list(derivation.shape),
        "error": derivation.error,
        "raised_by": None if derivation.error is None else "the rule" if derivation.by_rule else "PyTorch",
    }
