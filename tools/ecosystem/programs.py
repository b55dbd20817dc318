"""The programs of a framework, as its `programs.toml` lists them.

    [bf16_two_processes]
    program = ["train.py", "--precision", "bf16"]
    launcher = ["torchrun", "--standalone", "--nproc-per-node=2"]
    results = ["weights/*.safetensors"]
    override = "linear=fp32"
    autocast = true

program: The script, or `-m` and a module, and the arguments. A script is a file of the framework's folder. In an
    argument, `{folder}` stands for that folder. `$VARIABLE` in place of the script is the file that this environment
    variable names: a script that the framework's packages lack. If it is not set, the program is listed as not run,
    which does not count as passed.
before: A script of the framework's folder that runs before each run, in the same working directory. Default: none.
launcher: What starts the program. Default: Python. A launcher has to accept `-m MODULE` in place of a script.
results: The files that are compared, as patterns relative to the working directory, which is empty at the start.
    Default: `*.pt`.
override: An override, OP=POLICY, that must change the results. Default: `linear=fp32`.
autocast: Whether the program opens regions. If not, no policy may change the results. Default: true.
off: Whether the program runs under the policy `off`. A program that itself casts to the autocast dtype may fail under
    it; its override alone then proves that the regions are ours. Default: true.
checks: Whether the program makes its own checks and ends with an error if one fails. It then runs once, without
    `install`. Default: false.
timeout: The seconds that each run may take. Default: 900.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

__all__ = ["Program", "ProgramsError", "frameworks", "programs_of"]


class ProgramsError(Exception):
    """Raised if a name or a file of programs is wrong."""


@dataclass(frozen=True)
class Program:
    """A program of a framework; the module describes the fields that `programs.toml` may have.

    Attributes:
        framework: The name of its framework.
        name: Its name.
        folder: The folder of its framework.
    """

    framework: str
    name: str
    folder: Path
    program: tuple[str, ...]
    before: str | None = None
    launcher: tuple[str, ...] = ("python",)
    results: tuple[str, ...] = ("*.pt",)
    override: str = "linear=fp32"
    autocast: bool = True
    off: bool = True
    checks: bool = False
    timeout: float = 900

    @property
    def variable(self) -> str | None:
        """The environment variable that names its script, if one does."""
        script = self.program[0]
        return script[1:] if script.startswith("$") else None

    @property
    def missing(self) -> bool:
        """Whether the environment variable for its script is not set."""
        return self.variable is not None and not os.environ.get(self.variable)

    def script(self) -> str:
        """Returns the path of its script, or `-m`.

        Raises:
            ProgramsError: The environment variable does not name a file.
        """
        if self.variable is None:
            return self.program[0] if self.program[0] == "-m" else str(self.folder / self.program[0])
        path = Path(os.environ.get(self.variable, "")).expanduser().resolve()
        if not path.is_file():
            raise ProgramsError(
                f"{self.variable} names {path}, which is not a file. "
                f"Set it to the script of {self.framework}/{self.name}, or unset it"
            )
        return str(path)


_KEYS = {field.name for field in fields(Program)} - {"framework", "name", "folder"}


def frameworks(folder: Path) -> list[Path]:
    """Returns the folders of the frameworks."""
    return sorted(file.parent for file in folder.glob("*/programs.toml"))


def programs_of(folder: Path) -> list[Program]:
    """Returns the programs of a framework.

    Args:
        folder: The folder of the framework.

    Raises:
        ProgramsError: A program has an unknown key, or no `program`.
    """
    programs = []
    for name, entry in tomllib.loads((folder / "programs.toml").read_text(encoding="utf-8")).items():
        if unknown := sorted(set(entry) - _KEYS):
            raise ProgramsError(f"{folder.name}/{name} has the unknown key {unknown[0]!r}. Keys: {sorted(_KEYS)}")
        if not entry.get("program"):
            raise ProgramsError(f"{folder.name}/{name} has no `program`: name its script and arguments")
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        programs.append(Program(folder.name, name, folder, **values))
    return programs
