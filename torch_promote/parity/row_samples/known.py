"""What is known of single rows: the input kinds that PyTorch itself refuses, and what has no gradient or no value.

Each entry says why. It permits what it names, in PyTorch and in ours alike; what is not named here must run.
"""

from __future__ import annotations

import torch

FLOAT32, LOWER, MIXED, MIXED_LOWER_FIRST, DOUBLE, COMPLEX, INTEGER = (
    "float32", "lower", "mixed", "mixed, lower first", "double", "complex", "integer",
)  # fmt: skip


def dtypes_of(kind: str, lower: torch.dtype) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that take turns in a call's tensors; `lower` is the region's autocast dtype."""
    return {
        FLOAT32: (torch.float32,),
        LOWER: (lower,),
        MIXED: (torch.float32, lower),
        MIXED_LOWER_FIRST: (lower, torch.float32),
        DOUBLE: (torch.float64,),
        COMPLEX: (torch.complex64,),
        INTEGER: (torch.int64,),
    }[kind]


#: What is under test in a call. "lower" is the region's autocast dtype, and "mixed" has it and float32 by turns.
KINDS = (FLOAT32, LOWER, MIXED, MIXED_LOWER_FIRST, DOUBLE, COMPLEX, INTEGER)
#: The kinds that every row may refuse.
RARE = (COMPLEX, INTEGER)

#: (row, where) -> the kinds of input besides the rare ones that it refuses, and why. Where "cuda" stands, fake tensors
#: are refused too, where "real cuda" stands they are not.
REFUSED: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("aten::_grid_sampler_2d_cpu_fallback", "cpu"): ((DOUBLE,), "the kernel reads float32 alone"),
    ("aten::mkldnn_rnn_layer", "cpu"): ((DOUBLE,), "oneDNN has no LSTM in float64"),
    ("aten::linalg_matrix_norm.str_ord", "cuda"): (
        (LOWER, MIXED_LOWER_FIRST),
        "the nuclear norm is not made for half precision, and the policy casts no tensor",
    ),
    ("aten::_scaled_dot_product_flash_attention", "real cuda"): ((DOUBLE,), "the kernel is for half precision alone"),
}

#: Rows whose results have no gradient, and why.
NO_GRADIENT: dict[str, str] = {
    "aten::_addmm_activation": "no derivative is written",
    "aten::_native_multi_head_attention": "no derivative is written, and inputs that require grad are refused",
    "aten::geqrf": "no derivative is written",
    "aten::linalg_cond.p_str": "the backward finds a tensor that the forward changed in place",
    "aten::linalg_matrix_rank": "returns integers",
    "aten::linalg_matrix_rank.atol_rtol_float": "returns integers",
    "aten::linalg_matrix_rank.atol_rtol_tensor": "returns integers",
    "aten::linalg_matrix_rank.tol_tensor": "returns integers",
}

#: Rows that some processors refuse in some or all dtypes. There, it counts that the call arrives below autocast.
PROCESSOR_BOUND = {"aten::mkldnn_rnn_layer"}
