"""`torch-promote why "int32[3] + 5.5"`: the derivation of an expression's dtype."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import torch

from torch_promote.reference.derivation import why
from torch_promote.reference.dtypes import Family, dtype_name, family
from torch_promote.reference.expression import ExpressionError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = Any

__all__ = ["add_parser", "run"]


def _default_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) and family(dtype) is Family.FLOAT:
        return dtype
    raise argparse.ArgumentTypeError(f"{name!r} is no default dtype. Legal: float16, bfloat16, float32, float64.")


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Adds the `why` command.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.

    Returns:
        The command's parser; its `run` default is `run`.

    Example:
        >>> parser = add_parser(argparse.ArgumentParser().add_subparsers())
        >>> run(parser.parse_args(["int8[3] * int64[]"]))
        int8[3] * int64[]
        1. int8[3] is a tensor with dimensions: state dim, int8.
        2. int64[] is a 0-dim tensor: state zero, int64.
        3. dim int8 with zero int64: int64 is of no higher kind than int8, so int8 stays: a weaker state
           does not widen.
        4. * computes in int8 and returns int8.
        Result: int8 of shape [3]
        0
    """
    parser = subparsers.add_parser(
        "why",
        help="derive the dtype of an expression, step by step",
        description="Derives the dtype of an expression of tensors and Python numbers, step by step.",
        epilog="Exit status: 0 for a result, 1 if PyTorch raises for the expression, 2 if it cannot be read.",
    )
    parser.add_argument(
        "expression", help='such as "int32[2, 3] + 5.5"; a tensor is its dtype and sizes, and int64[] is 0-dim'
    )
    parser.add_argument(
        "--default-dtype",
        type=_default_dtype,
        metavar="DTYPE",
        help=f"what Python floats count as (default: {dtype_name(torch.get_default_dtype())})",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Prints the derivation.

    Args:
        args: With `expression` and `default_dtype`.

    Returns:
        The exit status: 0, 1 if PyTorch raises for the expression, 2 if it cannot be read.
    """
    try:
        derivation = why(args.expression, default_dtype=args.default_dtype)
    except ExpressionError as error:
        print(f"torch-promote why: {error}", file=sys.stderr)
        return 2
    print(derivation)
    return 0 if derivation.error is None else 1
