"""Sample calls of linear algebra: decompositions, inverses, solvers and matrix norms."""

from __future__ import annotations

import torch

from torch_promote.parity.row_samples.make import Call, Make, Sample, call


def _positive_definite(make: Make) -> Call:
    return call(make.positive_definite(4))


def _rectangular(make: Make) -> Call:
    return call(make(5, 3))


def _reflectors(make: Make) -> Call:
    return call(make(5, 3), make(3))


#: Ops of one square matrix.
SQUARE = (
    "_lu_with_info", "cholesky", "inverse", "linalg_cholesky", "linalg_cholesky_ex", "linalg_cond", "linalg_eig",
    "linalg_eigh", "linalg_eigvals", "linalg_eigvalsh", "linalg_inv", "linalg_inv_ex",
    "linalg_matrix_rank.atol_rtol_float", "trace",
)  # fmt: skip
#: Ops of one matrix that need not be square.
RECTANGULAR = ("geqrf", "linalg_qr", "linalg_svdvals", "nuclear_norm", "pinverse", "qr", "svd")
#: Ops on the reflectors and factors that geqrf returns.
REFLECTORS = ("linalg_householder_product", "orgqr")

_MATRICES: dict[str, list[Sample]] = {
    **{f"aten::{op}": [_positive_definite] for op in SQUARE},
    **{f"aten::{op}": [_rectangular] for op in RECTANGULAR},
    **{f"aten::{op}": [_reflectors] for op in REFLECTORS},
    "aten::linalg_svd": [lambda m: call(m(5, 3), False)],
    "aten::linalg_cond.p_str": [lambda m: call(m.positive_definite(4), "fro")],
    "aten::linalg_matrix_rank": [lambda m: call(m.positive_definite(4), 0.1)],
    "aten::linalg_matrix_rank.tol_tensor": [lambda m: call(m.positive_definite(4), m(low=0.1, high=0.2))],
    "aten::linalg_matrix_rank.atol_rtol_tensor": [
        lambda m: call(m.positive_definite(4), atol=m(low=0.1, high=0.2), rtol=m(low=0.1, high=0.2))
    ],
    # On the CPU the default driver, gelsy, does not repeat its bits.
    "aten::linalg_lstsq": [lambda m: call(m(5, 3), m(5, 2), driver="gels")],
    "aten::linalg_solve": [lambda m: call(m.positive_definite(4), m(4, 2))],
    "aten::linalg_tensorinv": [lambda m: call(m(2, 3, 6), 2)],
    "aten::linalg_tensorsolve": [lambda m: call(m(2, 3, 6), m(2, 3))],
    "aten::cholesky_inverse": [lambda m: call(m.positive_definite(4, triangular=True))],
    "aten::cholesky_solve": [lambda m: call(m(4, 2), m.positive_definite(4, triangular=True))],
    "aten::triangular_solve": [lambda m: call(m(4, 2), m.positive_definite(4, triangular=True), False)],
    # Any matrix with a large diagonal is the packed LU of some matrix.
    "aten::lu_solve": [lambda m: call(m(4, 2), m.positive_definite(4), m.constant([1, 2, 3, 4], torch.int32))],
    "aten::ormqr": [lambda m: call(m(5, 3), m(3), m(5, 2))],
    "aten::linalg_matrix_norm": [lambda m: call(m(3, 4), 1), lambda m: call(m(3, 4), 1, dtype=torch.float64)],
    "aten::linalg_matrix_norm.str_ord": [lambda m: call(m(3, 4)), lambda m: call(m(3, 4), "nuc")],
    "aten::linalg_vector_norm": [lambda m: call(m(3, 4)), lambda m: call(m(3, 4), 1, [1], True, dtype=torch.float64)],
    "aten::nuclear_norm.dim": [lambda m: call(m(3, 4), [0, 1])],
}
