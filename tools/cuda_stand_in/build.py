"""Compiles the stand-in for the installed PyTorch, without importing it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
#: Compiled together: parsing PyTorch's headers takes most of the time.
#: `kernels.cpp` is last: it leaves out the ops that have a kernel by then.
SOURCES = ("device.cpp", "counts.cpp", "graphs.cpp", "storage_kernels.cpp", "cuda_only.cpp", "kernels.cpp")
FOLDER = HERE.parents[1] / "build" / "cuda_stand_in"


def torch_folder() -> Path:
    """The folder of the installed PyTorch."""
    found = importlib.util.find_spec("torch")
    assert found is not None, "PyTorch is not installed"
    assert found.origin is not None
    return Path(found.origin).parent


def why_not() -> str | None:
    """The reason why the stand-in is not available here, or None if it is."""
    if torch_folder().joinpath("lib", "libtorch_cuda.so").exists():
        return (
            f"PyTorch {importlib.metadata.version('torch')} is built with CUDA: its own kernels are registered for "
            "device type cuda. The stand-in needs a CPU build of PyTorch; with a GPU, use --device cuda."
        )
    if _compiler() is None:
        return "the stand-in is compiled on demand, and there is no C++ compiler. Install g++."
    return None


def _compiler() -> str | None:
    asked = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [asked] if asked else ["g++", "c++", "clang++"])), None)


def command(target: Path) -> list[str]:
    """The compiler's command line; the source comes on stdin."""
    torch = torch_folder()
    return [
        _compiler() or "g++",
        *("-x", "c++", "-", "-o", str(target), "-shared", "-fPIC"),
        *("-std=c++20", "-O1", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"),
        "-Wno-inconsistent-missing-override",  # what older releases do not have is not marked `override`
        # ATen's headers of all ops dominate the compile time. The second macro makes including them an error.
        *("-DAT_PER_OPERATOR_HEADERS", "-DTORCH_ASSERT_ONLY_METHOD_OPERATORS"),
        *("-I", str(HERE), "-isystem", str(torch / "include")),
        *("-isystem", str(torch / "include" / "torch" / "csrc" / "api" / "include")),
        *("-L", str(torch / "lib"), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"),
        *os.environ.get("TORCH_PROMOTE_CXXFLAGS", "").split(),  # as in setup.py
    ]


def library() -> Path:
    """Returns the compiled library's path, and compiles it first if necessary. Safe in concurrent processes."""
    parts = [*map(Path.read_bytes, sorted(HERE.glob("*.[ch]*"))), importlib.metadata.version("torch").encode()]
    key = hashlib.sha256(b"\0".join([*parts, *map(str.encode, [*SOURCES, *command(Path("target"))])])).hexdigest()[:16]
    target = FOLDER / f"{key}.so"
    if target.exists():
        return target
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FOLDER.joinpath("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = target.with_suffix(".unfinished")
            source = "".join(f'#include "{name}"\n' for name in SOURCES)
            done = subprocess.run(command(unfinished), input=source, text=True, capture_output=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"the stand-in does not compile:\n{done.stderr}")
            unfinished.replace(target)
    return target
