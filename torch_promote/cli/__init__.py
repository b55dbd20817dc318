"""The command `torch-promote`: a module for each subcommand, and `main`, which runs them.

terminal and progress draw on the terminal; op_filter is the option `--op`. The commands `policies` and `parity` draw
their output in modules of their own, which begin with the command's name.
"""

from torch_promote.cli.program import main

__all__ = ["main"]
