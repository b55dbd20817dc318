"""Results whose memory an op leaves uninitialized, and ops whose bits do not repeat."""

from __future__ import annotations

__all__ = ["NOT_REPEATABLE", "UNINITIALIZED", "UNINITIALIZED_IN_TABLE"]

#: Ops of the table with results that no kernel writes to: the positions of these results. Dtype, shape and strides are
#: compared, bits are not.
UNINITIALIZED_IN_TABLE: dict[str, tuple[int, ...]] = {
    "aten::mkldnn_rnn_layer": (3,),  # oneDNN's workspace
    "aten::_scaled_dot_product_flash_attention": (6, 7),  # the random state, unused without dropout
}

#: The same for all ops. The ops that allocate have a kernel on the autocast key once an override names them.
UNINITIALIZED: dict[str, tuple[int, ...]] = {
    **UNINITIALIZED_IN_TABLE,
    "aten::empty.memory_format": (0,),
    "aten::empty_like": (0,),
    "aten::empty_strided": (0,),
    "aten::new_empty": (0,),
    "aten::new_empty_strided": (0,),
    "aten::resize_": (0,),
}

#: On the CPU, LAPACK's gelsy reads which columns are fixed from memory that PyTorch has not initialized.
NOT_REPEATABLE = frozenset({"aten::linalg_lstsq", "aten::linalg_lstsq.out"})
