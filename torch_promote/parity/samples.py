"""The samples of an entry: calls with labels such as `float32/3/mixed`.

A label consists of the dtype of the inputs, the sample's number and its kind: docs/parity.md lists them. The kind of a
pair of dtypes, such as `int16-dim-zero`, is the second dtype, and whether each input has dimensions.

The samples of an op and dtype depend on nothing else: each pair has its own seed, and all samples are generated before
the first one runs.
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from torch_promote.checking.comparison import copy_with_strides
from torch_promote.parity.model import DENSE_ONLY, Entry, Options
from torch_promote.reference.dtypes import dtype_name

#: Positional and keyword arguments of one call.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Make:
    """Makes the tensors of one sample call: calling it returns a tensor of the dtype under test."""

    # Several dtypes alternate, so that the arguments of one call differ. Indices, counts and masks have their own
    # dtypes.

    def __init__(
        self, dtypes: Sequence[torch.dtype], device: str, *, fake: bool = False, grad: bool = False, seed: int = 0
    ) -> None:
        self._dtypes = dtypes
        self._device = device
        self._fake = fake
        self._grad = grad
        self._made = 0
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(
        self,
        *shape: int,
        low: float = -1.0,
        high: float = 1.0,
        grad: bool = True,
        memory_format: torch.memory_format = torch.contiguous_format,
        transposed: bool = False,
    ) -> torch.Tensor:
        """Returns a tensor of uniform values in [low, high); `grad=False` is for arguments that have no derivative."""
        dtype = self._next_dtype()
        if transposed:
            tensor = torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device=self._device).mT
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self._device, memory_format=memory_format)
        return self._filled(tensor, lambda: self._uniform(shape, low, high), grad)

    def positive_definite(self, n: int, *, triangular: bool = False) -> torch.Tensor:
        """Returns a well-conditioned symmetric matrix with distinct eigenvalues, or its lower triangle."""

        def values() -> torch.Tensor:
            half = self._uniform((n, n), -0.25, 0.25)
            matrix = half + half.mT + torch.diag(torch.arange(n + 1, 2 * n + 1))
            return matrix.tril() if triangular else matrix

        return self._filled(torch.empty(n, n, dtype=self._next_dtype(), device=self._device), values, grad=True)

    def index(self, *shape: int, high: int) -> torch.Tensor:
        """Returns int64 values in [0, high)."""
        if self._fake:
            return torch.empty(shape, dtype=torch.int64, device=self._device)
        return torch.randint(high, shape, generator=self._generator).to(self._device)

    def constant(self, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Returns the given values in the given dtype, whatever the dtype under test."""
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _next_dtype(self) -> torch.dtype:
        self._made += 1
        return self._dtypes[(self._made - 1) % len(self._dtypes)]

    def _uniform(self, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=self._generator) * (high - low) + low

    def _filled(self, tensor: torch.Tensor, values: Callable[[], torch.Tensor], grad: bool) -> torch.Tensor:
        floating = tensor.is_floating_point()
        if not self._fake:
            # As integers, nearly all values in [-1, 1) would be zero.
            tensor.copy_(values() if floating else values() * 4)
        return tensor.requires_grad_(self._grad and grad and floating)


#: Builds one call of a row.
Builder = Callable[[Make], Call]


def call(*args: Any, **kwargs: Any) -> Call:
    """Returns the arguments of a call as positional and keyword arguments."""
    return args, kwargs


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


def _native_multi_head_attention(m: Make) -> Call:
    embed = 8
    query = m(2, 3, embed, grad=False)
    shapes = (3 * embed, embed), (3 * embed,), (embed, embed), (embed,)
    return call(query, query, query, embed, 2, *(m(*shape, grad=False) for shape in shapes))


def _mkldnn_lstm(train: bool) -> Builder:
    hidden, inputs, lstm = 4, 3, 2

    def sample(m: Make) -> Call:
        weights = m(4 * hidden, inputs), m(4 * hidden, hidden), m(4 * hidden), m(4 * hidden)
        state = m(2, hidden), m(2, hidden)
        return call(m(5, 2, inputs), *weights, *state, False, [], lstm, hidden, 1, True, False, False, train)

    return sample


