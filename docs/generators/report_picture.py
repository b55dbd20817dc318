"""Photographs the page of a trace for README.md: docs/images/trace_light.png and trace_dark.png.

`python docs/generators/report_picture.py` traces examples/overflow.py and takes the pictures with Chromium, which has
to be installed. Set CHROMIUM for a browser with another name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["PICTURES", "main"]

_ROOT = Path(__file__).parents[2]
_SIZE = (1180, 700)  # CSS pixels: down to the tree of modules

#: The pictures, by what the reader's system prefers: Chromium's number of that scheme.
PICTURES = {_ROOT / "docs" / "images" / f"trace_{name}.png": number for name, number in (("dark", 0), ("light", 1))}


def main() -> int:
    """Writes the pictures. Returns 2 if there is no browser, otherwise 0."""
    browser = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    if browser is None:
        print("report_picture.py: error: chromium is not installed. Set CHROMIUM for another browser.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "trace.html"
        command = [sys.executable, "-m", "torch_promote", "trace", "--values", "--html", str(page)]
        subprocess.run([*command, "examples/overflow.py"], cwd=_ROOT, check=True)
        for picture, scheme in PICTURES.items():
            options = (
                *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"),
                *("--window-size={},{}".format(*_SIZE), f"--blink-settings=preferredColorScheme={scheme}"),
            )
            shot = [browser, *options, f"--screenshot={picture}", page.as_uri()]
            subprocess.run(shot, check=True, timeout=120, capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
