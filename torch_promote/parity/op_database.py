"""Samples from PyTorch's op database, which PyTorch's own tests use.

The samples of an op and dtype depend on nothing else: each pair has its own seed, and all samples are generated before
the first one runs.
"""

from __future__ import annotations

import functools
import random
import zlib
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from torch_promote.parity.model import Options

__all__ = ["DENSE_ONLY", "NO_FAKE", "generated", "op_database", "supported_dtypes"]

#: The beginning of the error for a sample that has no fake form.
NO_FAKE = "no fake tensor is made of a tensor with the layout"
#: The error of the device cuda-stand-in for a sample with a sparse tensor.
DENSE_ONLY = "the stand-in has dense tensors only"


@functools.cache
def op_database() -> dict[str, Any]:
    """Returns the entries of the op database by name, variants such as "std_mean.unbiased" included.

    Example:
        >>> op_database()["mm"].supports_autograd
        True
    """
    # Importing PyTorch's test helpers freezes the flags of torch.backends for the whole process.
    with mock.patch("torch.backends.disable_global_flags"):
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.full_name: op for op in op_db}


def supported_dtypes(name: str, device_type: str) -> list[torch.dtype]:
    """Returns the dtypes that an op supports on a device type, in a fixed order.

    Example:
        >>> torch.float64 in supported_dtypes("mm", "cpu"), torch.bool in supported_dtypes("mm", "cpu")
        (True, False)
    """
    return sorted(op_database()[name].supported_dtypes(device_type), key=str)


def generated(name: str, dtype: torch.dtype, options: Options) -> list[Any]:
    """Returns PyTorch's samples of one op and dtype; inputs that can require grad do.

    Fake samples are generated on the CPU, where PyTorch can read their values, and do not require grad: in a build
    without CUDA, a fake CUDA tensor that requires grad ends the process.

    Raises:
        Exception: Any error that PyTorch's sample functions raise.
    """
    op = op_database()[name]
    grad = not options.fake and op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    seed = zlib.crc32(f"{name} {dtype}".encode())
    torch.manual_seed(seed)
    random.seed(seed)
    _seed_numpy(seed)
    # Not op.sample_inputs, which walks the stack for each sample to find the name of the test.
    if not options.fake:
        return list(op.sample_inputs_func(op, options.device_type, dtype, grad))
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        samples = list(op.sample_inputs_func(op, "cpu", dtype, grad))
    return [_on_fake_cuda(sample) for sample in samples]


def _on_fake_cuda(sample: Any) -> Any:
    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return "cuda" if str(value) == "cpu" else value
        if value.layout is not torch.strided:
            raise NotImplementedError(f"{NO_FAKE} {value.layout}")
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")

    sample.input, sample.args, sample.kwargs = tree_map(fake, (sample.input, sample.args, sample.kwargs))
    return sample


def _seed_numpy(seed: int) -> None:
    import numpy as np  # as the module of PyTorch's samples does

    np.random.seed(seed)
