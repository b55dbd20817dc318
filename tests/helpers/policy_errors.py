"""Parts of the texts of policy errors, which overrides and policy files have in common."""

from __future__ import annotations

NAMED = "Ops are named as in torch.ops: 'softmax', 'aten::softmax.int', 'mylib::op'."
POLICIES = (
    "Legal: lower_precision_fp, fp32, fp32_set_opt_dtype, fp32_append_dtype, promote, match_self, fallthrough, keep, "
    "banned, fp16 or a floating dtype."
)
LEGAL_WRITING = "Legal: match_self, fallthrough, keep, banned."
WRITES = "it writes to an argument, and autocast never casts that argument"
NO_DTYPE = "its schema has no optional dtype argument"
