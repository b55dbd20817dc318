"""Rules for a result's dtype in ops whose implementation branches on its arguments.

dtypes_of_results.py describes the arguments and results of these functions.
"""

from __future__ import annotations

import torch

from torch_promote.reference.ops.call import Call
from torch_promote.reference.ops.dtypes_from_operands import one_dtype, promoted, same

__all__ = ["put", "rectified_gradient", "softmax_gradient", "workspace"]


def put(call: Call) -> torch.dtype:
    """The tensor's dtype, which the values must have, except for a single value with a mask, which is filled in.

    Example:
        >>> from torch_promote.reference import infer
        >>> x, mask, value = torch.ones(2).half(), torch.ones(2).bool(), torch.tensor(1)
        >>> infer(torch.ops.aten.index_put.default, [x, [mask], value]).dtypes
        (torch.float16,)

    Source: aten/src/ATen/native/TensorAdvancedIndexingUtils.h, canDispatchToMaskedFill (v2.13);
    aten/src/ATen/native/TensorAdvancedIndexing.cpp, make_index_put_iterator (v2.13).
    """
    value, indices = call.tensor("values"), tuple(call.operands("indices"))
    one_mask = len(indices) == 1 and getattr(indices[0], "dtype", None) in (torch.bool, torch.uint8)
    if one_mask and all(size == 1 for size in value.shape) and not call["accumulate"]:
        return same(call)
    return one_dtype(call, "self", "values")


def rectified_gradient(call: Call) -> torch.dtype:
    """In training, the promoted dtype of gradient and noise; otherwise that of a leaky ReLU's gradient.

    Example:
        >>> from torch_promote.reference import infer
        >>> gradient, x, noise = torch.ones(2).half(), torch.ones(2), torch.ones(2).double()
        >>> infer(torch.ops.aten.rrelu_with_noise_backward.default, [gradient, x, noise, 0.1, 0.3, True, False]).dtypes
        (torch.float64,)

    Source: aten/src/ATen/native/Activation.cpp, rrelu_with_noise_backward (v2.13).
    """
    return promoted(call, "grad_output", "noise" if call["training"] else "self")


def softmax_gradient(call: Call) -> torch.dtype:
    """The gradient's dtype, but float16 if softmax widened a float16 input to float32.

    Example:
        >>> from torch_promote.reference import infer
        >>> gradient = torch.ones(2)
        >>> infer(torch.ops.aten._softmax_backward_data.default, [gradient, gradient, 0, torch.float16]).dtypes
        (torch.float16,)

    Source: aten/src/ATen/native/SoftMax.cpp, TORCH_META_FUNC(_softmax_backward_data) (v2.13).
    """
    dtype = same(call)
    return torch.float16 if dtype is torch.float32 and call["input_dtype"] is torch.float16 else dtype


def workspace(call: Call) -> torch.dtype | None:
    """uint8, for a workspace of the backward. Undefined if no gradient is recorded.

    Example:
        >>> workspace(None), torch.no_grad()(workspace)(None)
        (torch.uint8, None)

    Source: aten/src/ATen/native/mkldnn/RNN.cpp, mkldnn_rnn_layer (v2.13).
    """
    del call
    return torch.uint8 if torch.is_grad_enabled() else None
