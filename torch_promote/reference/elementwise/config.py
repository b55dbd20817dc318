"""The flags of a TensorIterator, with PyTorch's names, and the combinations that PyTorch has builders for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

__all__ = ["PRESETS", "TensorIteratorConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIteratorConfig:
    """The flags of a TensorIterator, with PyTorch's names and defaults.

    Attributes:
        promote_inputs_to_common_dtype: Compute the common dtype; on the CPU, convert the inputs to it.
        promote_integer_inputs_to_float: Replace an integral common dtype by the default dtype.
        cast_common_dtype_to_outputs: Cast the result to the output's dtype if that differs from the common dtype.
        enforce_safe_casting_to_output: Refuse that cast unless `can_cast` allows it.
        check_all_same_dtype: Require one dtype for all operands. Off if inputs are promoted or outputs cast.
        check_all_same_device: Require one device for all operands.
        allow_cpu_scalars: Allow one 0-dim CPU tensor among operands on another device.
        check_mem_overlap: Refuse an output that uses an element of memory twice.
        resize_outputs: Resize an output of another shape, instead of including it in broadcasting.
        is_reduction: Allow an output that is smaller than the inputs.
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
    check_all_same_device: bool = True
    allow_cpu_scalars: bool = False
    check_mem_overlap: bool = True
    resize_outputs: bool = True
    is_reduction: bool = False
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
    # sum into a given output: reduce_op with one output
    "reduce": TensorIteratorConfig(
        promote_inputs_to_common_dtype=True, check_mem_overlap=False, resize_outputs=False, is_reduction=True
    ),
    # random_, arange into a given output: nullary_op
    "nullary": TensorIteratorConfig(check_all_same_dtype=False, resize_outputs=False),
}
