"""Ops of a library of the tests' own, one for each thing that a schema says about the policies of an op.

Errors that list overloads or close names are the same under every PyTorch for these.
"""

from __future__ import annotations

import torch

NAMESPACE = "policy_tests"

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
for _schema in (
    "join(Tensor a, Tensor b) -> Tensor",
    "many(Tensor a) -> Tensor",
    "many.dtype(Tensor a, *, ScalarType? dtype=None) -> Tensor",
    "many.out(Tensor a, *, Tensor(a!) out) -> Tensor(a!)",
    "write_(Tensor(a!) self, Tensor b) -> Tensor(a!)",
    "write_each_(Tensor(a!)[] self, Tensor[] b) -> ()",
    "count(int n) -> int",
    "count.float(float n) -> int",
    "packed((Tensor, int) pair, Dict(str, Tensor) named) -> Tensor",
    "optional(Tensor?[] several, Tensor? one) -> Tensor",
    "several(Tensor[] several, *, ScalarType? dtype=None) -> Tensor",
):
    _LIBRARY.define(_schema)
