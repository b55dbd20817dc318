"""Warns of overrides that had no effect, at the end of the region whose overrides they are.

csrc/policy/called_ops.h, NOTE [ Unused overrides ], says how the extension finds them.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from torch_promote import _C
from torch_promote.errors import UnusedOverrideWarning
from torch_promote.extension import Named
from torch_promote.policy.op_names import is_pattern, spell_key
from torch_promote.policy.overrides import select

__all__ = ["Line", "line_of", "named_ops", "warn_of_unused_overrides"]

#: Composite ops of the op table, and the ops that PyTorch's implementations of them call, with autocast off.
_CALLS = {
    "_convolution": "convolution",
    "bilinear": "_trilinear",
    "cdist": "_cdist_forward",
    "chain_matmul": "mm matmul linalg_multi_dot",
    "conv1d conv2d conv3d": "convolution _convolution mkldnn_convolution",
    "conv_transpose1d conv_transpose2d conv_transpose3d": "convolution _convolution",
    "cosine_embedding_loss": "mul sum add sqrt div where clamp_min mean",
    "cosine_similarity": "mul sum linalg_vector_norm div",
    "cross_entropy_loss": "log_softmax _log_softmax nll_loss nll_loss_nd nll_loss_forward nll_loss2d_forward",
    "einsum": "bmm mul sum",
    "frobenius_norm": "linalg_vector_norm",
    "group_norm": "native_group_norm",
    "gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell": "linear addmm mm sigmoid tanh relu",
    "hinge_embedding_loss": "where clamp_min add mean sum",
    "kl_div": "exp log mul sub mean sum where xlogy",
    "l1_loss": "sub abs mean sum",
    "layer_norm": "native_layer_norm",
    "linalg_multi_dot": "mm matmul",
    "linear": "mm addmm matmul",
    "log_softmax": "_log_softmax",
    "margin_ranking_loss": "mul sub clamp_min mean sum",
    "matmul": "mm bmm mv dot",
    "nll_loss": "nll_loss_forward",
    "nll_loss2d": "nll_loss2d_forward",
    "pdist": "_pdist_forward",
    "poisson_nll_loss": "exp log mul sub mean sum",
    "prelu": "_prelu_kernel",
    "quantile nanquantile": "sort lerp",
    "rms_norm": "_fused_rms_norm pow mean rsqrt mul",
    "scaled_dot_product_attention": "softmax _softmax _safe_softmax matmul bmm mul add",
    "softmax": "_softmax",
    "stft": "_fft_r2c _fft_c2c",
    "tensordot": "mm matmul dot",
    "triplet_margin_loss": "pairwise_distance clamp_min mean sum",
}

#: Regions that this package makes have no author who could change their overrides.
_OURS = str(Path(__file__).parents[1]) + os.sep

#: What `warnings` remembers of its warnings, by file.
_registries: dict[str, dict[str | tuple[str, type[Warning], int], int]] = {}


class Line(NamedTuple):
    """A line of Python that makes regions with overrides.

    Attributes:
        filename: Its file.
        lineno: Its number in the file.
        module: The name of its module.
    """

    filename: str
    lineno: int
    module: str


def line_of(frame: FrameType | None) -> Line | None:
    """Returns the line that a frame runs; None for a line of this package, or if there is no frame."""
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return None
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<string>"))


def named_ops(overrides: Mapping[Any, Any], overridden: Collection[str]) -> Iterator[Named]:
    """Yields the ops that overrides name without a pattern, with the ops that hide them.

    Args:
        overrides: As for `my_autocast`.
        overridden: The full names of all overloads that get a policy.
    """
    for key, value in overrides.items():
        if not is_pattern(spell_key(key)):
            _, overloads = select(key, value)
            hidden_by = _hidden_by().get(_without_overload(overloads[0]), ())
            yield Named(overloads, tuple(name for name in hidden_by if name not in overridden))


@functools.cache
def _hidden_by() -> dict[str, list[str]]:
    """Returns the entries of the op table that call an op, by the op's name without an overload."""
    found: dict[str, list[str]] = {}
    calls = {outer: inner.split() for names, inner in _CALLS.items() for outer in names.split()}
    for name in _C.OP_ENTRY_NAMES:
        for inner in calls.get(_short(_without_overload(name)), ()):
            found.setdefault(f"aten::{inner}", []).append(name)
    return found


def warn_of_unused_overrides(line: Line) -> None:
    """Warns of the overrides without effect in the region of a line that this thread has just ended."""
    unused: dict[str, list[str]] = {}
    for op, outer in _C.unused_overrides():
        unused.setdefault(_without_overload(op), []).append(_without_overload(outer))
    for op, outers in unused.items():
        ran = ", ".join(dict.fromkeys(outers))
        text = (
            f"the override of {op} was never used. Instead, the region ran {ran}, which may call {_short(op)}, with "
            f"autocast off. Name in the overrides: {ran.replace('aten::', '')}."
        )
        registry = _registries.setdefault(line.filename, {})
        warnings.warn_explicit(text, UnusedOverrideWarning, line.filename, line.lineno, line.module, registry)


def _without_overload(name: str) -> str:
    return name.partition(".")[0]


def _short(name: str) -> str:
    return name.removeprefix("aten::")
