"""Runs timm's own train.py, which TIMM_TRAIN names, for an epoch on generated PNG files."""

import os
import runpy
import sys
from pathlib import Path

import numpy
from PIL import Image

ARGUMENTS = (
    "--data-dir data --device cpu --amp --amp-dtype bfloat16 --epochs 1 --warmup-epochs 0 --num-classes 2 --workers 0 "
    "--seed 0 --experiment run --img-size 64 --batch-size 2"
)

for split, count in (("train", 80), ("validation", 8)):
    for index in range(count):
        folder = Path("data", split, f"class{index % 2}")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = numpy.random.default_rng([count, index]).integers(0, 256, (64, 64, 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
script = os.environ["TIMM_TRAIN"]
sys.argv = [script, *ARGUMENTS.split(), *sys.argv[1:]]
sys.path.insert(0, str(Path(script).parent))
runpy.run_path(script, run_name="__main__")