_MEAN, _SUM = 1, 2
_F64 = torch.float64
_CL2D, _CL3D = torch.channels_last, torch.channels_last_3d

#: Overloads with the same sample calls, separated by spaces -> these calls.
_SAMPLES: dict[str, list[Builder]] = {
    # Losses. Targets without a derivative are made with grad=False.
    "mse_loss l1_loss smooth_l1_loss huber_loss": [lambda m: call(m(3, 4), m(3, 4))],
    "soft_margin_loss": [lambda m: call(m(3, 4), m(3, 4, grad=False))],
    "hinge_embedding_loss": [lambda m: call(m(3, 4), m.constant([1, -1, 1, -1]))],
    "kl_div": [lambda m: call(m(3, 4), m(3, 4, low=0.1))],
    "poisson_nll_loss": [lambda m: call(m(3, 4), m(3, 4, low=0.1, grad=False), True, True, 1e-8, _MEAN)],
    "binary_cross_entropy": [
        lambda m: call(m(3, 4, low=0.1, high=0.9), m(3, 4, low=0.0, grad=False), m(4, low=0.5, grad=False))
    ],
    "binary_cross_entropy_with_logits": [
        lambda m: call(m(3, 4), m(3, 4, low=0.0)),
        lambda m: call(m(3, 4), m(3, 4, low=0.0), m(4, low=0.5, grad=False), m(4, low=0.5, grad=False)),
    ],
    "margin_ranking_loss": [lambda m: call(m(4), m(4), m.constant([1, -1, 1, -1]), 0.1)],
    "cosine_embedding_loss": [lambda m: call(m(3, 4), m(3, 4), m.constant([1, -1, 1]))],
    "triplet_margin_loss": [lambda m: call(m(3, 4), m(3, 4), m(3, 4))],
    "multi_margin_loss": [lambda m: call(m(3, 4), m.index(3, high=4), 1, 1, m(4, low=0.1, grad=False))],
    "multilabel_margin_loss": [lambda m: call(m(2, 4), m.constant([[3, 0, -1, 1], [1, -1, 0, 0]]))],
    "multilabel_margin_loss_forward": [lambda m: call(m(2, 4), m.constant([[3, 0, -1, 1], [1, -1, 0, 0]]), _MEAN)],
    "nll_loss": [
        lambda m: call(m(3, 4), m.index(3, high=4)),
        lambda m: call(m(3, 4), m.index(3, high=4), m(4, low=0.1, grad=False), _SUM),
    ],
    "nll_loss2d": [lambda m: call(m(2, 3, 4, 4), m.index(2, 4, 4, high=3), m(3, low=0.1, grad=False))],
    "cross_entropy_loss": [
        lambda m: call(m(3, 4), m.index(3, high=4), m(4, low=0.1, grad=False)),
        lambda m: call(m(3, 4), m(3, 4, low=0.0), label_smoothing=0.1),
    ],
    "ctc_loss.IntList": [lambda m: call(m(6, 2, 4), m.constant([[1, 2], [3, 1]]), [6, 5], [2, 1])],
    "ctc_loss.Tensor": [
        lambda m: call(m(6, 2, 4), m.constant([[1, 2], [3, 1]]), m.constant([6, 5]), m.constant([2, 1]))
    ],
    # Linear algebra: decompositions, inverses, solvers and matrix norms.
    "_lu_with_info cholesky inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh "
    "linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_matrix_rank.atol_rtol_float trace": [
        lambda m: call(m.positive_definite(4))
    ],
    "geqrf linalg_qr linalg_svdvals nuclear_norm pinverse qr svd": [lambda m: call(m(5, 3))],
    "linalg_householder_product orgqr": [lambda m: call(m(5, 3), m(3))],
    "linalg_svd": [lambda m: call(m(5, 3), False)],
    "linalg_cond.p_str": [lambda m: call(m.positive_definite(4), "fro")],
    "linalg_matrix_rank": [lambda m: call(m.positive_definite(4), 0.1)],
    "linalg_matrix_rank.tol_tensor": [lambda m: call(m.positive_definite(4), m(low=0.1, high=0.2))],
    "linalg_matrix_rank.atol_rtol_tensor": [
        lambda m: call(m.positive_definite(4), atol=m(low=0.1, high=0.2), rtol=m(low=0.1, high=0.2))
    ],
    # On the CPU the default driver, gelsy, does not repeat its bits.
    "linalg_lstsq": [lambda m: call(m(5, 3), m(5, 2), driver="gels")],
    "linalg_solve": [lambda m: call(m.positive_definite(4), m(4, 2))],
    "linalg_tensorinv": [lambda m: call(m(2, 3, 6), 2)],
    "linalg_tensorsolve": [lambda m: call(m(2, 3, 6), m(2, 3))],
    "cholesky_inverse": [lambda m: call(m.positive_definite(4, triangular=True))],
    "cholesky_solve": [lambda m: call(m(4, 2), m.positive_definite(4, triangular=True))],
    "triangular_solve": [lambda m: call(m(4, 2), m.positive_definite(4, triangular=True), False)],
    # Any matrix with a large diagonal is the packed LU of some matrix.
    "lu_solve": [lambda m: call(m(4, 2), m.positive_definite(4), m.constant([1, 2, 3, 4], torch.int32))],
    "ormqr": [lambda m: call(m(5, 3), m(3), m(5, 2))],
    "linalg_matrix_norm": [lambda m: call(m(3, 4), 1), lambda m: call(m(3, 4), 1, dtype=_F64)],
    "linalg_matrix_norm.str_ord": [lambda m: call(m(3, 4)), lambda m: call(m(3, 4), "nuc")],
    "linalg_vector_norm": [lambda m: call(m(3, 4)), lambda m: call(m(3, 4), 1, [1], True, dtype=_F64)],
    "nuclear_norm.dim frobenius_norm.dim": [lambda m: call(m(3, 4), [0, 1])],
    # Pointwise ops, reductions, norms and other ops along a dimension.
    "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh softplus tan": [
        lambda m: call(m(3, 4, low=0.1, high=0.9)),
        lambda m: call(m(3, 4, low=0.1, high=0.9, transposed=True)),
    ],
    "pow.Scalar": [lambda m: call(2.5, m(3, 4))],
    "pow.Tensor_Scalar": [lambda m: call(m(3, 4, low=0.1), 1.5)],
    "pow.Tensor_Tensor": [lambda m: call(m(3, 4, low=0.1), m(4))],
    "addcdiv": [lambda m: call(m(3, 4), m(3, 4), m(3, 4, low=0.5), value=2)],
    "addcmul": [lambda m: call(m(3, 4), m(3, 4), m(4), value=2)],
    "atan2": [lambda m: call(m(3, 4), m(3, 4, low=0.1))],
    "cross": [lambda m: call(m(4, 3), m(4, 3))],
    "polar": [lambda m: call(m(3, 4, low=0.1), m(3, 4))],
    "view_as_complex": [lambda m: call(m(3, 4, 2))],
    "fake_quantize_per_tensor_affine": [lambda m: call(m(3, 4), 0.1, 0, -128, 127)],
    "cat": [lambda m: call([m(2, 3), m(4, 3)]), lambda m: call([m(2, 3), m(2, 1), m(2, 2, transposed=True)], 1)],
    "stack": [lambda m: call([m(2, 3), m(2, 3), m(2, 3)])],
    "index_copy": [lambda m: call(m(5, 3), 0, m.constant([4, 0]), m(2, 3))],
    "index_put": [lambda m: call(m(5, 3), [m.constant([4, 0])], m(2, 3))],
    "scatter_add": [lambda m: call(m(3, 5), 0, m.constant([[0, 1, 2, 0, 0], [2, 0, 0, 1, 2]]), m(2, 5))],
    "sum prod": [lambda m: call(m(3, 4)), lambda m: call(m(3, 4), dtype=_F64)],
    "sum.dim_IntList": [lambda m: call(m(3, 4, 5), [0, 2]), lambda m: call(m(3, 4), [-1], True, dtype=_F64)],
    "prod.dim_int cumsum cumprod": [lambda m: call(m(3, 4), 1), lambda m: call(m(3, 4), 0, dtype=_F64)],
    "softmax.int log_softmax.int": [lambda m: call(m(3, 4), -1), lambda m: call(m(3, 4), 0, _F64)],
    "logsumexp": [lambda m: call(m(3, 4), [1])],
    "norm.Scalar": [lambda m: call(m(3, 4), 3)],
    "norm.ScalarOpt_dim": [lambda m: call(m(3, 4), 2, [1]), lambda m: call(m(3, 4), None, [0], True)],
    "dist cosine_similarity linalg_vecdot": [lambda m: call(m(3, 4), m(3, 4))],
    "pdist": [lambda m: call(m(4, 5))],
    "cdist": [lambda m: call(m(4, 5), m(3, 5))],
    "renorm": [lambda m: call(m(3, 4), 2, 0, 0.5)],
    "quantile nanquantile": [lambda m: call(m(3, 5), m(2, low=0.1, high=0.9), 1)],
    "quantile.scalar nanquantile.scalar": [lambda m: call(m(3, 5), 0.3, 0, True, interpolation="lower")],
    "layer_norm": [lambda m: call(m(3, 4), [4], m(4), m(4)), lambda m: call(m(3, 4), [4])],
    "native_layer_norm": [
        lambda m: call(m(3, 4), [4], m(4), m(4), 1e-5),
        lambda m: call(m(3, 4), [4], None, None, 1e-5),
    ],
    "rms_norm": [lambda m: call(m(3, 4), [4], m(4)), lambda m: call(m(3, 4), [4], None, 1e-6)],
    "batch_norm": [
        lambda m: call(m(2, 3, 4), m(3), m(3), m(3, grad=False), m(3, low=0.1, grad=False), False, 0.1, 1e-5, True),
        lambda m: call(m(2, 3, 4, 4), m(3), m(3), None, None, True, 0.1, 1e-5, True),
    ],
    "group_norm": [lambda m: call(m(2, 4, 3), 2, m(4), m(4)), lambda m: call(m(2, 4, 3, 3), 2)],
    # Matrix products, convolutions, attention and recurrent cells.
    "mm": [lambda m: call(m(3, 4), m(4, 5)), lambda m: call(m(3, 4, transposed=True), m(4, 5, transposed=True))],
    "bmm": [lambda m: call(m(2, 3, 4), m(2, 4, 5))],
    "mv": [lambda m: call(m(3, 4), m(4))],
    "dot vdot": [lambda m: call(m(4), m(4))],
    "matmul": [lambda m: call(m(2, 3, 4), m(4, 5)), lambda m: call(m(3, 4), m(4)), lambda m: call(m(4), m(4))],
    "addmm": [lambda m: call(m(3, 5), m(3, 4), m(4, 5)), lambda m: call(m(5), m(3, 4), m(4, 5), beta=0.5, alpha=2)],
    "_addmm_activation": [lambda m: call(m(5), m(3, 4), m(4, 5), use_gelu=True)],
    "addmv": [lambda m: call(m(3), m(3, 4), m(4))],
    "addr": [lambda m: call(m(3, 4), m(3), m(4))],
    "addbmm": [lambda m: call(m(3, 5), m(2, 3, 4), m(2, 4, 5))],
    "baddbmm": [lambda m: call(m(2, 3, 5), m(2, 3, 4), m(2, 4, 5))],
    "chain_matmul linalg_multi_dot": [lambda m: call([m(3, 4), m(4, 5), m(5, 2)])],
    "einsum": [lambda m: call("bij,bjk->bik", [m(2, 3, 4), m(2, 4, 5)])],
    "tensordot": [lambda m: call(m(3, 4, 5), m(5, 4, 2), [1, 2], [1, 0])],
    "bilinear": [lambda m: call(m(3, 4), m(3, 5), m(2, 4, 5), m(2)), lambda m: call(m(3, 4), m(3, 5), m(2, 4, 5))],
    "linear": [lambda m: call(m(2, 3, 4), m(5, 4), m(5)), lambda m: call(m(3, 4), m(5, 4))],
    "prelu": [lambda m: call(m(2, 3, 4), m(3))],
    "conv1d": [lambda m: call(m(2, 3, 8), m(4, 3, 3), m(4)), lambda m: call(m(2, 3, 8), m(4, 3, 3))],
    "conv1d.padding": [lambda m: call(m(2, 3, 8), m(4, 3, 3), m(4), [1], "same")],
    "conv2d": [
        lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), m(4)),
        lambda m: call(m(2, 3, 6, 6, memory_format=_CL2D), m(4, 3, 3, 3, memory_format=_CL2D), None, [2, 1], [1, 1]),
    ],
    "conv2d.padding": [lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), m(4), [1, 1], "same")],
    "conv3d": [
        lambda m: call(m(1, 2, 4, 4, 4), m(3, 2, 2, 2, 2), m(3)),
        lambda m: call(m(1, 2, 4, 4, 4, memory_format=_CL3D), m(3, 2, 2, 2, 2, memory_format=_CL3D)),
    ],
    "conv3d.padding": [lambda m: call(m(1, 2, 4, 4, 4), m(3, 2, 3, 3, 3), m(3), [1, 1, 1], "same")],
    "conv_tbc": [lambda m: call(m(6, 2, 3), m(3, 3, 4), m(4), 1)],
    "conv_transpose1d": [lambda m: call(m(2, 3, 6), m(3, 4, 3), m(4))],
    "conv_transpose2d.input": [lambda m: call(m(2, 3, 5, 5), m(3, 4, 3, 3), m(4))],
    "conv_transpose3d.input": [lambda m: call(m(1, 2, 3, 3, 3), m(2, 3, 2, 2, 2), m(3))],
    "convolution": [
        lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), m(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        lambda m: call(m(2, 3, 5), m(3, 4, 3), None, [1], [0], [1], True, [0], 1),
    ],
    "_convolution": [
        lambda m: call(
            m(2, 3, 6, 6), m(4, 3, 3, 3), m(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, True, True, True
        )
    ],
    "_convolution.deprecated": [
        lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, True, True)
    ],
    "cudnn_convolution": [
        lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), [1, 1], [2, 2], [1, 1], 1, False, True, True),
    ],
    "_mps_convolution": [lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), m(4), [0, 0], [1, 1], [1, 1], 1)],
    "cudnn_convolution_transpose": [
        lambda m: call(m(2, 3, 5, 5), m(3, 4, 3, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, True, True)
    ],
    "scaled_dot_product_attention": [
        lambda m: call(m(2, 2, 4, 8), m(2, 2, 4, 8), m(2, 2, 4, 8), m(4, 4, grad=False)),
        lambda m: call(m(2, 2, 4, 8), m(2, 2, 4, 8), m(2, 2, 4, 8), is_causal=True, scale=0.5),
    ],
    "flex_attention": [lambda m: call(m(2, 2, 4, 8), m(2, 2, 4, 8), m(2, 2, 4, 8))],
    "_scaled_dot_product_flash_attention": [lambda m: call(m(2, 2, 16, 16), m(2, 2, 16, 16), m(2, 2, 16, 16))],
    "_native_multi_head_attention": [_native_multi_head_attention],
    "rnn_tanh_cell rnn_relu_cell": [lambda m: call(m(2, 3), m(2, 4), m(4, 3), m(4, 4), m(4), m(4))],
    "gru_cell": [lambda m: call(m(2, 3), m(2, 4), m(12, 3), m(12, 4), m(12), m(12))],
    "lstm_cell": [lambda m: call(m(2, 3), [m(2, 4), m(2, 4)], m(16, 3), m(16, 4), m(16), m(16))],
    "_thnn_fused_gru_cell": [lambda m: call(m(2, 12), m(2, 12), m(2, 4), m(12), m(12))],
    "_thnn_fused_lstm_cell": [lambda m: call(m(2, 16), m(2, 16), m(2, 4), m(16), m(16))],
    "mkldnn_rnn_layer": [_mkldnn_lstm(train=False), _mkldnn_lstm(train=True)],
    # Images, volumes and signals: pooling, resizing, padding, grids and transforms.
    "adaptive_avg_pool3d adaptive_max_pool3d max_pool3d": [lambda m: call(m(1, 2, 4, 4, 4), [2, 2, 2])],
    "avg_pool3d": [
        lambda m: call(m(1, 2, 4, 4, 4), [2, 2, 2]),
        lambda m: call(m(1, 2, 4, 4, 4, memory_format=_CL3D), [2, 2, 2], [1, 1, 1]),
    ],
    "fractional_max_pool2d": [lambda m: call(m(1, 2, 6, 6), [2, 2], [3, 3], m(1, 2, 2, low=0.0, grad=False))],
    "fractional_max_pool3d": [lambda m: call(m(1, 2, 6, 6, 6), [2, 2, 2], [3, 3, 3], m(1, 2, 3, low=0.0, grad=False))],
    "max_unpool2d": [lambda m: call(m(1, 1, 2, 2), m.constant([[[[0, 3], [8, 15]]]]), [4, 4])],
    "max_unpool3d": [
        lambda m: call(m(1, 1, 1, 2, 2), m.constant([[[[[0, 3], [8, 31]]]]]), [2, 4, 4], [2, 2, 2], [0, 0, 0])
    ],
    "upsample_nearest1d _upsample_nearest_exact1d": [lambda m: call(m(2, 3, 4), [8])],
    "upsample_nearest2d _upsample_nearest_exact2d": [
        lambda m: call(m(2, 3, 4, 4), [8, 6]),
        lambda m: call(m(2, 3, 4, 4, memory_format=_CL2D), [8, 8], 2.0, 2.0),
    ],
    "upsample_nearest3d _upsample_nearest_exact3d": [lambda m: call(m(1, 2, 3, 3, 3), [6, 6, 6])],
    "upsample_linear1d": [lambda m: call(m(2, 3, 4), [8], False)],
    "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa": [
        lambda m: call(m(2, 3, 8, 8), [4, 6], False)
    ],
    "upsample_trilinear3d": [lambda m: call(m(1, 2, 3, 3, 3), [6, 6, 6], False)],
    "reflection_pad1d replication_pad1d": [lambda m: call(m(2, 3, 5), [2, 1])],
    "reflection_pad2d replication_pad2d": [lambda m: call(m(2, 3, 5, 5), [2, 1, 1, 0])],
    "replication_pad3d": [lambda m: call(m(1, 2, 3, 3, 3), [1, 1, 1, 0, 0, 1])],
    "grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback": [
        lambda m: call(m(1, 2, 4, 4), m(1, 3, 3, 2), 0, 0, False)
    ],
    "grid_sampler_3d": [lambda m: call(m(1, 2, 3, 3, 3), m(1, 2, 2, 2, 3), 0, 0, False)],
    "fft_fft fft_hfft fft_ifft fft_ihfft fft_irfft fft_rfft": [lambda m: call(m(2, 6))],
    "fft_fft2 fft_fftn fft_ifft2 fft_ifftn fft_irfft2 fft_irfftn fft_rfft2 fft_rfftn": [lambda m: call(m(2, 4, 6))],
    "stft stft.center": [lambda m: call(m(2, 16), 8, window=m(8, low=0.1), return_complex=True)],
}

