"""A typical loss: label smoothing, and a term that keeps the softmax's normaliser near 1.

Both are written as in their papers, and both overflow in float16: `exp` of a logit above 11, and the sum over all
symbols of all characters of a batch. CUDA's op list runs `exp`, `log_softmax` and `sum` in float32; the CPU's list
contains none of them.
"""

from __future__ import annotations

from torch import Tensor

SMOOTHING = 0.1
NORMALISER_WEIGHT = 1e-4


def smoothed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The negative log-likelihood with label smoothing and a penalty on the normaliser, in nats per character.

    Source: Szegedy et al., Rethinking the Inception Architecture, 2015 (label smoothing, here in the form that fairseq
    has it: sums over the batch); Chowdhery et al., PaLM, 2022 (the z-loss).

    Args:
        logits: Of shape (batch, length, symbols).
        targets: int64 of shape (batch, length).
    """
    log_p = logits.log_softmax(-1)
    right = -log_p.gather(-1, targets.unsqueeze(-1)).sum()
    smooth = -log_p.sum() / logits.shape[-1]
    log_z = logits.exp().sum(-1).log()
    penalty = log_z.square().sum()
    return ((1 - SMOOTHING) * right + SMOOTHING * smooth + NORMALISER_WEIGHT * penalty) / targets.numel()
