"""The functions of PyTorch that call another op than the one of their name, or several.

tests/policy/test_python_functions.py runs every function, and compares the ops that it calls with this table.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["called_ops"]

#: A function or method, and the op that stands for a call of it; or the main ones of several ops, if none does;
#: or nothing, where a function is not the op of its name.
_TABLE = """
F._threshold                          threshold
F.adaptive_max_pool1d_with_indices    adaptive_max_pool1d
F.adaptive_max_pool2d_with_indices    adaptive_max_pool2d
F.adaptive_max_pool3d_with_indices    adaptive_max_pool3d
F.affine_grid                         affine_grid_generator
F.cross_entropy                       cross_entropy_loss
F.dropout1d                           feature_dropout
F.dropout2d                           feature_dropout
F.dropout3d                           feature_dropout
F.fold                                col2im
F.fractional_max_pool2d_with_indices  fractional_max_pool2d
F.fractional_max_pool3d_with_indices  fractional_max_pool3d
F.gaussian_nll_loss                   log sub pow div add mul
F.grid_sample                         grid_sampler
F.gumbel_softmax                      softmax add div
F.interpolate                         upsample_nearest2d upsample_bilinear2d upsample_bicubic2d adaptive_avg_pool2d
F.linear_cross_entropy                linear cross_entropy_loss
F.local_response_norm                 avg_pool2d avg_pool3d pow div
F.lp_pool1d                           avg_pool1d pow mul
F.lp_pool2d                           avg_pool2d pow mul
F.lp_pool3d                           avg_pool3d pow mul
F.max_unpool1d                        max_unpool2d
F.multi_head_attention_forward        linear scaled_dot_product_attention bmm softmax
F.multilabel_soft_margin_loss         log_sigmoid mul sum div
F.nll_loss                            nll_loss_nd
F.normalize                           linalg_vector_norm clamp_min div
F.softmin                             neg softmax
F.softsign                            abs add div
F.tanhshrink                          tanh sub
F.triplet_margin_with_distance_loss   pairwise_distance add sub clamp_min mean
F.unfold                              im2col
F.upsample                            upsample_nearest2d upsample_bilinear2d upsample_bicubic2d adaptive_avg_pool2d
F.upsample_bilinear                   upsample_bilinear2d
F.upsample_nearest                    upsample_nearest1d upsample_nearest2d upsample_nearest3d
torch.lu                              _lu_with_info
torch.norm                            linalg_vector_norm linalg_matrix_norm
torch.unique                          _unique2 unique_dim
torch.unravel_index                   floor_divide remainder
Tensor.index
Tensor.lu                             _lu_with_info
Tensor.norm                           linalg_vector_norm linalg_matrix_norm
Tensor.resize
Tensor.resize_as
Tensor.unique                         _unique2 unique_dim
Tensor.__add__                        add
Tensor.__eq__                         eq
Tensor.__floordiv__                   floor_divide
Tensor.__ge__                         ge
Tensor.__getitem__                    index select slice
Tensor.__gt__                         gt
Tensor.__iadd__                       add_
Tensor.__idiv__                       div_
Tensor.__imul__                       mul_
Tensor.__isub__                       sub_
Tensor.__le__                         le
Tensor.__lt__                         lt
Tensor.__matmul__                     matmul
Tensor.__mod__                        remainder
Tensor.__mul__                        mul
Tensor.__ne__                         ne
Tensor.__radd__                       add
Tensor.__rdiv__                       reciprocal mul
Tensor.__rmatmul__                    matmul
Tensor.__rmod__                       remainder
Tensor.__rmul__                       mul
Tensor.__rpow__                       pow
Tensor.__rsub__                       rsub
Tensor.__setitem__                    index_put_ copy_
Tensor.__sub__                        sub
Tensor.__truediv__                    div
"""


@functools.cache
def called_ops() -> Mapping[str, tuple[str, ...]]:
    """Returns the ops that functions call, where these are not the op of the same name.

    Example:
        >>> called_ops()["F.cross_entropy"], called_ops()["F.softmin"]
        (('cross_entropy_loss',), ('neg', 'softmax'))
    """
    rows = (line.split() for line in _TABLE.strip().splitlines())
    return MappingProxyType({function: tuple(ops) for function, *ops in rows})
