"""The environments of Python processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment, in which Python finds this package and the helpers, and more variables."""
    tests = Path(__file__).parents[1]
    paths = [str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **variables}


def plain_environment() -> dict[str, str]:
    """The same without the variables that change what `import torch_promote` does."""
    return {name: value for name, value in environment().items() if not name.startswith("TORCH_PROMOTE_")}
