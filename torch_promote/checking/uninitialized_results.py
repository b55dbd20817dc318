"""Which ops leave memory of a result as they found it, and which do not give the same bits twice."""

from __future__ import annotations

__all__ = ["NOT_REPEATABLE", "UNINITIALIZED", "UNINITIALIZED_IN_TABLE"]

#: Ops of the table with results that nothing is written to: their positions. Dtype, shape and strides count, not bits.
UNINITIALIZED_IN_TABLE: dict[str, tuple[int, ...]] = {
    "aten::mkldnn_rnn_layer": (3,),  # oneDNN's workspace
    "aten::_scaled_dot_product_flash_attention": (6, 7),  # the random state, of which nothing is used without dropout
}

#: The same of any op: those that allocate, too, which have a kernel on our key once somebody has named them.
UNINITIALIZED: dict[str, tuple[int, ...]] = {
    **UNINITIALIZED_IN_TABLE,
    "aten::empty.memory_format": (0,),
    "aten::empty_like": (0,),
    "aten::empty_strided": (0,),
    "aten::new_empty": (0,),
    "aten::new_empty_strided": (0,),
    "aten::resize_": (0,),
}

#: LAPACK's gelsy, the CPU's driver, reads which columns are fixed from memory that PyTorch has not written to.
NOT_REPEATABLE = frozenset({"aten::linalg_lstsq", "aten::linalg_lstsq.out"})
