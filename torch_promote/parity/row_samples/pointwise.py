"""Sample calls of pointwise ops, reductions, norms and other ops along a dimension."""

from __future__ import annotations

import torch

from torch_promote.parity.row_samples.make import Call, Make, Sample, call


def _unary(make: Make) -> Call:
    return call(make(3, 4, low=0.1, high=0.9))


def _unary_transposed(make: Make) -> Call:
    return call(make(3, 4, low=0.1, high=0.9, transposed=True))


def _reduction_in_double(make: Make) -> Call:
    return call(make(3, 4), dtype=torch.float64)


#: Functions of one tensor, with values where all of them are defined.
UNARY = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt",
    "sinh", "tan",
)  # fmt: skip

_POINTWISE: dict[str, list[Sample]] = {
    **{f"aten::{op}": [_unary, _unary_transposed] for op in UNARY},
    "aten::softplus": [_unary, lambda m: call(m(3, 4), 2, 5)],
    "aten::pow.Scalar": [lambda m: call(2.5, m(3, 4))],
    "aten::pow.Tensor_Scalar": [lambda m: call(m(3, 4, low=0.1), 1.5)],
    "aten::pow.Tensor_Tensor": [lambda m: call(m(3, 4, low=0.1), m(4))],
    "aten::addcdiv": [lambda m: call(m(3, 4), m(3, 4), m(3, 4, low=0.5), value=2)],
    "aten::addcmul": [lambda m: call(m(3, 4), m(3, 4), m(4), value=2), lambda m: call(m(4), m(3, 1), m(4))],
    "aten::atan2": [lambda m: call(m(3, 4), m(3, 4, low=0.1))],
    "aten::cross": [lambda m: call(m(4, 3), m(4, 3)), lambda m: call(m(3, 4), m(3, 4), 0)],
    "aten::polar": [lambda m: call(m(3, 4, low=0.1), m(3, 4))],
    "aten::view_as_complex": [lambda m: call(m(3, 4, 2))],
    "aten::fake_quantize_per_tensor_affine": [lambda m: call(m(3, 4), 0.1, 0, -128, 127)],
    "aten::cat": [
        lambda m: call([m(2, 3), m(4, 3)]),
        lambda m: call([m(2, 3), m(2, 1), m(2, 2, transposed=True)], 1),
    ],
    "aten::stack": [lambda m: call([m(2, 3), m(2, 3), m(2, 3)]), lambda m: call([m(3), m(3)], 1)],
    "aten::index_copy": [lambda m: call(m(5, 3), 0, m.constant([4, 0]), m(2, 3))],
    "aten::index_put": [
        lambda m: call(m(5, 3), [m.constant([4, 0])], m(2, 3)),
        lambda m: call(m(5, 3), [m.constant([4, 0, 4]), m.constant([1, 2, 1])], m(3), True),
    ],
    "aten::scatter_add": [lambda m: call(m(3, 5), 0, m.constant([[0, 1, 2, 0, 0], [2, 0, 0, 1, 2]]), m(2, 5))],
    "aten::sum": [lambda m: call(m(3, 4)), _reduction_in_double],
    "aten::sum.dim_IntList": [
        lambda m: call(m(3, 4, 5), [0, 2]),
        lambda m: call(m(3, 4), [-1], True, dtype=torch.float64),
        lambda m: call(m(3, 4), None),
    ],
    "aten::prod": [lambda m: call(m(3, 4)), _reduction_in_double],
    "aten::prod.dim_int": [lambda m: call(m(3, 4), 1), lambda m: call(m(3, 4), 0, True, dtype=torch.float64)],
    "aten::cumsum": [lambda m: call(m(3, 4), 1), lambda m: call(m(3, 4), 0, dtype=torch.float64)],
    "aten::cumprod": [lambda m: call(m(3, 4), 1), lambda m: call(m(3, 4), 0, dtype=torch.float64)],
    "aten::softmax.int": [lambda m: call(m(3, 4), -1), lambda m: call(m(3, 4), 0, torch.float64)],
    "aten::log_softmax.int": [lambda m: call(m(3, 4), -1), lambda m: call(m(3, 4), 0, torch.float64)],
    "aten::logsumexp": [lambda m: call(m(3, 4), [1]), lambda m: call(m(3, 4), [0, 1], True)],
    "aten::norm.Scalar": [lambda m: call(m(3, 4)), lambda m: call(m(3, 4), 3)],
    "aten::norm.ScalarOpt_dim": [lambda m: call(m(3, 4), 2, [1]), lambda m: call(m(3, 4), None, [0], True)],
    "aten::frobenius_norm.dim": [lambda m: call(m(3, 4), [0, 1])],
    "aten::dist": [lambda m: call(m(3, 4), m(3, 4)), lambda m: call(m(3, 4), m(3, 4), 1)],
    "aten::pdist": [lambda m: call(m(4, 5))],
    "aten::cdist": [lambda m: call(m(4, 5), m(3, 5)), lambda m: call(m(2, 4, 5), m(2, 3, 5), 1.0)],
    "aten::cosine_similarity": [lambda m: call(m(3, 4), m(3, 4))],
    "aten::renorm": [lambda m: call(m(3, 4), 2, 0, 0.5)],
    "aten::quantile": [lambda m: call(m(3, 5), m(2, low=0.1, high=0.9), 1)],
    "aten::quantile.scalar": [
        lambda m: call(m(3, 5), 0.3),
        lambda m: call(m(3, 5), 0.5, 0, True, interpolation="lower"),
    ],
    "aten::nanquantile": [lambda m: call(m(3, 5), m(2, low=0.1, high=0.9), 1)],
    "aten::nanquantile.scalar": [lambda m: call(m(3, 5), 0.3)],
    "aten::layer_norm": [lambda m: call(m(3, 4), [4], m(4), m(4)), lambda m: call(m(3, 4), [4])],
    "aten::native_layer_norm": [
        lambda m: call(m(3, 4), [4], m(4), m(4), 1e-5),
        lambda m: call(m(3, 4), [4], None, None, 1e-5),
    ],
    "aten::rms_norm": [lambda m: call(m(3, 4), [4], m(4)), lambda m: call(m(3, 4), [4], None, 1e-6)],
    "aten::group_norm": [lambda m: call(m(2, 4, 3), 2, m(4), m(4)), lambda m: call(m(2, 4, 3, 3), 2)],
}
