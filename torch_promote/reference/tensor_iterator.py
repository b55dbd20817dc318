"""`infer_elementwise`: the result's dtype, shape and strides, and the dtype that an elementwise op computes in.

Almost every elementwise op of PyTorch is a TensorIterator with certain flags. `PRESETS` has the combinations that
PyTorch has builders for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from torch_promote.reference.dtypes import dtype_name, is_integral
from torch_promote.reference.promotion import Number, Operand, PromotionError, can_cast, number_dtype, result_type
from torch_promote.reference.strides import (
    Layout,
    ShapeError,
    Sizes,
    broadcast_shapes,
    contiguous_strides,
    has_internal_overlap,
    output_strides,
    temporary_strides,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIteratorConfig:
    """The flags of a TensorIterator, with PyTorch's names and defaults.

    Attributes:
        promote_inputs_to_common_dtype: Compute the common dtype; on the CPU, convert the inputs to it.
        promote_integer_inputs_to_float: Replace an integral common dtype by the default dtype.
        cast_common_dtype_to_outputs: Cast the result to the output's dtype if that differs from the common dtype.
        enforce_safe_casting_to_output: Refuse that cast unless `can_cast` allows it.
        check_all_same_dtype: Require one dtype for all operands. Off if inputs are promoted or outputs cast.
        allow_cpu_scalars: Allow one 0-dim CPU tensor among operands on another device.
        check_mem_overlap: Refuse an output that uses an element of memory twice.
        resize_outputs: Resize an output of another shape, instead of including it in broadcasting.
        static_dtype: The dtype of an allocated output, independent of the inputs.

    Example:
        >>> PRESETS["binary"].check_all_same_dtype
        False
        >>> PRESETS["comparison"].static_dtype
        torch.bool

    Source: aten/src/ATen/TensorIterator.h, TensorIteratorConfig (v2.13).
    """

    promote_inputs_to_common_dtype: bool = False
    promote_integer_inputs_to_float: bool = False
    cast_common_dtype_to_outputs: bool = False
    enforce_safe_casting_to_output: bool = False
    check_all_same_dtype: bool = True
    allow_cpu_scalars: bool = False
    check_mem_overlap: bool = True
    resize_outputs: bool = True
    static_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.promote_integer_inputs_to_float and not self.promote_inputs_to_common_dtype:
            raise ValueError("promote_integer_inputs_to_float needs promote_inputs_to_common_dtype.")
        if self.promote_inputs_to_common_dtype or self.cast_common_dtype_to_outputs:
            object.__setattr__(self, "check_all_same_dtype", False)


_BINARY = TensorIteratorConfig(
    promote_inputs_to_common_dtype=True,
    cast_common_dtype_to_outputs=True,
    enforce_safe_casting_to_output=True,
    allow_cpu_scalars=True,
)

#: The configurations that PyTorch has builders for, in aten/src/ATen/TensorIterator.cpp. Comments name them.
PRESETS: dict[str, TensorIteratorConfig] = {
    # neg, conj_physical: build_borrowing_unary_op
    "unary": TensorIteratorConfig(),
    # sin, exp: build_borrowing_unary_float_op
    "unary_float": replace(_BINARY, allow_cpu_scalars=False, promote_integer_inputs_to_float=True),
    # isposinf: build_borrowing_unary_force_boolean_op
    "unary_force_boolean": TensorIteratorConfig(check_all_same_dtype=False, static_dtype=torch.bool),
    # add, maximum, bitwise_and: build_borrowing_binary_op
    "binary": _BINARY,
    # true division, atan2: build_borrowing_binary_float_op
    "binary_float": replace(_BINARY, promote_integer_inputs_to_float=True),
    # eq, lt, logical_and: build_borrowing_comparison_op; set_up_comparison_op_config for a given output
    "comparison": TensorIteratorConfig(
        promote_inputs_to_common_dtype=True, allow_cpu_scalars=True, static_dtype=torch.bool
    ),
    # addcdiv: build_ternary_op; addcmul sets the flags of "binary" itself
    "ternary": replace(_BINARY, allow_cpu_scalars=False),
    # random_, arange into a given output: nullary_op
    "nullary": TensorIteratorConfig(check_all_same_dtype=False, resize_outputs=False),
}


# --- infer_elementwise, infer_where


class ElementwiseResult(NamedTuple):
    """The result of an elementwise op.

    Attributes:
        dtype: The result's dtype.
        shape: Its sizes.
        strides: Its strides, in elements.
        computation_dtype: The dtype that the inputs are converted to. None: they differ and are not converted.

    Example:
        >>> result = infer_elementwise(torch.ones(3), torch.ones(3).double(), preset="comparison")
        >>> result.dtype, result.computation_dtype
        (torch.bool, torch.float64)
    """

    dtype: torch.dtype
    shape: Sizes
    strides: Sizes
    computation_dtype: torch.dtype | None


def infer_elementwise(
    *operands: torch.Tensor | Number | Operand,
    preset: str | TensorIteratorConfig = "binary",
    out: torch.Tensor | Operand | None = None,
    device_type: str = "cpu",
    default_dtype: torch.dtype | None = None,
) -> ElementwiseResult:
    """Returns the dtype, shape and strides of an elementwise op's result.

    Args:
        operands: Tensors whose shapes broadcast, Python numbers, and Operands in place of tensors.
        preset: A name in `PRESETS`, or a configuration.
        out: The tensor to write to. For an in-place op, its first operand.
        device_type: The device type to infer for, if all operands are on the CPU.
        default_dtype: The dtype of Python floats, and of integers under promote_integer_inputs_to_float. None: the
            current default dtype.

    Returns:
        The result. With `out`, its dtype, and its shape and strides after resizing.

    Raises:
        PromotionError: The dtypes have no common dtype, differ although the configuration requires one dtype, or cannot
            be cast to `out`'s; or operands are on different devices.
        ShapeError: The shapes do not broadcast, or `out` cannot hold the result.
        KeyError: There is no such preset.

    Example:
        >>> infer_elementwise(torch.ones(2, 3, dtype=torch.int32), 5.5, default_dtype=torch.float32)
        ElementwiseResult(dtype=torch.float32, shape=(2, 3), strides=(3, 1), computation_dtype=torch.float32)
        >>> infer_elementwise(torch.ones(3), torch.ones(3).double(), preset="comparison").dtype
        torch.bool

    Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::build (v2.13).
    """
    config = PRESETS[preset] if isinstance(preset, str) else preset
    inputs = [_as_operand(operand) for operand in operands]
    if out is None:
        output = None
    else:
        output = _as_operand(out)
        if preset == "comparison":
            # Comparisons allocate bool results, but compute in the common dtype for an output of another dtype.
            # Source: aten/src/ATen/TensorIterator.cpp, set_up_comparison_op_config (v2.13).
            config = replace(config, static_dtype=None, cast_common_dtype_to_outputs=output.dtype is not torch.bool)
        if config.check_mem_overlap and has_internal_overlap(output.shape, _strides(output)):
            raise ShapeError(
                f"out of shape {list(output.shape)} and strides {list(_strides(output))} uses elements of its memory "
                "more than once. Use out.clone() instead."
            )
    # Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_shape (v2.13).
    fixed = [] if output is None or config.resize_outputs else [output.shape]
    shape = broadcast_shapes(*fixed, *(operand.shape for operand in inputs))
    resized = output is None or _will_resize(output, shape, config, any(operand is out for operand in operands))
    common_device = _common_device(inputs, output, config, device_type)
    common = _compute_types(inputs, output, config, default_dtype)
    if output is not None and not resized:
        return ElementwiseResult(output.dtype, output.shape, _strides(output), common)
    if output is not None:
        dtype = output.dtype
    elif config.static_dtype is not None:
        dtype = config.static_dtype
    elif common is not None:
        dtype = common
    else:
        raise PromotionError("the inputs differ in dtype and are not promoted, so the result's dtype is undefined.")
    # NOTE: Temporaries. On the CPU, TensorIterator converts inputs of another dtype before it computes strides, and the
    # copies are dense even if the inputs are expanded or sliced. Kernels on other devices convert when they load.
    temporaries = config.promote_inputs_to_common_dtype and common_device == "cpu"
    layouts = [_layout(operand, common if temporaries else operand.dtype) for operand in inputs]
    return ElementwiseResult(dtype, shape, output_strides(shape, layouts), common)


def _layout(operand: Operand, wanted: torch.dtype | None) -> Layout:
    """The shape and strides of an operand after its conversion to a dtype."""
    strides = _strides(operand)
    return operand.shape, strides if operand.dtype is wanted else temporary_strides(operand.shape, strides)


def infer_where(
    condition: torch.Tensor | Operand,
    self: torch.Tensor | Number | Operand,
    other: torch.Tensor | Number | Operand,
    default_dtype: torch.dtype | None = None,
) -> ElementwiseResult:
    """Returns the result of `torch.where`, which converts its values itself on every device type.

    Args:
        condition: A bool tensor. uint8 counts as bool.
        self: The values where the condition is true.
        other: The values elsewhere.
        default_dtype: The dtype of Python floats. None: the current default dtype.

    Returns:
        The result.

    Raises:
        PromotionError: The condition is neither bool nor uint8, or the values have no common dtype.
        ShapeError: The shapes do not broadcast.

    Example:
        >>> infer_where(torch.ones(3, dtype=torch.bool), torch.ones(2, 1), 1).shape
        (2, 3)

    Source: aten/src/ATen/native/TensorCompare.cpp, where_self_out (v2.13).
    """
    values = [_as_operand(self), _as_operand(other)]
    chosen = _as_operand(condition)
    if chosen.dtype not in (torch.bool, torch.uint8):
        raise PromotionError(f"where expects a bool condition, got {dtype_name(chosen.dtype)}.")
    dtype = result_type(*values, default_dtype=default_dtype)
    wanted = ((chosen, torch.bool), (values[0], dtype), (values[1], dtype))
    layouts = [_layout(operand, converted) for operand, converted in wanted]
    shape = broadcast_shapes(*(own for own, _ in layouts))
    return ElementwiseResult(dtype, shape, output_strides(shape, layouts), dtype)


def _as_operand(value: torch.Tensor | Number | Operand) -> Operand:
    if isinstance(value, torch.Tensor):
        return Operand(value.dtype, tuple(value.shape), value.stride(), value.device.type)
    if isinstance(value, Operand):
        return value
    return wrap_number(value)


def wrap_number(number: Number) -> Operand:
    """Returns the 0-dim operand that PyTorch wraps a Python number in; `number_dtype` returns another dtype."""
    # Source: aten/src/ATen/ScalarOps.h, scalar_to_tensor (v2.13).
    return Operand(number_dtype(number, torch.float64), (), (), "cpu", True)


def _strides(operand: Operand) -> Sizes:
    return contiguous_strides(operand.shape) if operand.strides is None else operand.strides


def _will_resize(output: Operand, shape: Sizes, config: TensorIteratorConfig, read_write: bool) -> bool:
    """Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::mark_resize_outputs (v2.13)."""
    if output.shape == shape:
        return False
    if config.resize_outputs and not read_write:
        return True
    raise ShapeError(f"out has shape {list(output.shape)}, which the op may not resize to {list(shape)}.")


def _common_device(inputs: list[Operand], output: Operand | None, config: TensorIteratorConfig, device: str) -> str:
    """The device type that the op runs on: that of the first operand that is not on the CPU."""
    # Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_types (v2.13).
    everything = inputs if output is None else [output, *inputs]
    devices = [operand.device or device for operand in everything]
    common = next((found for found in devices if found != "cpu"), "cpu")
    if common == "cpu":
        return device
    scalars_left = 1 if config.allow_cpu_scalars else 0
    for operand, found in zip(everything, devices, strict=True):
        if found == common:
            continue
        if found == "cpu" and not operand.shape and operand is not output and scalars_left > 0:
            scalars_left -= 1
            continue
        raise PromotionError(
            f"one operand is on {found}, others are on {common}. "
            + ("Only one 0-dim CPU tensor is allowed." if config.allow_cpu_scalars else "Move it to the same device.")
        )
    return common


def _compute_types(
    inputs: list[Operand], output: Operand | None, config: TensorIteratorConfig, default_dtype: torch.dtype | None
) -> torch.dtype | None:
    """Returns the common dtype. Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::compute_types (v2.13)."""
    common = inputs[0].dtype if inputs else None
    differ = any(operand.dtype is not common for operand in inputs)
    if config.check_all_same_dtype:
        for operand in inputs if output is None else [output, *inputs]:
            if operand.dtype is not common and common is not None:
                raise PromotionError(f"found dtype {dtype_name(operand.dtype)} but expected {dtype_name(common)}.")
    if config.promote_inputs_to_common_dtype:
        # If all operands are Python numbers, their dtypes are those that they are wrapped in, not those that count.
        if differ or not any(operand.shape for operand in inputs):
            common = result_type(*inputs, default_dtype=default_dtype)
        if config.promote_integer_inputs_to_float and common is not None and is_integral(common, include_bool=True):
            common = default_dtype or torch.get_default_dtype()
    elif differ:
        common = None
    if (
        config.enforce_safe_casting_to_output
        and output is not None
        and common is not None
        and not can_cast(common, output.dtype)
    ):
        raise PromotionError(
            f"result type {dtype_name(common)} can't be cast to the desired output type {dtype_name(output.dtype)}: "
            "the output is of a lower kind. Use an output of the result's kind, or cast the result."
        )
    return common
