"""Estimates the effect of local errors on the loss, to first order, by products of errors and gradients.

A hook on each result of the reference receives its gradient in the backward, multiplies it with the stored error, and
drops the error. If the program retains the graph for another backward, the error is kept and the products add up. A
backward that autograd records (as in a gradient penalty) is part of the loss, and does not count.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_promote.numerics.comparison import GradientError
from torch_promote.numerics.step_runs import distance, named_tensors, norm_of
from torch_promote.observe.ops import unnoticed

#: A value beyond this counts as infinite, like the lowest number of a dtype in masks.
BEYOND = 1e30
#: The number of elements processed at a time, which bounds the memory of their float64 copies.
_AT_ONCE = 1 << 22


class Errors(NamedTuple):
    """The errors of results, compared with the reference's."""

    # The L2 norm of the difference, relative to the reference's; infinite if a value is not finite where the
    # reference's is, or if the reference is zero and the difference is not.
    relative: float = 0.0
    nonfinite: int = 0  # the number of non-finite values where the reference's are finite
    # The largest difference, in units in the last place of the result's dtype at the reference's value. None if a value
    # is not finite where the reference's is.
    ulp: float | None = 0.0

    @property
    def sqnr(self) -> float | None:
        """The signal to quantization noise ratio in dB; infinite without a difference, None if that is infinite."""
        if self.relative == math.inf:
            return None
        return -20 * math.log10(self.relative) if self.relative else math.inf


class ErrorSums:
    """Sums up errors. `add` reads the tensors immediately; only `total` synchronizes with a device."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def add(self, result: torch.Tensor, reference: torch.Tensor) -> None:
        """Adds the errors of a result, relative to the reference's of the same shape."""
        info = None  # of bools, whose unit is 1
        if result.dtype is not torch.bool:
            info = torch.finfo(result.dtype if result.dtype.is_floating_point else torch.float64)
        pieces = (as_reals(one).split(_AT_ONCE) for one in (result, reference))
        for ours, theirs in zip(*pieces, strict=True):
            found, known = _sums_of(ours, theirs.to(ours.device), info), self._sums
            if known is not None:
                found = found.to(known.device)
                found = torch.cat([found[:3] + known[:3], torch.maximum(found, known)[3:]])
            self._sums = found

    def total(self) -> Errors:
        """Returns the errors of all results together."""
        difference, size, lost, ulp = (0.0, 0.0, 0, 0.0) if self._sums is None else self._sums.tolist()
        if lost or (difference and not size):
            return Errors(math.inf, int(lost), None if lost else ulp)
        return Errors(math.sqrt(difference / size), 0, ulp) if difference else Errors()


def as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's elements as a 1-d tensor of reals; a complex number becomes two."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(-1)


def _sums_of(result: torch.Tensor, reference: torch.Tensor, info: torch.finfo | None) -> torch.Tensor:
    """The sums of squares of difference and reference, the count of values lost, and the largest error in ulp."""
    ours, theirs = result.double(), reference.double()
    in_theirs = theirs.abs() < BEYOND  # false for NaN
    in_ours = ours.abs() < BEYOND
    both = in_ours & in_theirs
    difference = torch.where(both, ours - theirs, 0.0)
    theirs = torch.where(both, theirs, 0.0)
    lost = in_theirs & ~in_ours
    ulp = difference.abs()
    if info is not None:
        smallest = info.smallest_normal * info.eps  # the smallest subnormal number
        unit = torch.ldexp(torch.full_like(theirs, info.eps), torch.frexp(theirs).exponent - 1)
        ulp /= torch.where(theirs == 0, smallest, unit.clamp_min(smallest))
    largest = ulp.max() if ulp.numel() else ulp.sum()
    return torch.stack([difference.square().sum(), theirs.square().sum(), lost.sum().double(), largest])


#: A module, an overload with its name, and the line of a conversion.
SiteKey = tuple[str, str, str]
_Batch = dict[SiteKey, torch.Tensor]
_keys: Any = torch._C
#: If the change of the loss exceeds the sum of errors times gradients by this factor, it has other causes.
_FARTHEST = 100.0


@dataclass(frozen=True, slots=True)
class Impact:
    """The effect of a site's local errors d on the loss, whose gradients are g; see `Site`."""

    size: float  # the root of the sum over the batches of sum(g * d) ** 2
    signed: float  # sum(g * d) over all batches
    spread: float  # sqrt(sum((g * d) ** 2)): the expected `size` if the roundings of elements were independent


