"""The command `torch-promote build`, for an installation that has no extension for its PyTorch."""

from __future__ import annotations

import argparse

from torch_promote.building import BuildError, build
from torch_promote.errors import say

DESCRIPTION = """\
Compiles the extension for the running PyTorch, for which this installation has
none: a nightly, a build from source, or a newer release. It takes a C++
compiler and a few minutes. The result is kept in a cache, and
`import torch_promote` uses it from then on:

  $TORCH_PROMOTE_BUILD_DIR   if set, such as a folder that a cluster shares
  ~/.cache/torch_promote     otherwise ($XDG_CACHE_HOME/torch_promote)

It does nothing if the cache already has this extension.
"""
EPILOG = """\
It takes c++, g++ or clang++, or else the newest g++-N or clang++-N, and says
which. Environment: CXX names another, MAX_JOBS limits the compilations that run
at once.
"""


_FAILED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--force", action="store_true", help="compile it again if the cache has it")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command, and returns its exit status: 0, or 2 if nothing could be compiled."""
    try:
        import torch
    except ImportError as error:
        say(f"torch-promote: error: PyTorch cannot be imported: {error}. Install it first: pip install torch.")
        return _FAILED
    try:
        target, has_compiled = build(torch.__version__, arguments.force, say)
    except BuildError as error:
        say(f"torch-promote: error: {error}")
        return _FAILED
    what = "compiled" if has_compiled else "the cache already has"
    print(f"torch {torch.__version__}: {what} {target}")
    return 0
