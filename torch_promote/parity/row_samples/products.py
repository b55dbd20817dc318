"""Sample calls of matrix products, convolutions, attention and recurrent cells."""

from __future__ import annotations

import torch

from torch_promote.parity.row_samples.make import Call, Make, Sample, call

CL2D = torch.channels_last
CL3D = torch.channels_last_3d


def _cell(gates: int) -> Sample:
    """A recurrent cell: 3 inputs, 4 hidden units, and the given number of weight blocks."""
    rows = 4 * gates
    return lambda m: call(m(2, 3), m(2, 4), m(rows, 3), m(rows, 4), m(rows), m(rows))


def _fused_cell(gates: int) -> Sample:
    """The fused part of a cell, after the two products."""
    return lambda m: call(m(2, 4 * gates), m(2, 4 * gates), m(2, 4), m(4 * gates), m(4 * gates))


def _native_multi_head_attention(m: Make) -> Call:
    embed = 8
    query = m(2, 3, embed, grad=False)
    weights = (
        m(3 * embed, embed, grad=False),
        m(3 * embed, grad=False),
        m(embed, embed, grad=False),
        m(embed, grad=False),
    )
    return call(query, query, query, embed, 2, *weights)


def _mkldnn_lstm(train: bool) -> Sample:
    hidden, inputs, lstm = 4, 3, 2

    def sample(m: Make) -> Call:
        weights = m(4 * hidden, inputs), m(4 * hidden, hidden), m(4 * hidden), m(4 * hidden)
        state = m(2, hidden), m(2, hidden)
        return call(m(5, 2, inputs), *weights, *state, False, [], lstm, hidden, 1, True, False, False, train)

    return sample


