"""The command `torch-promote build`, for an installation that has an extension; see torch_promote/building.py."""

from torch_promote.building import DESCRIPTION, EPILOG, add_arguments, run

__all__ = ["DESCRIPTION", "EPILOG", "add_arguments", "run"]
