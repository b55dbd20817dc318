"""The file from which `tune` resumes after an interruption."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_promote.errors import OptionError, TorchPromoteError
from torch_promote.numerics.comparing.comparison import Comparison
from torch_promote.numerics.pages.plain_data import from_plain, numbers, to_plain
from torch_promote.numerics.runs.kept_tensor import add_bytes
from torch_promote.numerics.tuning.tuning_records import Trial
from torch_promote.numerics.tuning.verdict import Results
from torch_promote.policy.atomic_write import write_atomically

__all__ = ["Kept", "ResumeFile", "digest"]

_FORMAT = 1
#: Larger results of the reference are not stored in the file; the reference then runs again.
_MOST_BYTES = 4 << 20


@dataclasses.dataclass
class Kept:
    """The content of the file.

    Attributes:
        state: The hashes of the state before the step.
        digest: A hash of the reference's results.
        reference: These results, if they are small.
        noise_floor: The noise floor of each metric.
        comparison: The comparison.
        trials: The trials, by their keys.
        runs: The number of runs made.
    """

    state: dict[str, str]
    digest: str
    reference: Results | None
    noise_floor: dict[str, float]
    comparison: Comparison
    trials: dict[str, Trial]
    runs: int


class ResumeFile:
    """The file, which is rewritten after each trial.

    Args:
        path: The file; None to store nothing.
        identity: The arguments that identify a tuning, as plain data.

    Raises:
        OptionError: The file cannot be read or written, or belongs to another tuning.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        self._identity = json.loads(json.dumps(identity))
        self._gates: dict[str, Any] = {}
        self._trials: dict[str, Any] = {}
        self.kept: Kept | None = None
        if self._path is None:
            return
        if self._path.exists():
            self.kept = self._read()
        elif not self._path.absolute().parent.is_dir():
            raise OptionError(
                f"resume={str(self._path)!r} cannot be written: there is no folder of that name. Create it first."
            )

    def _read(self) -> Kept:
        assert self._path is not None
        name = str(self._path)
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            theirs, gates, trials = data["identity"], data["gates"], data["trials"]
            found = {key: from_plain(Trial, one) for key, one in trials.items()}
            runs = int(data["runs"])
            kept = Kept(
                state=gates["state"],
                digest=gates["digest"],
                reference=None if gates["reference"] is None else _results_from(gates["reference"]),
                noise_floor=numbers(gates["noise_floor"]),
                comparison=Comparison.from_dict(gates["comparison"]),
                trials=found,
                runs=runs,
            )
            is_known = data["format"] == _FORMAT
        except (OSError, ValueError, KeyError, TypeError, AttributeError, TorchPromoteError) as error:
            raise OptionError(
                f"resume={name!r} was not written by tune ({type(error).__name__}: {error}). Use another file, or one "
                f"that does not exist yet."
            ) from None
        if not is_known:
            raise OptionError(f"resume={name!r} has format {data['format']!r}; this release reads format {_FORMAT}.")
        differ = [key for key in {**theirs, **self._identity} if theirs.get(key) != self._identity.get(key)]
        if differ:
            shown = "; ".join(
                f"{key} {_short(self._identity.get(key))}, in the file {_short(theirs.get(key))}" for key in differ
            )
            raise OptionError(f"resume={name!r} belongs to another tuning: {shown}. Use another file, or delete it.")
        self._gates, self._trials = gates, trials
        return kept

    def keep_gates(
        self,
        *,
        state: Mapping[str, str],
        reference: Results,
        noise_floor: Mapping[str, float],
        comparison: Comparison,
    ) -> None:
        """Stores the results of the runs before the search."""
        size = sum(tensor.numel() * tensor.element_size() for batch in reference for tensor in batch.values())
        self._gates = {
            "state": dict(state),
            "digest": digest(reference),
            "reference": _to_text(reference) if size <= _MOST_BYTES else None,
            "noise_floor": to_plain(noise_floor),
            "comparison": comparison.to_dict(),
        }  # written to the file with the next trial

    def keep(self, key: str, trial: Trial, runs: int) -> None:
        """Stores a trial."""
        self._trials[key] = to_plain(trial)
        self._write(runs)

    def _write(self, runs: int) -> None:
        if self._path is None:
            return
        data = {
            "format": _FORMAT,
            "identity": self._identity,
            "gates": self._gates,
            "trials": self._trials,
            "runs": runs,
        }
        try:
            write_atomically(self._path, json.dumps(data, indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise OptionError(f"resume={str(self._path)!r} cannot be written: {error.strerror or error}.") from error


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}... (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def digest(results: Results) -> str:
    """Returns a hash of results.

    Example:
        >>> digest([{"loss": torch.ones(1)}]) == digest([{"loss": torch.ones(1)}])
        True
    """
    found = hashlib.sha256()
    for batch in results:
        for name, tensor in batch.items():
            found.update(name.encode())
            add_bytes(found, tensor)
    return found.hexdigest()[:32]


def _to_text(results: Results) -> str:
    stream = io.BytesIO()
    torch.save([{name: tensor.cpu() for name, tensor in batch.items()} for batch in results], stream)
    return base64.b64encode(stream.getvalue()).decode()


def _results_from(text: str) -> Results:
    found: Results = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return found