#: The qualified name of an overload -> its sample calls.
SAMPLES = {f"aten::{name}": samples for names, samples in _SAMPLES.items() for name in names.split()}


#: A function with its positional and keyword arguments.
Bound = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
#: The number of samples of an op and dtype in a quick run.
_QUICK = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample."""

    label: str  # such as "float32/3/mixed"
    bound: Bound
    finish: Callable[[Any], Any] | None = None  # maps the results to what is differentiated


@dataclass(frozen=True, slots=True)
class NotGenerated:
    """PyTorch raised an error while it generated the samples of one dtype."""

    dtype: str
    why: str


def samples(entry: Entry, options: Options) -> Iterator[Sample | NotGenerated]:
    """Yields the samples of an entry that the options select, in a fixed order."""
    sources: dict[str, Callable[[str, Options], Iterator[Sample | NotGenerated]]] = {
        "op_db": _from_op_database,
        "row": _from_row,
        "promotion": _from_pairs,
    }
    for sample in sources[entry.source](entry.name, options):
        if isinstance(sample, NotGenerated) or (
            options.sample in (None, sample.label) and _wanted(sample.label.partition("/")[0], options)
        ):
            yield sample


def sample_dtypes(entry: Entry, options: Options) -> list[str]:
    """Returns the dtypes in the labels of an entry's samples."""
    if entry.source == "promotion":
        return [dtype_name(dtype) for dtype in _DTYPES]
    if entry.source == "row":
        return list(dict.fromkeys(_row_label(kind, options)[0] for kind in KINDS))
    return [dtype_name(dtype) for dtype in _supported_dtypes(entry.name, options)]


