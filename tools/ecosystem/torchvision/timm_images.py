"""Writes the PNG files that timm's train.py is run on: an ImageFolder with two classes."""

from pathlib import Path

import numpy
from PIL import Image

for split, count in (("train", 80), ("validation", 8)):
    for index in range(count):
        folder = Path("data", split, f"class{index % 2}")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = numpy.random.default_rng([count, index]).integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
