"""`flops_of`: the floating point operations of a product of matrices."""

from __future__ import annotations

import math

from torch_promote.observe.events import Call

__all__ = ["flops_of"]

#: The argument over whose last dimension a product sums.
_SUMS_OVER = {
    "linear": "input",
    "matmul": "self",
    "mm": "self",
    "bmm": "self",
    "mv": "self",
    "addmm": "mat1",
    "addmv": "mat",
    "baddbmm": "batch1",
}


def flops_of(call: Call) -> int:
    """Returns the floating point operations of a call that multiplies matrices; 0 for other calls.

    The products are linear, matmul and the ops like it, convolutions, and scaled dot product attention.

    Args:
        call: A call of a forward. Its backward, which has twice as many for two gradients, does not count.
    """
    op = call.op.removeprefix("aten::")
    shapes = {info.name: info.shape for info in call.inputs if info.shape}
    result = math.prod(call.outputs[0].shape) if call.outputs else 0
    if op in _SUMS_OVER:
        return 2 * result * shapes.get(_SUMS_OVER[op], (0,))[-1]
    if op.startswith(("conv1d", "conv2d", "conv3d", "conv_transpose")) and "weight" in shapes:
        # Each element of the input of a transposed convolution, or of the result of others, is multiplied with these.
        of_one = math.prod(shapes["weight"][1:])
        return 2 * of_one * (math.prod(shapes.get("input", (0,))) if "transpose" in op else result)
    if op == "scaled_dot_product_attention" and len(shapes) >= 3:
        query, key, value = (shapes[name] for name in ("query", "key", "value"))
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return 0