def _wanted(dtype: str, options: Options) -> bool:
    if options.sample is not None and options.sample.partition("/")[0] != dtype:
        return False
    return not options.dtypes or dtype in options.dtypes


# --- PyTorch's op database, which PyTorch's own tests use


@functools.cache
def op_database() -> dict[str, Any]:
    """Returns the entries of the op database by name, variants such as "std_mean.unbiased" included."""
    # Importing PyTorch's test helpers freezes the flags of torch.backends for the whole process.
    with mock.patch("torch.backends.disable_global_flags"):
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.full_name: op for op in op_db}


def _supported_dtypes(name: str, options: Options) -> list[torch.dtype]:
    return sorted(op_database()[name].supported_dtypes(options.device_type), key=str)


def _from_op_database(name: str, options: Options) -> Iterator[Sample | NotGenerated]:
    op, supported = op_database()[name], _supported_dtypes(name, options)
    quick = {torch.float32, options.lower} & set(supported) or set(supported[:1])
    for dtype in supported:
        left_out = options.quick and not options.dtypes and dtype not in quick
        if left_out or not _wanted(dtype_name(dtype), options):
            continue
        try:
            made = _generated(op, dtype, options)
        except Exception as error:
            yield NotGenerated(dtype_name(dtype), f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        for number, sample in enumerate(made[:_QUICK] if options.quick else made):
            call = (sample.input, *sample.args), sample.kwargs
            for kind, (args, kwargs) in _kinds(call, dtype, options.lower, supported):
                label = f"{dtype_name(dtype)}/{number}/{kind}"
                yield Sample(label, (op.op, args, kwargs), sample.output_process_fn_grad)


def _generated(op: Any, dtype: torch.dtype, options: Options) -> list[Any]:
    """Returns PyTorch's samples of one op and dtype; inputs that can require grad do."""
    # Fake samples are generated on the CPU, where PyTorch can read their values, and do not require grad: in a build
    # without the device, a fake tensor that requires grad ends the process.
    import numpy as np  # as the module of PyTorch's samples does

    grad = not options.fake and op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    seed = zlib.crc32(f"{op.full_name} {dtype}".encode())
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    # Not op.sample_inputs, which walks the stack for each sample to find the name of the test.
    if not options.fake:
        return list(op.sample_inputs_func(op, options.device_type, dtype, grad))
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        made = list(op.sample_inputs_func(op, "cpu", dtype, grad))
    for sample in made:
        moved = tree_map(partial(_on_fake, options.device_type), (sample.input, sample.args, sample.kwargs))
        sample.input, sample.args, sample.kwargs = moved
    return made


def _on_fake(device_type: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return device_type if str(value) == "cpu" else value
    if value.layout is not torch.strided:
        raise NotImplementedError(f"fake-{device_type} {DENSE_ONLY}, not the layout {value.layout}")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device_type)


def _kinds(
    call: Any, dtype: torch.dtype, lower: torch.dtype, supported: list[torch.dtype]
) -> Iterator[tuple[str, Any]]:
    yield "plain", call
    if dtype is not torch.float32:
        return
    count = sum(isinstance(leaf, torch.Tensor) and leaf.dtype is dtype for leaf in tree_leaves(call))
    if count > 1:
        yield "mixed", _by_turns(call, (dtype, lower))
    if count and lower not in supported:
        yield "lower", _by_turns(call, (lower,))


def _by_turns(call: Any, dtypes: tuple[torch.dtype, ...]) -> Any:
    """Casts the float32 tensors of a call to the dtypes in turn. A tensor that occurs twice is cast once."""
    turns = itertools.cycle(dtypes)

    @functools.cache  # by the tensor's identity
    def to_next(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        return copy_with_strides(tensor, next(turns)).requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, to_next, call)


# --- the rows of the op table


def _from_row(name: str, options: Options) -> Iterator[Sample]:
    op, _, overload = name.removeprefix("aten::").partition(".")
    function = getattr(getattr(torch.ops.aten, op), overload or "default")
    for kind, (number, make_call) in itertools.product(KINDS, enumerate(SAMPLES[name])):
        dtype, kind_name = _row_label(kind, options)
        seed = zlib.crc32(f"{name} {number}".encode())
        dtypes = dtypes_of(kind, options.lower)
        make = Make(dtypes, options.device_type, fake=options.fake, grad=not options.fake, seed=seed)
        yield Sample(f"{dtype}/{number}/{kind_name}", (function, *make_call(make)))


def _row_label(kind: str, options: Options) -> tuple[str, str]:
    """Returns the dtype and the kind in the labels of row samples of one kind."""
    if kind in (MIXED, MIXED_LOWER_FIRST):
        return "float32", "mixed" if kind == MIXED else "mixed_lower_first"
    return dtype_name(dtypes_of(kind, options.lower)[0]), "plain"


# --- pairs of dtypes: the op database mixes no integer dtypes, so only these reach every cell of the promotion table

#: The entries, and the function of two tensors that each calls. The ops promote in different ways.
PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "promotion.add": torch.add,  # the common dtype
    "promotion.true_divide": torch.true_divide,  # integers give the default dtype
    "promotion.lt": torch.lt,  # computes in the common dtype, returns bool
    "promotion.where": lambda a, b: torch.where(a.to(torch.bool), a, b),  # without TensorIterator's wrapped numbers
    "promotion.cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]),  # autocast promotes it too
}
#: The dtypes of pairs.
_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128,
)  # fmt: skip
#: A tensor with dimensions, and a 0-dim tensor, which promotion gives less weight.
_SHAPES = {"dim": (2, 3), "zero": ()}


def _from_pairs(name: str, options: Options) -> Iterator[Sample]:
    for dtype in _DTYPES:
        for number, (other, first, second) in enumerate(itertools.product(_DTYPES, _SHAPES, _SHAPES)):
            pair = _filled(dtype, _SHAPES[first], options), _filled(other, _SHAPES[second], options)
            label = f"{dtype_name(dtype)}/{number}/{dtype_name(other)}-{first}-{second}"
            yield Sample(label, (PAIRS[name], pair, {}))


def _filled(dtype: torch.dtype, shape: tuple[int, ...], options: Options) -> torch.Tensor:
    if options.fake:
        return torch.empty(shape, dtype=dtype, device=options.device_type)
    return torch.full(shape, 2, device="cpu").to(dtype).to(options.device_type)
