"""`linear` under a float8 policy: both operands in float8 with scales computed from their values, forward and backward.

The extension calls `linear` here for a call under such a policy (csrc/dispatch/kernels.h, linear_in_float8). It is
Python because torch.compile has to see the ops: AOTAutograd traces an autograd.Function through, into one graph that
contains the scaled products.

The numbers are those of torchao's Float8Linear with dynamic scaling; docs/float8.md has a table of the policies.
Inputs and weights are float8_e4m3fn. A product's operands are scaled along the dimension that it sums over. What is
saved for the backward is in the autocast dtype, as under lower_precision_fp.

Source: torchao/float8/float8_linear.py, float8_ops.py and float8_utils.py (v0.18).

NOTE [ Products on a CPU ]
On a CPU with AMX, torch._scaled_mm calls oneDNN. For some instruction sets oneDNN has no kernel, which is an error, and
for others a reference loop that takes hundreds of times as long. On every other CPU, torch._scaled_mm multiplies the
operands in float32. So we do that on every CPU, without torch._scaled_mm: it needs no feature of the CPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_promote import _C
from torch_promote.errors import PolicyError
from torch_promote.extension import DTYPE_NUMBERS
from torch_promote.integrations.compile import note_float8, skip_frames
from torch_promote.policy.op_table import CastPolicy

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
#: cuBLAS multiplies float8 matrices whose sizes this number divides.
_MULTIPLE = 16
#: Keeps the scale of a tensor of zeros finite.
_LEAST_AMAX = 1e-12


class _Scaled(NamedTuple):
    """A matrix in float8: `data / scale` is about the matrix that it was made of."""

    data: Tensor  # (m, n)
    scale: Tensor  # in float32, (1, 1), or (m, 1) or (1, n) with one for each row or column

    @property
    def T(self) -> _Scaled:  # noqa: N802 (as in PyTorch)
        return _Scaled(self.data.t(), self.scale.t())


class _Recipe(NamedTuple):
    """What distinguishes the policies."""

    policy: CastPolicy
    rowwise: bool  # whether each row has a scale, which is a power of two
    gradient: torch.dtype  # the dtype of the output's gradient
    float8_grad_weight: bool  # whether the weight's gradient is a product in float8

    def in_float8(self, matrix: Tensor, dtype: torch.dtype, dim: int | None) -> _Scaled:
        """A matrix in float8, with a scale for the elements along `dim` if rowwise, for all of them if it is None."""
        largest = torch.finfo(dtype).max
        amax = matrix.abs().amax(dim if dim is not None and self.rowwise else (0, 1), keepdim=True)
        # In float64, because compiled code may divide differently in float32.
        scale = (largest / amax.to(torch.float64).clamp(min=_LEAST_AMAX)).to(torch.float32)
        if self.rowwise:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        scaled = matrix.to(torch.float32, copy=True).mul_(scale)
        # PyTorch 2.11 does not saturate in a cast to float8.
        return _Scaled(scaled.clamp_(-largest, largest).to(dtype), scale)


#: By the bytes of the policies in the extension.
_RECIPES = {
    _C.POLICY_BYTES[recipe.policy.name]: recipe
    for recipe in (
        _Recipe(CastPolicy.float8_tensorwise, False, _E5M2, True),
        _Recipe(CastPolicy.float8_rowwise, True, _E4M3, True),
        _Recipe(CastPolicy.float8_rowwise_with_gw_hp, True, _E4M3, False),
    )
}


def recipe(policy: CastPolicy) -> _Recipe:
    """Returns what distinguishes a policy."""
    return _RECIPES[_C.POLICY_BYTES[policy.name]]


def linear(byte: int, lower: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """Computes `linear` in float8, with autocast off, as `lower`; None if the call does not fit (`why_not`)."""
    if why_not(x, weight, bias) is not None:
        return None
    note_float8()
    recipe = _RECIPES[byte]
    packed = None
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        # Only a backward needs the weight in the autocast dtype as well.
        code = 1 + recipe.rowwise + 2 * DTYPE_NUMBERS[lower]
        packed = _C.kept_float8(weight, code, lambda: _pack(recipe.in_float8(weight.to(lower), _E4M3, 1)))
    # From the last argument to the first, as the extension casts, since autograd sums in the order of the casts.
    bias = None if bias is None else _C.cached_cast(bias, lower)
    weight = weight if packed is not None else _C.cached_cast(weight, lower)
    output: Tensor = _Float8Linear.apply(_C.cached_cast(x, lower), weight, packed, recipe)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias


def why_not(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Returns why a call of `linear` under a float8 policy runs as under lower_precision_fp; None if it does not."""
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        if not tensor.is_floating_point() or tensor.dtype is torch.float64:
            return f"autocast does not cast {str(tensor.dtype).removeprefix('torch.')}"
        if is_traceable_wrapper_subclass(tensor):  # DTensor, say, or another library's quantized weight
            return f"an operand is a {type(tensor).__name__}"
        if tensor.is_nested or tensor.layout is not torch.strided:
            return "an operand is nested or sparse"
        if tensor.device != x.device:
            return "the operands are on several devices"
    if (
        weight.dim() != 2
        or x.dim() == 0
        or x.shape[-1] != weight.shape[1]
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        return "the shapes are not those of a matrix product"
    for name, size in (("in_features", weight.shape[1]), ("out_features", weight.shape[0])):
        if size % _MULTIPLE:
            return f"{name} is {size}, which {_MULTIPLE} does not divide"
    if x.numel() == 0 or weight.numel() == 0:
        return "an operand is empty"
    return what_lacks(x.device)


@functools.cache
def what_lacks(device: torch.device) -> str | None:
    """Why a device has no products in float8. A CUDA device that this process does not have is fake, and has."""
    if device.type == "cuda" and torch.cuda.is_available():
        if torch.version.hip is not None:
            return "on ROCm, float8 has other formats"
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            name = torch.cuda.get_device_name(device)
            return f"{name} has compute capability {major}.{minor}, and 8.9 is the first with float8"
    return None


# --- Products


def _pack(weight: _Scaled) -> Tensor:
    """A weight in float8 as one tensor, which the extension keeps with the weight."""
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in weight])


