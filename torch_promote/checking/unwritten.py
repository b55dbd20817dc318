"""Which ops leave memory of a result as they found it."""

from __future__ import annotations

__all__ = ["UNWRITTEN"]

#: Ops with results that nothing is written to: their positions. Dtype, shape and strides count, the bits do not.
UNWRITTEN: dict[str, tuple[int, ...]] = {
    "aten::mkldnn_rnn_layer": (3,),  # oneDNN's workspace
    "aten::_scaled_dot_product_flash_attention": (6, 7),  # the random state, of which nothing is used without dropout
}
