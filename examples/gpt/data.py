"""Text that every machine has: the source of Python's own standard library, as characters."""

from __future__ import annotations

import string
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

MAX_CHARACTERS = 2_000_000

# One symbol stands for whatever is not in ASCII, so that the vocabulary is the same everywhere.
OTHER = "\x00"
SYMBOLS = OTHER + "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))


@dataclass(frozen=True)
class Corpus:
    """A text as symbol numbers.

    Attributes:
        ids: int64 of shape (characters,); an id is an index into `SYMBOLS`.
        files: How many files the text comes from.
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
        corpus: Where the windows come from.
        batch: Windows in a batch.
        length: Characters in a window.
        seed: Of the generator that picks them.
        device: Where the batches are put.
    """

    def __init__(self, corpus: Corpus, batch: int, length: int, seed: int, device: str) -> None:
        self.ids = corpus.ids
        self.batch = batch
        self.length = length
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns windows and what follows each of their characters, both int64 of shape (batch, length)."""
        starts = torch.randint(len(self.ids) - self.length, (self.batch, 1), generator=self.generator)
        windows = self.ids[starts + torch.arange(self.length + 1)]
        return windows[:, :-1].to(self.device), windows[:, 1:].to(self.device)
