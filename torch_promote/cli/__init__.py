"""The command `torch-promote`: a file for each subcommand, and main, which runs them."""

from torch_promote.cli.main import main

__all__ = ["main"]
