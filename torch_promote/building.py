"""Compiles the extension: what setup.py and `torch-promote build` share, and the cache of compiled extensions.

`import torch_promote` fails without an extension. So setup.py loads this file by its path, and it imports nothing of
the package.

NOTE [ Which extension ]
An extension contains inlined code of PyTorch's headers, so it runs only with the minor version that it was compiled
against, such as 2.13: with all its patch releases, on the CPU and CUDA. A nightly or a build of PyTorch from source
shares its version number with no other, so only an extension compiled against exactly this one is used. The loader
takes the first of these that fits:

1. `_C.*.so` in the package, if `_built_with.json` fits: an installation from the sources;
2. the user's cache: what `torch-promote build` compiled for this PyTorch, this Python and these sources;
3. `_extensions/`, in a wheel: one for each supported minor version.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

#: How the names of extension modules end for this Python, such as ".cpython-311-x86_64-linux-gnu.so".
SUFFIX = EXTENSION_SUFFIXES[0]

_PACKAGE = Path(__file__).resolve().parent
_RELEASE = re.compile(r"(\d+\.\d+)\.\d+(\+[\w.]+)?")
_ROW = re.compile(r"^ROW\(\s*(\w+)\s*,", re.MULTILINE)
_COMPILERS = ("c++", "g++", "clang++")
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_SET_FOLDER = (
    "Set TORCH_PROMOTE_BUILD_DIR to a folder that you may write, for this command and for the programs that import "
    "torch_promote."
)


class BuildError(Exception):
    """The extension cannot be compiled, with the reason and the remedy."""


# Which extension


def minor_version(version: str) -> str | None:
    """Returns the minor version of a release of PyTorch; None for any other build."""
    found = _RELEASE.fullmatch(version)
    return found and found[1]


def fits(built_with: str, running: str) -> bool:
    """Whether an extension that was compiled against one PyTorch runs with another."""
    minor = minor_version(running)
    return built_with == running or (minor is not None and minor == minor_version(built_with))


def shipped_extension(minor: str) -> Path:
    """Returns the place of a wheel's extension for a minor version, such as "2.13", whether it is there or not."""
    return _PACKAGE / "_extensions" / f"_C-torch{minor}{SUFFIX}"


