"""How this PyTorch's autocast registrations differ from the op table, and a table that no PyTorch agrees with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_promote.policy.op_table import CastPolicy, Row


class Delta(NamedTuple):
    """How a version's registrations for one device type differ from those of 2.13."""

    missing: frozenset[str] = frozenset()  # rows of the table that this version does not register
    extra: frozenset[str] = frozenset()  # ops that it registers and the table leaves to stock


#: The overloads with dimension names that PyTorch before 2.13 registers on each accelerator.
_BY_DIMENSION_NAME = frozenset(
    {
        "aten::cumprod.dimname",
        "aten::cumsum.dimname",
        "aten::log_softmax.Dimname",
        "aten::prod.dim_Dimname",
        "aten::softmax.Dimname",
        "aten::sum.dim_DimnameList",
    }
)
_WITH_NAMES = _BY_DIMENSION_NAME | {"aten::norm.names_ScalarOpt_dim"}
_OF_THE_CPU = Delta(extra=frozenset({"aten::index_copy.dimname", "aten::prod.dim_Dimname"}))
_SINCE_2_14 = {
    "cpu": Delta(frozenset({"aten::cholesky", "aten::qr"}), frozenset({"aten::linalg_matrix_sqrth"})),
    "cuda": Delta(extra=frozenset({"aten::linalg_matrix_sqrth"})),
}

#: The table is PyTorch 2.13's. Add a version here only if its other registrations are to be left to stock.
DELTAS: dict[tuple[int, int], dict[str, Delta]] = {
    (2, 11): {
        "cpu": _OF_THE_CPU,
        **dict.fromkeys(("cuda", "xpu"), Delta(frozenset({"aten::rms_norm"}), _WITH_NAMES)),
        "mps": Delta(extra=_BY_DIMENSION_NAME),
    },
    (2, 12): {
        "cpu": _OF_THE_CPU,
        **dict.fromkeys(("cuda", "xpu"), Delta(extra=_WITH_NAMES)),
        "mps": Delta(extra=_BY_DIMENSION_NAME),
    },
    (2, 14): _SINCE_2_14,
    (2, 15): _SINCE_2_14,
}


#: Has a wrapper of its own, which flattens the weights again; registered where PyTorch is built for CUDA.
CUDA_BUILD_ONLY = frozenset({"aten::_cudnn_rnn"})


VERSION = (int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1]))


def delta_of(device_type: str) -> Delta:
    delta = DELTAS.get(VERSION, {}).get(device_type, Delta())
    if device_type == "cuda" and torch.version.cuda is not None:
        return delta._replace(extra=delta.extra | CUDA_BUILD_ONLY)
    return delta


_NONE = [CastPolicy.fallthrough] * 2

# Three rows that no PyTorch agrees with: an op that does not exist, one that stock does not cast, one that it does.
STRANGE_ROWS = (
    Row(0, "no_such_op", "", CastPolicy.fp32, *_NONE, CastPolicy.fallthrough),
    Row(1, "relu", "", CastPolicy.fp32, CastPolicy.promote, *_NONE),
    Row(2, "mm", "", CastPolicy.fallthrough, *[CastPolicy.lower_precision_fp] * 3),
)
