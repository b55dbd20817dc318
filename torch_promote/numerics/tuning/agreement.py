"""Makes the ranks of a process group agree on each verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from torch_promote.errors import TuningError

__all__ = ["Agreement"]


class Agreement:
    """The ranks of the default process group. Without a process group, there is one rank.

    Attributes:
        ranks: Their number.
        rank: The rank of this process.
    """

    def __init__(self) -> None:
        active = dist.is_available() and dist.is_initialized()
        self.ranks: int = dist.get_world_size() if active else 1
        self.rank: int = dist.get_rank() if active else 0

    def _gather(self, value: Any) -> list[Any]:
        if self.ranks == 1:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def verdict(self, passed: bool, errors: Mapping[str, float], error: str) -> tuple[bool, dict[str, float], str]:
        """Returns the verdict of all ranks: passed if it passed on all, with the largest errors.

        Args:
            passed: Whether it passed here.
            errors: The errors here.
            error: The exception here; "".
        """
        worst: dict[str, float] = {}
        raised = ""
        agreed = True
        for rank, (theirs, found, text) in enumerate(self._gather((passed, dict(errors), error))):
            agreed &= theirs
            for name, one in found.items():
                worst[name] = max(worst.get(name, 0.0), one)
            raised = raised or (f"rank {rank}: {text}" if text and self.ranks > 1 else text)
        return agreed, worst, raised

    def raise_together(self, error: Exception | None) -> None:
        """Raises this rank's error, or an error about another rank's, so that no rank waits for one that has raised.

        Raises:
            TuningError: Another rank raised.
        """
        texts = self._gather("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                raise TuningError(f"rank {rank} raised {text}")

    def of_first_rank(self, value: Any) -> Any:
        """Returns rank 0's value."""
        return self._gather(value)[0]

    def order(self, names: list[str]) -> list[str]:
        """Returns rank 0's order of names.

        Raises:
            TuningError: The ranks have different names.
        """
        found = self._gather(names)
        for rank, theirs in enumerate(found):
            if set(theirs) != set(found[0]):
                differ = sorted(set(theirs) ^ set(found[0]))
                raise TuningError(
                    f"ranks 0 and {rank} run different ops in a lower dtype: {', '.join(differ[:5])} on only one of "
                    f"them. All ranks must run the same model to be tuned together."
                )
        return list(found[0])
