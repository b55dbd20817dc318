"""The training data: text and printed digits that every machine with Python and matplotlib has."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt.data import SYMBOLS, Batches, stdlib_corpus

__all__ = ["SYMBOLS", "digits", "masked", "text"]

#: Of the typefaces that matplotlib brings, those with Latin digits: DejaVu, STIX and Computer Modern.
_FACES = ("DejaVuSans*.ttf", "DejaVuSerif*.ttf", "STIXGeneral*.ttf", "cm[brt]*10.ttf", "cmss10.ttf")
_SIDE = 32


def text(number: int, seed: int, batch: int = 8, length: int = 64) -> list[torch.Tensor]:
    """Returns `number` batches of windows of the standard library's source, as symbol numbers."""
    batches = Batches(stdlib_corpus(), batch, length, seed, "cpu")
    return [batches.next()[0] for _ in range(number)]


def masked(windows: list[torch.Tensor], mask: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns windows with 15% of their symbols masked, and labels that have only those."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [torch.rand(ids.shape, generator=generator) < 0.15 for ids in windows]
    return [
        (ids.masked_fill(hidden, mask), ids.masked_fill(~hidden, -100))
        for ids, hidden in zip(windows, chosen, strict=True)
    ]


def digits(number: int, seed: int, batch: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns `number` batches of printed digits in random typefaces, sizes and places, with some noise, and labels."""
    generator = torch.Generator().manual_seed(seed)
    glyphs = _glyphs()
    made = []
    for _ in range(number):
        images = 0.1 * torch.randn(batch, 1, _SIDE, _SIDE, generator=generator)
        labels = torch.randint(10, (batch,), generator=generator)
        for image, label in zip(images, labels.tolist(), strict=True):
            of_label = glyphs[label]
            glyph = of_label[int(torch.randint(len(of_label), (), generator=generator))]
            height, width = glyph.shape
            top, left = (int(torch.randint(_SIDE - size + 1, (), generator=generator)) for size in (height, width))
            image[0, top : top + height, left : left + width] += glyph
        made.append((images, labels))
    return made


def _glyphs() -> list[list[torch.Tensor]]:
    """For each digit its pictures, with values from 0 to 1."""
    from matplotlib import get_data_path
    from matplotlib.ft2font import FT2Font

    folder = Path(get_data_path()) / "fonts" / "ttf"
    faces = [path for pattern in _FACES for path in sorted(folder.glob(pattern))]
    pictures: list[list[torch.Tensor]] = [[] for _ in range(10)]
    for path in faces:
        font = FT2Font(str(path))
        if ord("0") not in font.get_charmap():
            continue
        for points in (16, 20, 24):
            font.set_size(points, 72)
            for digit in range(10):
                font.set_text(str(digit))
                font.draw_glyphs_to_bitmap()
                pictures[digit].append(torch.tensor(font.get_image()).float()[:_SIDE, :_SIDE] / 255)
    return pictures
