"""Runs the command line: `python -m torch_promote`."""

import sys

from torch_promote.cli.program import main

if __name__ == "__main__":
    sys.exit(main())