def cache_folder() -> Path | None:
    """Returns the folder in which `torch-promote build` keeps what it compiled; None for a user without a home."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache"), _PACKAGE.name)
    folder = os.path.expanduser(os.environ.get("TORCH_PROMOTE_BUILD_DIR") or default)
    return None if folder.startswith("~") else Path(os.path.abspath(folder))


def cached_extension(version: str) -> Path | None:
    """Returns where the cache's extension for a version of PyTorch is, or would be. None: there is no cache."""
    # The hash covers the sources, and what distinguishes two builds of one version of PyTorch, such as of a checkout
    # before and after an edit: the commit, and the size of the library. So no upgrade loads an old extension.
    import torch

    files, folder = _source_files(), cache_folder()
    if not files or folder is None:
        return None
    libraries = Path(torch.__file__).parent.glob("lib/libtorch_cpu.*")
    digest = hashlib.sha256(f"{torch.version.git_version} {[file.stat().st_size for file in libraries]}".encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return folder / f"_C-torch{version}-{digest.hexdigest()[:16]}{SUFFIX}"


def is_cut_off(file: Path) -> bool:
    """Whether an ELF file is shorter than its header says. Loading it would end the process."""
    with file.open("rb") as opened:
        header = opened.read(64)
    if len(header) < 64 or not header.startswith(b"\x7fELF\x02\x01"):
        return False
    (start,), (size, number) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
    return file.stat().st_size < int(start + size * number)


def _csrc() -> Path:
    """Returns the folder of the C++ sources: that of an installation, or of the checkout."""
    installed = _PACKAGE / "_sources"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc"


def _policies() -> Path:
    return _PACKAGE / "policy" / "op_policies.def"


def _source_files() -> list[Path]:
    csrc = sorted(_csrc().glob("*/*.*"))
    return [*csrc, _policies(), Path(__file__)] if csrc else []


# What is compiled


# NOTE [ Units ]
# Parsing PyTorch's headers takes most of the compile time of a small file. So the files of a unit are compiled together
# and share the parse. Names in unnamed namespaces must therefore be unique within a unit. Ninja starts the units in
# this order.
def _units(csrc: Path) -> dict[str, list[Path]]:
    wrappers = csrc / "dispatch" / "typed_wrapper.cpp"
    python = sorted((csrc / "python").glob("*.cpp"))
    return {
        "wrappers": [wrappers],
        "python": python,
        "engine": sorted({*csrc.rglob("*.cpp")} - {wrappers, *python}),
    }


def write_sources(folder: Path) -> None:
    """Writes a source file for each unit, and `aten_headers.h` with the headers of the table's ops."""
    # A macro cannot include files, and ATen/Operators.h takes minutes to compile. typed_wrapper.cpp skips missing ops.
    from torch.utils.cpp_extension import include_paths

    folder.mkdir(parents=True, exist_ok=True)
    ops = sorted(set(_ROW.findall(_policies().read_text())))
    aten = next(Path(p) / "ATen" / "ops" for p in include_paths() if (Path(p) / "ATen" / "ops").is_dir())
    headers = [f"<ATen/ops/{op}_ops.h>" for op in ops if (aten / f"{op}_ops.h").exists()]
    _write_includes(folder / "aten_headers.h", headers)
    for name, files in _units(_csrc()).items():
        _write_includes(folder / f"{name}.cpp", [f'"{file.relative_to(_csrc()).as_posix()}"' for file in files])


def _write_includes(target: Path, headers: list[str]) -> None:
    """Writes a file of includes. An unchanged file keeps its timestamp, so that it is not recompiled."""
    text = "// file: written by torch_promote/building.py\n" + "".join(f"#include {header}\n" for header in headers)
    if not target.exists() or target.read_text() != text:
        target.write_text(text)


def extension(generated: Path, *options: str) -> Any:
    """Returns the extension module for setuptools. The folder is that of `write_sources`, a relative path."""
    from torch.utils.cpp_extension import CppExtension, include_paths

    return CppExtension(
        "torch_promote._C",
        sources=[str(generated / f"{name}.cpp") for name in _units(_csrc())],
        depends=[os.path.relpath(path) for path in _source_files()],
        include_dirs=[str(generated.resolve()), str(_csrc()), str(_policies().parent)],
        extra_compile_args=[
            "-std=c++20",
            "-O2",
            "-g0",
            "-fvisibility=hidden",
            # ATen's headers of all ops dominate the compile time. The second macro makes including them an error.
            "-DAT_PER_OPERATOR_HEADERS",
            "-DTORCH_ASSERT_ONLY_METHOD_OPERATORS",
            *options,
            # No warnings from PyTorch's own headers.
            *(flag for path in include_paths() for flag in ("-isystem", path)),
            *shlex.split(os.environ.get("TORCH_PROMOTE_CXXFLAGS", "")),
        ],
        extra_link_args=shlex.split(os.environ.get("TORCH_PROMOTE_LDFLAGS", "")),
    )


def build(version: str, again: bool, say: Callable[[str], None]) -> tuple[Path, bool]:
    """Compiles an extension into the cache, for `torch-promote build`.

    Returns its path and whether it had to be compiled.
    """
    begin = time.time()
    target = cached_extension(version)
    if cache_folder() is None:
        raise BuildError(f"this user has no home folder in which the extension could be kept. {_SET_FOLDER}")
    if target is None:
        raise BuildError(
            f"this installation has no C++ sources: neither {_PACKAGE / '_sources'} nor {_PACKAGE.parent / 'csrc'} "
            "exists. Install a wheel of torch_promote, or a checkout."
        )
    if not again and os.path.exists(target) and _why_not_loaded(target) is None:  # False where it may not look
        return target, False
    compiler = _check_tools()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{target.name}.lock")):
            # Another process may have compiled it while this one waited.
            if target.exists() and target.stat().st_mtime >= begin:
                return target, False
            _compile(target, version, compiler, say)
    except OSError as error:
        raise BuildError(
            f"{error.filename or target.parent}: {error.strerror or error}. The extension is kept in "
            f"{target.parent}. {_SET_FOLDER}"
        ) from error
    return target, True


def find_compiler() -> str | None:
    """Returns $CXX, which may have options, if there is such a program, or else the first C++ compiler on PATH."""
    asked = os.environ.get("CXX", "")
    if asked:
        return asked if shutil.which((shlex.split(asked) or [asked])[0]) else None
    # Debian's clang-16 has only clang++-16.
    files = (file for folder in os.get_exec_path() for file in Path(folder).glob("*++-*"))
    found = (re.fullmatch(r"(?:clang|g)\+\+-(\d+)", file.name) for file in files)
    numbered = sorted(filter(None, found), key=lambda name: int(name[1]), reverse=True)
    return next(filter(shutil.which, [*_COMPILERS, *(name[0] for name in numbered)]), None)


def _describe(compiler: str) -> str:
    """Returns the compiler's name, and the first line of what it says of its version."""
    command = [*shlex.split(compiler), "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, errors="replace").stdout
    except OSError as error:
        raise BuildError(f"{compiler} does not start: {error.strerror}. Set CXX to another compiler.") from error
    return f"{compiler}: {(said.splitlines() or ['no version'])[0]}"


def _check_tools() -> str:
    """Returns the compiler, if everything is there with which the extension is compiled."""
    compiler, asked = find_compiler(), os.environ.get("CXX")
    if compiler is None:
        searched = f"CXX={asked}" if asked else ", ".join(_COMPILERS)
        raise BuildError(
            f"there is no C++ compiler: {searched} not found on PATH. Install one (Debian and Ubuntu: apt install "
            "g++), or set CXX to yours. Or install a release of PyTorch for which this package has an extension: "
            "`import torch_promote` lists them."
        )
    if importlib.util.find_spec("setuptools") is None:
        raise BuildError("setuptools is not installed, and PyTorch compiles with it. Run: pip install setuptools")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise BuildError(
            f"Python's headers are not installed: there is no {header}. Install them (Debian and Ubuntu: apt install "
            "python3-dev)."
        )
    return compiler


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process compiles the same extension, if the file system has locks."""
    import fcntl

    with path.open("w") as lock:
        with contextlib.suppress(OSError):  # without locks, both compile it, and the later one replaces the other's
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(target: Path, version: str, compiler: str, say: Callable[[str], None]) -> None:
    """Compiles in a process and a folder of its own; the result appears in the cache at once, if it loads."""
    log = target.with_name(f"{target.name}.log")
    with tempfile.TemporaryDirectory(prefix="torch_promote-") as folder, log.open("w") as output:
        # -P: the modules beside this file have names such as `report`, which others must not find.
        command = [sys.executable, "-P", __file__]
        # The package must not be loaded there: its extension would register the same kernels as the new one.
        # Without Ninja, older releases of setuptools also compile C++ with CC.
        env = {"CC": compiler, **os.environ, "CXX": compiler, _AUTOLOAD: "0"}
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            say(f"torch-promote: compiling the extension for torch {version} with {_describe(compiler)} (log: {log})")
            _wait(process)
        finally:
            process.kill()
            process.wait()
        if process.returncode != 0:
            lines = log.read_text(errors="replace").splitlines()
            shown = [line for line in lines if re.search(r"\berror\b", line)][:5] or lines[-10:]
            raise BuildError(
                f"the extension does not compile with torch {version} and {compiler} (exit status "
                f"{process.returncode}):\n" + "".join(f"  {line[:300]}\n" for line in shown) + f"The log is {log}. "
                "torch_promote supports PyTorch 2.11 and later, and was tested with 2.11 to 2.15."
            )
        (built,) = Path(folder).glob(f"built/torch_promote/*{SUFFIX}")
        whole = target.with_name(f"{os.getpid()}-{target.name}")
        try:
            shutil.copyfile(built, whole)
            if why := _why_not_loaded(whole):
                raise BuildError(
                    f"the extension was compiled, but does not load with torch {version}: {why}. The log is {log}. If "
                    f"{target.parent} is on a file system without execution (noexec), set TORCH_PROMOTE_BUILD_DIR to "
                    "another folder."
                )
            os.replace(whole, target)
        finally:
            whole.unlink(missing_ok=True)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process, with a line that counts the seconds if stderr is a terminal."""
    if not sys.stderr.isatty():
        process.wait()
        return
    begin = time.monotonic()
    while process.poll() is None:
        sys.stderr.write(f"\r  {time.monotonic() - begin:.0f} s ")
        sys.stderr.flush()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
    sys.stderr.write("\n")


def _compile_here() -> None:
    """Compiles the extension into `built/` of the working directory."""
    from setuptools import setup
    from torch.utils.cpp_extension import BuildExtension

    generated = Path("generated")
    write_sources(generated)
    setup(
        name="torch_promote_extension",
        ext_modules=[extension(generated)],
        cmdclass={"build_ext": BuildExtension},
        script_args=["build_ext", "--build-lib", "built", "--build-temp", "objects"],
    )


def _why_not_loaded(file: Path) -> str | None:
    """Returns why an extension does not load, and None if it does. Loading one that is cut off kills the process."""
    command = [sys.executable, "-P", __file__, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env={**os.environ, _AUTOLOAD: "0"})
    return None if done.returncode == 0 else [f"exit status {done.returncode}", *done.stderr.splitlines()][-1]


def _load(file: str) -> None:
    import torch  # noqa: F401  # its libraries, with which the extension is linked

    if is_cut_off(Path(file)):  # which may load, if what is missing is its table of symbols
        raise ImportError("the file is cut off")
    spec = importlib.util.spec_from_file_location("torch_promote._C", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "__main__":
    _load(sys.argv[1]) if sys.argv[1:] else _compile_here()
