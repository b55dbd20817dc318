"""Training text that every machine has: the source of Python's standard library, as characters."""

from __future__ import annotations

import string
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

MAX_CHARACTERS = 2_000_000

# One symbol stands for all non-ASCII characters, so that the vocabulary is the same on all machines.
OTHER = "\x00"
SYMBOLS = OTHER + "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))


@dataclass(frozen=True)
class Corpus:
    """A text as symbol numbers.

    Attributes:
        ids: int64 of shape (characters,); an id is an index into `SYMBOLS`.
        files: The number of files.
    """

    ids: torch.Tensor
    files: int


def stdlib_corpus(max_characters: int = MAX_CHARACTERS) -> Corpus:
    """Reads the standard library's top-level modules, in the order of their names, until there is enough text.

    Raises:
        FileNotFoundError: This Python has no standard library in source form.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: list[str] = []
    for path in sorted(folder.glob("*.py")):
        if sum(map(len, parts)) >= max_characters:
            break
        parts.append(path.read_text(encoding="utf-8", errors="replace").expandtabs(4))
    if not parts:
        raise FileNotFoundError(f"no Python source files in {folder}, which would be the text to train on")
    return Corpus(encode("".join(parts)[:max_characters]), len(parts))


def encode(text: str) -> torch.Tensor:
    """Returns a text as symbol numbers, int64 of shape (characters,)."""
    number = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    return torch.tensor([number.get(character, 0) for character in text])


class Batches:
    """Random windows of a corpus, the same ones for the same seed.

    Args:
        corpus: The source of the windows.
        batch: The number of windows per batch.
        length: The number of characters per window.
        seed: The seed of the generator that selects them.
        device: The device of the batches.
    """

    def __init__(self, corpus: Corpus, batch: int, length: int, seed: int, device: str) -> None:
        self.ids = corpus.ids
        self.batch = batch
        self.length = length
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns windows and the next character at each position, both int64 of shape (batch, length)."""
        starts = torch.randint(len(self.ids) - self.length, (self.batch, 1), generator=self.generator)
        windows = self.ids[starts + torch.arange(self.length + 1)]
        return windows[:, :-1].to(self.device), windows[:, 1:].to(self.device)
