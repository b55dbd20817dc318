"""`make cross-aarch64`: compiles and links the extension and the stand-in device for aarch64, on another CPU.

It needs aarch64-linux-gnu-g++ (Debian and Ubuntu: apt install g++-aarch64-linux-gnu). Headers and libraries come from
PyTorch's wheel for aarch64, which pip downloads into build/aarch64/. Python's headers are those of the running Python:
CPython's differ between x86-64 and aarch64 only in macros that the extension does not use.

Exit status: 0 if everything compiles without a warning, and every symbol is Python's or in a library. Nothing runs. So
this finds code that only x86 can compile, and not code that computes something else on aarch64.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "aarch64"
CXX = "aarch64-linux-gnu-g++"
#: Where the linker names a symbol that is in no library. Python's are in the program that loads the extension.
UNDEFINED = re.compile(r"undefined references? to `(?!_?Py)(.*)'")


def unpack() -> Path:
    """Returns the folder `torch` of the running version's wheel for aarch64, with its headers and libraries."""
    version = torch.__version__.partition("+")[0]
    folder = WORK / f"{version}-{sys.implementation.cache_tag}"
    if not (folder / "complete").exists():
        python = "{}.{}".format(*sys.version_info)
        target = ["--platform", "manylinux_2_28_aarch64", "--python-version", python, "--only-binary=:all:"]
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", *target, "-d", str(folder), f"torch=={version}"]
        subprocess.run(pip, check=True)
        (wheel,) = folder.glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            needed = re.compile(r"torch/(include/.*|lib/lib(torch|torch_cpu|torch_python|c10)\.so)")
            archive.extractall(folder, filter(needed.fullmatch, archive.namelist()))
        wheel.unlink()
        (folder / "complete").touch()
    return folder / "torch"


def call(*command: str, source: str = "") -> None:
    """Compiles or links. Ends the program if that fails, or a symbol is missing."""
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    missing = sorted({*UNDEFINED.findall(done.stderr)})
    if done.returncode != 0 or missing:
        sys.exit("\n".join([done.stderr, f"cross-aarch64: failed: {' '.join(command)}", *missing]))


def main() -> None:
    """Compiles and links; see the module."""
    if shutil.which(CXX) is None:
        sys.exit(f"cross-aarch64: there is no {CXX}. Debian and Ubuntu: apt install g++-aarch64-linux-gnu")
    wheel = unpack()
    include = [str(wheel / "include"), str(wheel / "include" / "torch" / "csrc" / "api" / "include")]
    cpp_extension.include_paths = lambda *_: include  # where building.py finds PyTorch's headers
    building = runpy.run_path(str(ROOT / "torch_promote" / "building.py"))
    building["write_sources"](WORK / "generated")
    extension = building["extension"](WORK / "generated", "-Wall", "-Wextra", "-Werror")
    folders = [f"-I{folder}" for folder in [*extension.include_dirs, cpp_extension.sysconfig.get_path("include")]]
    objects = []
    for file in map(Path, extension.sources):
        print(f"{CXX} {file.stem}", flush=True)
        objects.append(str(file.with_suffix(".o")))
        call(CXX, "-c", "-fPIC", "-DNDEBUG", *extension.extra_compile_args, *folders, str(file), "-o", objects[-1])
    check = ("-Wl,--no-undefined", "-Wl,--warn-unresolved-symbols")
    libraries = [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
    call(CXX, "-shared", *objects, *check, f"-L{wheel / 'lib'}", *libraries, "-o", str(WORK / "_C.so"))

    print(f"{CXX} cuda_stand_in", flush=True)
    sys.path.insert(0, str(ROOT / "tools"))
    from cuda_stand_in import build

    os.environ["CXX"] = CXX
    build.torch_folder = lambda: wheel
    units = "".join(f'#include "{name}"\n' for name in build.SOURCES)
    call(*build.command(WORK / "stand_in.so"), *check, source=units)
    print(f"cross-aarch64: everything compiles and links: {WORK}/*.so")


if __name__ == "__main__":
    main()
