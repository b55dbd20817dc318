"""Known facts about single rows: the kinds of input that PyTorch refuses, and results without a gradient.

Each entry has a reason, and holds for PyTorch and ours alike. All other kinds of input must run.
"""

from __future__ import annotations

import torch

FLOAT32, LOWER, MIXED, MIXED_LOWER_FIRST, DOUBLE, COMPLEX, INTEGER = (
    "float32", "lower", "mixed", "mixed, lower first", "double", "complex", "integer",
)  # fmt: skip


def dtypes_of(kind: str, lower: torch.dtype) -> tuple[torch.dtype, ...]:
    """Returns the dtypes that the tensors of a call get in turn; `lower` is the region's autocast dtype."""
    return {
        FLOAT32: (torch.float32,),
        LOWER: (lower,),
        MIXED: (torch.float32, lower),
        MIXED_LOWER_FIRST: (lower, torch.float32),
        DOUBLE: (torch.float64,),
        COMPLEX: (torch.complex64,),
        INTEGER: (torch.int64,),
    }[kind]


#: The kinds of input. "lower" is the region's autocast dtype; "mixed" alternates between float32 and it.
KINDS = (FLOAT32, LOWER, MIXED, MIXED_LOWER_FIRST, DOUBLE, COMPLEX, INTEGER)
#: The kinds that every row may refuse.
RARE = (COMPLEX, INTEGER)

#: (row, device) -> the kinds of input that it refuses besides the rare ones, and why. "cuda" includes fake tensors,
#: "real cuda" does not.
REFUSED: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    ("aten::_grid_sampler_2d_cpu_fallback", "cpu"): ((DOUBLE,), "the kernel supports float32 only"),
    ("aten::mkldnn_rnn_layer", "cpu"): ((DOUBLE,), "oneDNN has no LSTM in float64"),
    ("aten::linalg_matrix_norm.str_ord", "cuda"): (
        (LOWER, MIXED_LOWER_FIRST),
        "the nuclear norm does not support half precision, and the policy casts no tensor",
    ),
    ("aten::_scaled_dot_product_flash_attention", "real cuda"): ((DOUBLE,), "the kernel supports half precision only"),
}

#: Rows whose results have no gradient, and why.
NO_GRADIENT: dict[str, str] = {
    "aten::_addmm_activation": "PyTorch defines no derivative",
    "aten::_native_multi_head_attention": "PyTorch defines no derivative, and refuses inputs that require grad",
    "aten::geqrf": "PyTorch defines no derivative",
    "aten::linalg_cond.p_str": "the forward changes a tensor in place that the backward needs",
    "aten::linalg_matrix_rank": "returns integers",
    "aten::linalg_matrix_rank.atol_rtol_float": "returns integers",
    "aten::linalg_matrix_rank.atol_rtol_tensor": "returns integers",
    "aten::linalg_matrix_rank.tol_tensor": "returns integers",
}

#: Rows that some processors refuse in some or all dtypes. There, tests check only that the call reaches the kernel.
PROCESSOR_BOUND = {"aten::mkldnn_rnn_layer"}
