"""Sample calls of losses. Targets without a derivative are made with grad=False."""

from __future__ import annotations

from torch_promote.parity.row_samples.make import Sample, call

MEAN, SUM = 1, 2

_LOSSES: dict[str, list[Sample]] = {
    "aten::mse_loss": [lambda m: call(m(3, 4), m(3, 4)), lambda m: call(m(3, 4), m(3, 4), SUM)],
    "aten::l1_loss": [lambda m: call(m(3, 4), m(3, 4))],
    "aten::smooth_l1_loss": [lambda m: call(m(3, 4), m(3, 4), MEAN, 0.5)],
    "aten::huber_loss": [lambda m: call(m(3, 4), m(3, 4), MEAN, 0.5)],
    "aten::soft_margin_loss": [lambda m: call(m(3, 4), m(3, 4, grad=False))],
    "aten::hinge_embedding_loss": [lambda m: call(m(3, 4), m.constant([1, -1, 1, -1]))],
    "aten::kl_div": [lambda m: call(m(3, 4), m(3, 4, low=0.1)), lambda m: call(m(3, 4), m(3, 4), SUM, log_target=True)],
    "aten::poisson_nll_loss": [lambda m: call(m(3, 4), m(3, 4, low=0.1, grad=False), True, True, 1e-8, MEAN)],
    "aten::binary_cross_entropy": [
        lambda m: call(m(3, 4, low=0.1, high=0.9), m(3, 4, low=0.0, grad=False)),
        lambda m: call(m(3, 4, low=0.1, high=0.9), m(3, 4, low=0.0, grad=False), m(4, low=0.5, grad=False)),
    ],
    "aten::binary_cross_entropy_with_logits": [
        lambda m: call(m(3, 4), m(3, 4, low=0.0)),
        lambda m: call(m(3, 4), m(3, 4, low=0.0), m(4, low=0.5, grad=False), m(4, low=0.5, grad=False)),
    ],
    "aten::margin_ranking_loss": [lambda m: call(m(4), m(4), m.constant([1, -1, 1, -1]), 0.1)],
    "aten::cosine_embedding_loss": [lambda m: call(m(3, 4), m(3, 4), m.constant([1, -1, 1]))],
    "aten::triplet_margin_loss": [
        lambda m: call(m(3, 4), m(3, 4), m(3, 4)),
        lambda m: call(m(3, 4), m(3, 4), m(3, 4), swap=True),
    ],
    "aten::multi_margin_loss": [lambda m: call(m(3, 4), m.index(3, high=4), 1, 1, m(4, low=0.1, grad=False))],
    "aten::multilabel_margin_loss": [lambda m: call(m(2, 4), m.constant([[3, 0, -1, 1], [1, -1, 0, 0]]))],
    "aten::multilabel_margin_loss_forward": [lambda m: call(m(2, 4), m.constant([[3, 0, -1, 1], [1, -1, 0, 0]]), MEAN)],
    "aten::nll_loss": [
        lambda m: call(m(3, 4), m.index(3, high=4)),
        lambda m: call(m(3, 4), m.index(3, high=4), m(4, low=0.1, grad=False), SUM),
    ],
    "aten::nll_loss2d": [lambda m: call(m(2, 3, 4, 4), m.index(2, 4, 4, high=3), m(3, low=0.1, grad=False))],
    "aten::cross_entropy_loss": [
        lambda m: call(m(3, 4), m.index(3, high=4), m(4, low=0.1, grad=False)),
        lambda m: call(m(3, 4), m(3, 4, low=0.0), label_smoothing=0.1),
    ],
    "aten::ctc_loss.IntList": [lambda m: call(m(6, 2, 4), m.constant([[1, 2], [3, 1]]), [6, 5], [2, 1])],
    "aten::ctc_loss.Tensor": [
        lambda m: call(m(6, 2, 4), m.constant([[1, 2], [3, 1]]), m.constant([6, 5]), m.constant([2, 1]))
    ],
}