_PRODUCTS: dict[str, list[Sample]] = {
    "aten::mm": [lambda m: call(m(3, 4), m(4, 5)), lambda m: call(m(3, 4, transposed=True), m(4, 5, transposed=True))],
    "aten::bmm": [lambda m: call(m(2, 3, 4), m(2, 4, 5))],
    "aten::mv": [lambda m: call(m(3, 4), m(4))],
    "aten::dot": [lambda m: call(m(4), m(4))],
    "aten::vdot": [lambda m: call(m(4), m(4))],
    "aten::matmul": [lambda m: call(m(2, 3, 4), m(4, 5)), lambda m: call(m(3, 4), m(4)), lambda m: call(m(4), m(4))],
    "aten::addmm": [
        lambda m: call(m(3, 5), m(3, 4), m(4, 5)),
        lambda m: call(m(5), m(3, 4), m(4, 5), beta=0.5, alpha=2),
    ],
    "aten::_addmm_activation": [
        lambda m: call(m(5), m(3, 4), m(4, 5)),
        lambda m: call(m(5), m(3, 4), m(4, 5), use_gelu=True),
    ],
    "aten::addmv": [lambda m: call(m(3), m(3, 4), m(4))],
    "aten::addr": [lambda m: call(m(3, 4), m(3), m(4))],
    "aten::addbmm": [lambda m: call(m(3, 5), m(2, 3, 4), m(2, 4, 5))],
    "aten::baddbmm": [lambda m: call(m(2, 3, 5), m(2, 3, 4), m(2, 4, 5))],
    "aten::chain_matmul": [lambda m: call([m(3, 4), m(4, 5), m(5, 2)])],
    "aten::linalg_multi_dot": [lambda m: call([m(3, 4), m(4, 5), m(5, 2)])],
    "aten::linalg_vecdot": [lambda m: call(m(3, 4), m(3, 4))],
    "aten::einsum": [
        lambda m: call("bij,bjk->bik", [m(2, 3, 4), m(2, 4, 5)]),
        lambda m: call("i,j,k->ijk", [m(2), m(3), m(4)]),
    ],
    "aten::tensordot": [lambda m: call(m(3, 4, 5), m(5, 4, 2), [1, 2], [1, 0])],
    "aten::bilinear": [
        lambda m: call(m(3, 4), m(3, 5), m(2, 4, 5), m(2)),
        lambda m: call(m(3, 4), m(3, 5), m(2, 4, 5)),
    ],
    "aten::linear": [lambda m: call(m(2, 3, 4), m(5, 4), m(5)), lambda m: call(m(3, 4), m(5, 4))],
    "aten::prelu": [lambda m: call(m(3, 4), m(1)), lambda m: call(m(2, 3, 4), m(3))],
    # Convolutions.
    "aten::conv1d": [lambda m: call(m(2, 3, 8), m(4, 3, 3), m(4)), lambda m: call(m(2, 3, 8), m(4, 3, 3))],
    "aten::conv1d.padding": [lambda m: call(m(2, 3, 8), m(4, 3, 3), m(4), [1], "same")],
    "aten::conv2d": [
        lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), m(4)),
        lambda m: call(m(2, 3, 6, 6, memory_format=CL2D), m(4, 3, 3, 3, memory_format=CL2D), None, [2, 1], [1, 1]),
    ],
    "aten::conv2d.padding": [lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), m(4), [1, 1], "same")],
    "aten::conv3d": [
        lambda m: call(m(1, 2, 4, 4, 4), m(3, 2, 2, 2, 2), m(3)),
        lambda m: call(m(1, 2, 4, 4, 4, memory_format=CL3D), m(3, 2, 2, 2, 2, memory_format=CL3D)),
    ],
    "aten::conv3d.padding": [lambda m: call(m(1, 2, 4, 4, 4), m(3, 2, 3, 3, 3), m(3), [1, 1, 1], "same")],
    "aten::conv_tbc": [lambda m: call(m(6, 2, 3), m(3, 3, 4), m(4), 1)],
    "aten::conv_transpose1d": [lambda m: call(m(2, 3, 6), m(3, 4, 3), m(4))],
    "aten::conv_transpose2d.input": [
        lambda m: call(m(2, 3, 5, 5), m(3, 4, 3, 3), m(4)),
        lambda m: call(m(2, 3, 5, 5), m(3, 4, 3, 3)),
    ],
    "aten::conv_transpose3d.input": [lambda m: call(m(1, 2, 3, 3, 3), m(2, 3, 2, 2, 2), m(3))],
    "aten::convolution": [
        lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), m(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        lambda m: call(m(2, 3, 5), m(3, 4, 3), None, [1], [0], [1], True, [0], 1),
    ],
    "aten::_convolution": [
        lambda m: call(
            m(2, 3, 6, 6), m(4, 3, 3, 3), m(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, True, True, True
        )
    ],
    "aten::_convolution.deprecated": [
        lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, True, True)
    ],
    "aten::cudnn_convolution": [
        lambda m: call(m(2, 3, 6, 6), m(4, 3, 3, 3), [1, 1], [2, 2], [1, 1], 1, False, True, True),
    ],
    "aten::cudnn_convolution_transpose": [
        lambda m: call(m(2, 3, 5, 5), m(3, 4, 3, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, True, True)
    ],
    # Attention.
    "aten::scaled_dot_product_attention": [
        lambda m: call(m(2, 2, 4, 8), m(2, 2, 4, 8), m(2, 2, 4, 8)),
        lambda m: call(m(2, 2, 4, 8), m(2, 2, 4, 8), m(2, 2, 4, 8), m(4, 4, grad=False)),
        lambda m: call(m(2, 2, 4, 8), m(2, 2, 4, 8), m(2, 2, 4, 8), is_causal=True, scale=0.5),
    ],
    "aten::_scaled_dot_product_flash_attention": [lambda m: call(m(2, 2, 16, 16), m(2, 2, 16, 16), m(2, 2, 16, 16))],
    "aten::_native_multi_head_attention": [_native_multi_head_attention],
    # Recurrent cells.
    "aten::rnn_tanh_cell": [_cell(1)],
    "aten::rnn_relu_cell": [_cell(1)],
    "aten::gru_cell": [_cell(3)],
    "aten::lstm_cell": [lambda m: call(m(2, 3), [m(2, 4), m(2, 4)], m(16, 3), m(16, 4), m(16), m(16))],
    "aten::_thnn_fused_gru_cell": [_fused_cell(3)],
    "aten::_thnn_fused_lstm_cell": [_fused_cell(4)],
    "aten::mkldnn_rnn_layer": [_mkldnn_lstm(train=False), _mkldnn_lstm(train=True)],
}