class Impacts:
    """Sums up the impacts of errors."""

    # `loss_scale` is that of the step's GradScaler, if the step returns another number than the one it scales.

    def __init__(self, loss_scale: float, backwards: int = 1, is_random: bool = False) -> None:
        self.backwards: int = backwards  # per batch if they start with random cotangents
        # Whether the gradients come from random cotangents, as the step returns no loss, or one whose gradient is zero.
        self.random: bool = is_random
        self._loss_scale = loss_scale
        self.totals: dict[SiteKey, Impact] = {}  # of the batches that have ended, by site
        # The sites with a gradient that is not finite, which tells no impact, in the order of the backward: the line of
        # the call, how many elements of the gradient are infinite or NaN, and how many it has.
        self.nonfinite: dict[SiteKey, tuple[str, int, int]] = {}
        self._slopes: list[tuple[SiteKey, str, torch.Tensor, int]] = []
        self._batch: _Batch = {}
        self._ended: list[_Batch] = []
        self._scalars: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._hooks: list[Any] = []

    def add(self, site: SiteKey, result: torch.Tensor, error: torch.Tensor, line: str = "") -> None:
        """Stores the error of a result, the difference of another run of the call, until its gradient arrives."""
        if not result.requires_grad:
            return
        kept = [error]

        def multiply(gradient: torch.Tensor) -> None:
            if kept and not torch.is_grad_enabled():
                with unnoticed():
                    bad = self._multiply(site, gradient, kept[0])
                    self._slopes.append((site, line, bad, gradient.numel()))
                if not _keys._autograd._get_current_graph_task_keep_graph():
                    kept.clear()

        self._hooks.append(result.register_hook(multiply))

    def _multiply(self, site: SiteKey, gradient: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        """Adds the products, and returns how many numbers of the gradient are not finite."""
        slopes = as_reals(gradient.detach()).double()
        errors = as_reals(error).to(slopes.device).double()
        finite = errors.isfinite()
        products = torch.where(finite, slopes * errors, 0.0)
        lost = (~finite & (slopes != 0)).sum().double()
        # The random signs of different samples are independent, so the rows of a batch can be summed separately.
        rows = products.reshape(len(gradient) if gradient.dim() and len(gradient) else 1, -1).sum(1)
        bad = (~slopes.isfinite()).sum().double()
        found = torch.stack([products.sum(), products.square().sum(), lost, rows.square().sum(), bad])
        known = self._batch.get(site)
        self._batch[site] = found if known is None else known + found.to(known.device)
        return bad

    def explain(self, change: float) -> bool:
        """Whether the impacts can explain the change of the loss. Zeros cannot, nor their rounding errors."""
        known = sum(max(one.size, one.spread) for one in self.totals.values())
        return known > 0 and change <= _FARTHEST * known

    def are_zero(self) -> bool:
        """Whether the loss has a gradient that is zero at all sites."""
        return bool(self.totals) and not (self.random or any(one.spread for one in self.totals.values()))

    def watch_scalar(self, tensor: torch.Tensor) -> None:
        """Records a number that the program computes. It may be the loss, whose gradient shows the scale."""
        gradients: list[torch.Tensor] = []

        def note(gradient: torch.Tensor) -> None:
            if not torch.is_grad_enabled():
                gradients.append(gradient.detach())

        self._hooks.append(tensor.register_hook(note))
        self._scalars.append((tensor, gradients))

    def scalar_like(self, value: torch.Tensor) -> torch.Tensor | None:
        """Returns the last number with a graph that equals the value, for a step that returns a detached loss."""
        with unnoticed():
            return next((one for one, _ in reversed(self._scalars) if float(one.detach()) == float(value)), None)

    def settle(self, loss: torch.Tensor | None) -> None:
        """Adds the impacts of a batch whose backward has ended."""
        # The gradient of the loss that the step returned is the factor by which it was scaled. None: it is not scaled.
        self.end_backward()
        scale = 1.0 if loss is None else self._scale_of(loss)
        of_site: dict[SiteKey, list[list[float]]] = {}
        for batch in self._ended:
            for site, sums in batch.items():
                of_site.setdefault(site, []).append(sums.tolist())
        if any(one[4] for several in of_site.values() for one in several):
            self._note_nonfinite()
        for site, several in of_site.items():
            if site in self.nonfinite:
                continue
            impact = self._impact(several, len(self._ended), scale)
            before = self.totals.get(site, Impact(0.0, 0.0, 0.0))
            size, spread = math.hypot(impact.size, before.size), math.hypot(impact.spread, before.spread)
            self.totals[site] = Impact(size, impact.signed + before.signed, spread)
        self.drop()

    def _note_nonfinite(self) -> None:
        with unnoticed():
            for site, line, number, of in self._slopes:
                if site not in self.nonfinite and (bad := int(number)):
                    self.nonfinite[site] = line, bad, of
                    self.totals.pop(site, None)

    def _impact(self, several: list[list[float]], number: int, scale: float) -> Impact:
        change = sum(one[0] for one in several) / number / scale
        size = math.sqrt(sum(one[3] if self.random else one[0] ** 2 for one in several) / number) / scale
        spread = math.sqrt(sum(one[1] for one in several) / number) / scale
        if any(one[2] for one in several):
            size = spread = math.inf
        # A single random direction is too noisy an estimate of the sum.
        return Impact(spread if self.random and number == 1 else size, change, spread)

    def end_backward(self) -> None:
        """Called after each backward of a batch."""
        if self._batch:
            self._ended.append(self._batch)
            self._batch = {}

    def drop(self) -> None:
        """Removes the hooks, because an op may have returned a parameter, as optimizers' ops do."""
        for hook in self._hooks:
            hook.remove()
        for kept in (self._hooks, self._scalars, self._batch, self._ended, self._slopes):
            kept.clear()

    def _scale_of(self, loss: torch.Tensor) -> float:
        with unnoticed():
            for number, gradients in reversed(self._scalars):
                if gradients and float(number.detach()) == float(loss.detach()):
                    return abs(float(sum(gradients))) or 1.0
        return self._loss_scale


def random_cotangents(outputs: Sequence[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """Returns a tensor of random signs for each output."""
    with unnoticed():
        drawn = [
            torch.randint(0, 2, one.shape, generator=generator, dtype=torch.int8).to(one.device) for one in outputs
        ]
        return [(signs * 2 - 1).to(one.dtype) for signs, one in zip(drawn, outputs, strict=True)]


class Backwards:
    """Runs the backwards that a step has not run itself."""

    def __init__(self) -> None:
        self.count: int = 0  # with those of the step
        self.failed: str = ""  # the error of a backward that the step does not run itself
        self.gradients: dict[str, torch.Tensor] = {}  # copies of those of the parameters after the last backward

    def after_step(self, result: Any, has_run: bool, impacts: Impacts | None = None) -> None:
        """Runs a backward on the result of a step, unless the step has run one. `impacts` gets the gradients."""
        impacts = impacts or Impacts(1.0)
        tensors = named_tensors(result)
        loss = None if impacts.random else loss_of(tensors)
        if has_run:
            self.count += 1
            impacts.settle(loss)
            return
        if loss is not None and not loss.requires_grad:
            loss = impacts.scalar_like(loss)
        generator = torch.Generator().manual_seed(0)
        of, is_random = ([] if loss is None else [loss]), False
        if not of:
            of = [one for one in tensors.values() if one.requires_grad and one.is_floating_point()]
            is_random = True
            if not of:
                return
            impacts.random = True
        times = impacts.backwards if impacts.random else 1
        for number in range(times):
            cotangents = random_cotangents(of, generator) if is_random else None
            self.count += 1
            try:
                torch.autograd.backward(of, cotangents, retain_graph=number < times - 1)
            except RuntimeError as error:  # a program without a backward may overwrite tensors that it would need
                if number:
                    break
                self.failed = str(error).partition("\n")[0]
                impacts.drop()
                return
            impacts.end_backward()
        impacts.settle(None)


def loss_of(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The loss among the results of a step: the one named "loss", or the only number."""
    if "loss" in tensors and tensors["loss"].numel() == 1:
        return tensors["loss"]
    numbers = [one for one in tensors.values() if one.numel() == 1 and one.is_floating_point()]
    return numbers[0] if len(numbers) == 1 else None


@contextlib.contextmanager
def watch_gradients(model: nn.Module, backwards: Backwards) -> Iterator[None]:
    """Copies the gradients of parameters in a block, before the program can drop them."""
    handles = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_leaf:

            def keep(parameter: torch.Tensor, name: str = name) -> None:
                with unnoticed():
                    gradient: Any = parameter.grad
                    if gradient is not None:
                        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                        backwards.gradients[name] = local.detach().clone()

            handles.append(parameter.register_post_accumulate_grad_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


#: Norms that are smaller shares of the largest norm consist of rounding errors: the reference's, the candidate's.
_VANISHING = 1e-5, 1e-2


def errors_of(candidate: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> list[GradientError]:
    """Returns the error of each gradient, largest first; infinite if only one side has the gradient."""
    norms = [{name: norm_of(one) for name, one in gradients.items()} for gradients in (candidate, reference)]
    largest = max(norms[1].values(), default=0.0)
    found = []
    for name in {**reference, **candidate}:
        ours, theirs = candidate.get(name), reference.get(name)
        error = float("inf") if ours is None or theirs is None else distance(ours, theirs)
        of_ours, of_theirs = (one.get(name, math.inf) for one in norms)
        vanishes = of_theirs <= _VANISHING[0] * largest and of_ours <= _VANISHING[1] * largest and error > 0
        found.append(GradientError(name, error, norms[1].get(name, 0.0), vanishes))
    return sorted(found, key=lambda one: (one.vanishes, -one.error, one.name))
