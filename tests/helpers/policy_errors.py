"""Parts of the texts of policy errors, which several tests compare."""

from __future__ import annotations

NAMED = (
    "Ops are named as in torch.ops or in Python: 'softmax', 'aten::softmax.int', 'mylib::op', 'F.softmax', torch.mm."
)
NOT_AN_OP = "expected the name of an op, an op object or a function of PyTorch, got "
