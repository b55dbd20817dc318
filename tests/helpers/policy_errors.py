"""Parts of the texts of policy errors, which overrides and policy files have in common."""

from __future__ import annotations

NAMED = (
    "Ops are named as in torch.ops or in Python: 'softmax', 'aten::softmax.int', 'mylib::op', 'F.softmax', torch.mm."
)
NOT_AN_OP = "expected the name of an op, an op object or a function of PyTorch, got "
POLICIES = (
    "Legal: lower_precision_fp (or lower, or fp16: all three mean the region's dtype), fp32, fp32_set_opt_dtype, "
    "fp32_append_dtype, promote, match_self, fallthrough, keep, banned or a floating dtype, such as float16."
)
LEGAL_WRITING = "Legal: match_self, fallthrough, keep, banned."
WRITES = "it writes to an argument, and autocast never casts that argument"
NO_DTYPE = "its schema has no optional dtype argument"
