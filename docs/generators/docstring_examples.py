"""Lets the API reference show the section `Example:` of a docstring as code: griffe knows it as `Examples:` only.

mkdocs.yml names this file as an extension of griffe, which reads the docstrings for mkdocstrings.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

Extension: Any
try:
    Extension = importlib.import_module("griffe").Extension
except ImportError:  # nothing builds the site here
    Extension = object

__all__ = ["ExampleSections", "with_examples"]


def with_examples(docstring: str) -> str:
    r"""Returns a docstring with the heading that griffe knows.

    Args:
        docstring: A docstring without the indentation of its code.

    Example:
        >>> with_examples("Adds.\n\nExample:\n    >>> 1 + 1\n    2")
        'Adds.\n\nExamples:\n    >>> 1 + 1\n    2'
    """
    return re.sub(r"^Example:$", "Examples:", docstring, flags=re.MULTILINE)


class ExampleSections(Extension):  # type: ignore[misc]
    """The extension: it rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrites the docstring of an object that griffe has found."""
        if obj.docstring is not None:
            obj.docstring.value = with_examples(obj.docstring.value)
