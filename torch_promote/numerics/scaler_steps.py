"""What GradScaler did in a block that `find_nonfinite` checked, what it means, and what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class ScalerSteps:
    """The steps of GradScaler: the updates of its scale.

    Attributes:
        count: Their number.
        skipped: The number of steps in which a gradient was not finite: GradScaler skipped the optimizer's step.
        last_skipped: The number of the last skipped step, counted from 0; None if there is none.
        after_growth: The number of skipped steps that were the first after the scale grew.
        first_scale: The scale of the first step.
        scale: The scale after the last step.
        backoff: The factor by which a skipped step changes the scale.
        growth_interval: The number of steps without a skipped one after which the scale grows.
    """

    count: int = 0
    skipped: int = 0
    last_skipped: int | None = None
    after_growth: int = 0
    first_scale: float = 0.0
    scale: float = 0.0
    backoff: float = 0.5
    growth_interval: int = 0

    def add(self, scale: float, is_skipped: bool, backoff: float, growth_interval: int) -> None:
        """Adds a step, with the scale before the update, and the scaler's settings."""
        if not self.count:
            self.first_scale = self.scale = scale
        if is_skipped:
            self.skipped += 1
            self.last_skipped = self.count
            self.after_growth += scale > self.scale
        self.count += 1
        self.scale = scale * backoff if is_skipped else scale
        self.backoff, self.growth_interval = backoff, growth_interval

    @property
    def never_stepped(self) -> bool:
        """Whether GradScaler skipped all steps, so that no weight has changed."""
        return 0 < self.count == self.skipped

    def __str__(self) -> str:
        if not self.never_stepped:
            return f"GradScaler skipped {self.skipped:,} of {self.count:,} steps"
        return "GradScaler skipped " + (
            "the only step, which changed no weight"
            if self.count == 1
            else f"all {self.count:,} steps, which changed no weight"
        )

    def explain(self, first: str, size: float, largest: float, codes: Sequence[str]) -> list[str]:
        """Returns what the skipped steps mean, and what to do; nothing if there are none.

        Args:
            first: In the last skipped step, the call whose result overflowed first because of the scale, or "".
            size: The largest known gradient, without the scale; 0 if none is known.
            largest: The largest number of its dtype.
            codes: The policies under which the gradients may be finite, the narrowest first.
        """
        if not self.skipped:
            return []
        lines = [
            f"In {self.skipped:,} of {self.count:,} steps, the last of them step {self.last_skipped:,} (from 0), a "
            "scaled gradient was not finite. Each time, GradScaler skipped the optimizer's step and lowered the scale, "
            f"which was {_spell(self.first_scale)} at first and is {_spell(self.scale)} now.",
            f"In the last of them, the first overflow was in {first}."
            if first
            else "No observed call overflowed because of the scale: the cause is in code that was not observed.",
        ]
        if 2 * self.after_growth >= max(self.skipped, 2):
            lines.append(
                f"{self.after_growth:,} of these steps came after the scale had grown, as it does after "
                f"{self.growth_interval:,} good steps. A larger growth_interval of GradScaler makes them rarer."
            )
        elif self.last_skipped == self.count - 1:
            if size and largest:
                lines.append(self._about_scale(size, largest))
            if codes:
                lines.append(f"To keep a high scale, try the op in float32: {codes[0]}.")
        else:
            lines.append("Later steps were not skipped: this is normal until the scale has settled.")
        return lines

    def _about_scale(self, size: float, largest: float) -> str:
        """Which scale would do for a gradient of a size, if GradScaler skipped the last step."""
        fits = 2.0 ** math.floor(math.log2(largest / size))
        text = f"The largest known gradient is {size:.3g} without the scale, so it fits with {_spell(fits)} or less."
        if fits < 1:
            return f"{text} So low a scale makes small gradients 0: run the op in float32, or use bfloat16."
        more = math.ceil(math.log(self.scale / fits, 1 / self.backoff)) if self.scale > fits else 0
        when = f"after {more:,} more skipped steps" if more > 1 else "after one more skipped step" if more else "now"
        return f"{text} The scale is that low {when}: run longer, or start there: GradScaler(init_scale={fits:g})."


def _spell(scale: float) -> str:
    return f"{scale:,.10g}"
