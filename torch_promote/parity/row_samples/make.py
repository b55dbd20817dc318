"""Builds the arguments of sample calls, for every input dtype and for real and fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Positional and keyword arguments of one call.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Make:
    """Makes the tensors of one sample call.

    Calling a `Make` returns a tensor of the dtype under test. Several dtypes alternate, so that the arguments of one
    call differ. Indices, counts and masks have their own dtypes.

    Args:
        dtypes: The dtypes under test, one of which may be an integer dtype.
        device: The device of the tensors.
        fake: Whether the tensors are fake, and have no values.
        grad: Whether floating tensors require grad.
        seed: The seed of the values.
    """

    def __init__(
        self, dtypes: Sequence[torch.dtype], device: str, *, fake: bool = False, grad: bool = False, seed: int = 0
    ) -> None:
        self._dtypes = dtypes
        self._device = device
        self._fake = fake
        self._grad = grad
        self._made = 0
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(
        self,
        *shape: int,
        low: float = -1.0,
        high: float = 1.0,
        grad: bool = True,
        memory_format: torch.memory_format = torch.contiguous_format,
        transposed: bool = False,
    ) -> torch.Tensor:
        """Returns a tensor of uniform values in [low, high); `grad=False` is for arguments that have no derivative."""
        dtype = self._next_dtype()
        if transposed:
            tensor = torch.empty(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device=self._device).mT
        else:
            tensor = torch.empty(shape, dtype=dtype, device=self._device, memory_format=memory_format)
        return self._filled(tensor, lambda: self._uniform(shape, low, high), grad)

    def positive_definite(self, n: int, *, triangular: bool = False) -> torch.Tensor:
        """Returns a well-conditioned symmetric matrix with distinct eigenvalues, or its lower triangle."""

        def values() -> torch.Tensor:
            half = self._uniform((n, n), -0.25, 0.25)
            matrix = half + half.mT + torch.diag(torch.arange(n + 1, 2 * n + 1))
            return matrix.tril() if triangular else matrix

        return self._filled(torch.empty(n, n, dtype=self._next_dtype(), device=self._device), values, grad=True)

    def index(self, *shape: int, high: int) -> torch.Tensor:
        """Returns int64 values in [0, high)."""
        if self._fake:
            return torch.empty(shape, dtype=torch.int64, device=self._device)
        return torch.randint(high, shape, generator=self._generator).to(self._device)

    def constant(self, values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Returns the given values in the given dtype, whatever the dtype under test."""
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _next_dtype(self) -> torch.dtype:
        self._made += 1
        return self._dtypes[(self._made - 1) % len(self._dtypes)]

    def _uniform(self, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=self._generator) * (high - low) + low

    def _filled(self, tensor: torch.Tensor, values: Callable[[], torch.Tensor], grad: bool) -> torch.Tensor:
        floating = tensor.is_floating_point()
        if not self._fake:
            # As integers, nearly all values in [-1, 1) would be zero.
            tensor.copy_(values() if floating else values() * 4)
        return tensor.requires_grad_(self._grad and grad and floating)


#: Builds one call of a row.
Sample = Callable[[Make], Call]


def call(*args: Any, **kwargs: Any) -> Call:
    """Returns the arguments of a call as positional and keyword arguments."""
    return args, kwargs
