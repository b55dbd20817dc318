"""Photographs the pages of reports for docs/images/: in light, and for README.md also in dark.

`python docs/generators/report_picture.py` makes the pages from examples/overflow.py and takes the pictures with
Chromium, which has to be installed. Set CHROMIUM for a browser with another name.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["PICTURES", "main"]

_ROOT = Path(__file__).parents[2]
_IMAGES = _ROOT / "docs" / "images"
_SIZE = (1180, 700)  # CSS pixels

#: The commands that make the pages, in a folder with overflow.py.
_COMMANDS = (
    "trace --values --html trace.html --record a.jsonl.gz overflow.py",
    "trace --read a.jsonl.gz --html explain.html head",
    "find-nan --html find_nan.html overflow.py",
    "compare --html compare.html overflow.py:make",
    "tune --tolerance 1e-3 --html tune.html overflow.py:make",
    "trace --values --record b.jsonl.gz --override square=fp32 overflow.py",
    "diff --html diff.html a.jsonl.gz b.jsonl.gz",
)
#: Chromium's numbers of what the reader's system prefers.
_SCHEMES = {"dark": 0, "light": 1}
_PAGES = ("trace", "explain", "find_nan", "compare", "tune", "diff")
_IN_README = ("trace", "diff")

#: The pictures, by page and scheme.
PICTURES = {
    (name, scheme): _IMAGES / f"{name}_{scheme}.png"
    for name in _PAGES
    for scheme in _SCHEMES
    if scheme == "light" or name in _IN_README
}


def main() -> int:
    """Writes the pictures. Returns 2 if there is no browser, otherwise 0."""
    browser = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    if browser is None:
        print("report_picture.py: error: chromium is not installed. Set CHROMIUM for another browser.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(_ROOT / "examples" / "overflow.py", folder)
        for command in _COMMANDS:
            # find-nan and diff exit with 1 if they found something.
            ran = subprocess.run([sys.executable, "-m", "torch_promote", *shlex.split(command)], cwd=folder)
            if ran.returncode not in (0, 1):
                return ran.returncode
        for (name, scheme), picture in PICTURES.items():
            options = (
                *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"),
                *("--window-size={},{}".format(*_SIZE), f"--blink-settings=preferredColorScheme={_SCHEMES[scheme]}"),
            )
            page = Path(folder, f"{name}.html").as_uri()
            shot = [browser, *options, f"--screenshot={picture}", page]
            subprocess.run(shot, check=True, timeout=120, capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