def _unpack(packed: Tensor, shape: torch.Size) -> _Scaled:
    size = shape.numel()
    return _Scaled(packed[:size].view(_E4M3).view(shape), packed[size:].view(torch.float32).view(-1, 1))


def multiply(recipe: _Recipe, a: _Scaled, b: _Scaled, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """The product of two matrices in float8, (m, k) and (k, n). `fast`: a GPU may add up faster, in fewer bits."""
    scales = a.scale.reciprocal(), b.scale.reciprocal()
    if not recipe.rowwise:
        one, other = (scale.reshape(()) for scale in scales)
        return _scaled_mm(a.data, b.data, one, other, dtype, fast)
    if fast or is_in_float32(a.data.device):
        output = _scaled_mm(a.data, b.data, *scales, torch.bfloat16, fast)
    else:  # without fast accumulation, the GPU's kernel with scales for rows is slow
        one = scales[0].new_ones(())
        output = _scaled_mm(a.data, b.data, one, one, torch.bfloat16, fast)
        output *= scales[0] * scales[1]
    return output.to(dtype)  # with scales for rows, torch._scaled_mm returns bfloat16 only


def is_in_float32(device: torch.device) -> bool:
    """Whether products on a device are computed in float32; see NOTE [ Products on a CPU ]."""
    return device.type == "cpu"


def product_on(device: torch.device) -> str:
    """Returns what computes products on a device that has them."""
    return "aten::mm, of the operands in float32" if is_in_float32(device) else "aten::_scaled_mm"


def _scaled_mm(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Computes torch._scaled_mm, with the bits that it has on a CPU without AMX."""
    # Source: aten/src/ATen/native/Blas.cpp, _scaled_mm_out_cpu_emulated (v2.13).
    if is_in_float32(left.device):
        rows, columns = (one.to(torch.float32, memory_format=torch.contiguous_format) for one in (left, right))
        return torch.mm(rows.mul_(left_scale), columns.mul_(right_scale)).to(dtype)
    left, right = left.contiguous(), right.t().contiguous().t()
    return torch._scaled_mm(left, right, left_scale, right_scale, out_dtype=dtype, use_fast_accum=fast)


# --- Autograd


class _Float8Linear(torch.autograd.Function):
    """The product, without the bias, whose addition autograd differentiates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, packed: Tensor | None, recipe: _Recipe) -> Tensor:
        """Multiplies an input and a weight of the same dtype; with `packed`, the weight's dtype does not matter."""
        ctx.recipe = recipe
        of_input, of_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if of_weight else None, weight if of_input else None)
        with torch._C._DisableAutocast():
            rows = x.reshape(-1, x.shape[-1])
            a = recipe.in_float8(rows, _E4M3, 1)
            b = recipe.in_float8(weight, _E4M3, 1) if packed is None else _unpack(packed, weight.shape)
            product, shape = multiply(recipe, a, b.T, x.dtype, fast=True), (*x.shape[:-1], weight.shape[0])
            # As in ATen's linear: in-place ops refuse a view that a Function returns.
            output: Tensor = torch.ops.aten._unsafe_view.default(product, shape)
            return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Computes the gradients of the input and of the weight."""
        x, weight = ctx.saved_tensors  # None where the gradient of the other one is not asked for
        with torch._C._DisableAutocast(), torch.no_grad():
            grad_input = None if weight is None else _grad_input(ctx.recipe, grad_output, weight)
            grad_weight = None if x is None else _grad_weight(ctx.recipe, grad_output, x)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = ctx.recipe, grad_output, x, weight, grad_input, grad_weight
            grad_input, grad_weight = _Final.apply(*gradients)  # type: ignore[no-untyped-call]
        return grad_input, grad_weight, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """Refuses forward-mode AD."""
        raise _no_derivative(ctx.recipe, "forward-mode AD")


def _grad_input(recipe: _Recipe, grad_output: Tensor, weight: Tensor) -> Tensor:
    gradient = grad_output.reshape(-1, weight.shape[0])
    a = recipe.in_float8(gradient, recipe.gradient, 1)
    b = recipe.in_float8(weight, _E4M3, 0 if recipe.float8_grad_weight else None)
    return multiply(recipe, a, b, weight.dtype).reshape(*grad_output.shape[:-1], weight.shape[1])


def _grad_weight(recipe: _Recipe, grad_output: Tensor, x: Tensor) -> Tensor:
    gradient, rows = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
    if not recipe.float8_grad_weight:
        return gradient.t() @ rows
    if rows.is_cuda and rows.shape[0] % _MULTIPLE:  # this product sums over the rows
        missing = 0, 0, 0, -rows.shape[0] % _MULTIPLE
        gradient, rows = torch.nn.functional.pad(gradient, missing), torch.nn.functional.pad(rows, missing)
    a, b = recipe.in_float8(gradient, recipe.gradient, 0), recipe.in_float8(rows, _E4M3, 0)
    return multiply(recipe, a.T, b, x.dtype)


class _Final(torch.autograd.Function):
    """Gradients that have no derivative themselves: an error, where PyTorch would take them for constants."""

    @staticmethod
    def forward(ctx: Any, recipe: _Recipe, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Returns the last two of the tensors."""
        ctx.recipe = recipe
        return tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors[-2:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Any:
        """Refuses the second derivative."""
        raise _no_derivative(ctx.recipe, "second derivative")


def _no_derivative(recipe: _Recipe, wanted: str) -> PolicyError:
    return PolicyError(
        f"aten::linear has no {wanted} under the policy {recipe.policy.value!r}: a product in float8 has only a "
        f"backward. Where you need it, give linear another policy: overrides={{'linear': 'lower'}}."
    )


# After a graph break in a compiled function, Dynamo would compile them one by one.
skip_frames(linear, _Float8Linear.forward, _Float8Linear.backward, _Final.forward, _Final.backward)
