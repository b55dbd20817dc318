"""Loading the extension, and the errors if it cannot be loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from helpers.subprocesses import Program, environment, run_python, run_together
from torch_promote import _C, building
from torch_promote import loader as _extension

PACKAGE = Path(_extension.__file__).parent
CSRC = PACKAGE.parent / "csrc"


def test_built_with_the_running_torch() -> None:
    assert torch.__version__.startswith(_C.TORCH_VERSION)
    built_with = json.loads(_extension._NOTE.read_text())["torch"]
    assert building.minor_version(built_with) == building.minor_version(torch.__version__)


@pytest.mark.parametrize(
    ("built_with", "running", "fits"),
    [
        ("2.13.0+cpu", "2.13.0+cpu", True),
        ("2.13.0+cpu", "2.13.0+cu130", True),
        ("2.13.0+cu130", "2.13.1", True),
        ("2.13.0", "2.13.0+rocm7.1", True),
        ("2.13.0", "2.14.0", False),
        ("2.1.0", "2.13.0", False),
        # Builds that share a version number with others: only the very same one.
        ("2.16.0.dev20260101+cpu", "2.16.0.dev20260101+cpu", True),
        ("2.16.0.dev20260101+cpu", "2.16.0.dev20260102+cpu", False),
        ("2.13.0", "2.13.0a0+git1a2b3c4", False),
        ("2.13.0a0+git1a2b3c4", "2.13.0", False),
        ("2.13.0rc1", "2.13.0", False),
        ("2.13.0rc1", "2.13.0rc2", False),
        ("2.13.0", "2.13.0.post1", False),
        ("2.13.0", "2.13", False),
    ],
)
def test_an_extension_fits_all_releases_of_a_minor_version_and_one_other_build(
    built_with: str, running: str, fits: bool
) -> None:
    assert building.fits(built_with, running) is fits


class Installation:
    """A copy of the package in which no extension has been built, with the extensions that a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.package, self.cache = folder / "torch_promote", folder / "cache"
        shutil.copytree(PACKAGE, self.package, ignore=shutil.ignore_patterns("*.so", "_built_with.json", "__pycache__"))
        shutil.copytree(CSRC, self.package / "_sources")
        shutil.copy(PACKAGE.parent / "_torch_promote_hooks.py", folder)

    def put(self, place: str, content: bytes | None = None) -> None:
        """Copies the running extension to a file of the package, or writes another content."""
        path = self.package / place
        path.parent.mkdir(exist_ok=True)
        if content is None:
            path.symlink_to(_C.__file__)
        else:
            path.write_bytes(content)

    def run(self, code: str, version: str = torch.__version__, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs code in a process in which PyTorch says that it has this version."""
        return self.start(code, version, **variables).wait()

    def start(self, code: str, version: str = torch.__version__, **variables: str) -> Program:
        before = f"import sys, torch\ntorch.__version__ = {version!r}\n"
        variables = {"TORCH_PROMOTE_BUILD_DIR": str(self.cache), **variables}
        env = {**environment(**variables), "PYTHONPATH": str(self.package.parent)}
        return Program(f"{before}sys.path.insert(0, {str(self.package.parent)!r})\n{code}", env=env)

    def file(self, version: str = torch.__version__) -> str:
        """Returns the file of the extension that a process has taken, relative to the package's folder."""
        code = (
            "import logging; logging.basicConfig(level=logging.DEBUG); logging.getLogger('torch').propagate = False\n"
            "import torch_promote as tp; from torch_promote import _C; assert tp._C is _C\n"
            "with tp.my_autocast('cpu'): assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16\n"
            "print(_C.__file__)"
        )
        done = self.run(code, version)
        assert done.returncode == 0, done.stderr
        assert f"DEBUG:torch_promote:torch {version}: extension {done.stdout.strip()}" in done.stderr
        return os.path.relpath(done.stdout.strip(), self.package.parent)

    def error(self, version: str = torch.__version__) -> str:
        """Returns the last line of the error of `import torch_promote`."""
        done = self.run("import torch_promote", version)
        assert done.returncode == 1, done.stderr
        return done.stderr.splitlines()[-1]


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


MINOR = building.minor_version(torch.__version__)
SHIPPED = f"_extensions/_C-torch{MINOR}{building.SUFFIX}"


#: Code: the cache's place for the running PyTorch.
CACHED = "runpy.run_path(sys.path[0] + '/torch_promote/building.py')['cached_extension'](torch.__version__)"


def test_the_extension_of_a_wheel_is_chosen_by_the_minor_version(installation: Installation) -> None:
    for minor in ("2.9", "2.10"):
        installation.put(f"_extensions/_C-torch{minor}{building.SUFFIX}", b"not an extension")
    installation.put(SHIPPED)
    assert installation.file(f"{MINOR}.7+cu199") == f"torch_promote/{SHIPPED}"


def test_what_was_compiled_for_this_torch_precedes_what_the_wheel_has(
    installation: Installation,
) -> None:
    installation.put(SHIPPED)
    cached = Path(installation.run("import runpy; print(" + CACHED + ")").stdout.strip())
    assert cached.parent == installation.cache
    installation.cache.mkdir()
    assert installation.file() == f"torch_promote/{SHIPPED}"
    cached.symlink_to(_C.__file__)
    assert installation.file() == f"cache/{cached.name}"
    # Other sources: it is stale, and nothing loads it.
    with (installation.package / "_sources" / "cast" / "cast.cpp").open("a") as source:
        source.write("// edited\n")
    assert installation.file() == f"torch_promote/{SHIPPED}"
    # So is that of another build of the same version.
    of_an_edit = "import runpy; torch.version.git_version = '1a2b3c4'; print(" + CACHED + ")"
    assert Path(installation.run(of_an_edit).stdout.strip()).name != cached.name
    # What an installation from the sources has compiled precedes both.
    installation.put(f"_C{building.SUFFIX}")
    installation.put("_built_with.json", json.dumps({"torch": torch.__version__}).encode())
    assert installation.file() == f"{PACKAGE.name}/_C{building.SUFFIX}"


UNKNOWN = ("2.10.0", "2.16.0", "2.16.0.dev20260101+cpu", f"{MINOR}.0a0+git1a2b3c4", f"{MINOR}.0rc2")


def test_an_unknown_torch_is_an_error_with_the_command_that_compiles(installation: Installation) -> None:
    for minor in ("2.8", "2.9", MINOR):
        installation.put(f"_extensions/_C-torch{minor}{building.SUFFIX}", b"not an extension")
    for version in UNKNOWN:
        assert installation.error(version) == (
            f"torch_promote.errors.ExtensionError: torch {version} is running, and torch_promote has no extension for "
            f"it: it has those for the releases of torch 2.8, 2.9, {MINOR}. `torch-promote build` compiles one for "
            f"it, which takes a C++ compiler and a few minutes, and keeps it in {installation.cache} "
            "(TORCH_PROMOTE_BUILD_DIR changes the folder)."
        )


def test_without_an_extension_the_error_says_what_there_is(installation: Installation) -> None:
    assert "has no extension for it: none has been built. `torch-promote build` compiles" in installation.error()
    installation.put(f"_C{building.SUFFIX}")
    installation.put("_built_with.json", b'{"torch": "2.10.0"}')
    assert "for it: its extension was built with torch 2.10.0. `torch-promote build`" in installation.error()


def test_an_extension_that_does_not_load_is_an_error_and_the_next_one_is_tried(installation: Installation) -> None:
    installation.put(f"_C{building.SUFFIX}", b"not an extension")
    installation.put("_built_with.json", json.dumps({"torch": torch.__version__}).encode())
    said = installation.error()
    assert f"is running, and {installation.package / f'_C{building.SUFFIX}'} does not load with it: " in said
    assert "`torch-promote build` compiles one" in said
    installation.put(SHIPPED)
    assert installation.file() == f"torch_promote/{SHIPPED}"


# torch-promote build


#: Code: nobody knows the home folder if HOME is empty.
NO_HOME = """
import os, pwd
def unknown(user): raise KeyError(user)
if not os.environ["HOME"]: pwd.getpwuid = unknown; del os.environ["HOME"]
"""
COMMAND = "sys.argv[:] = ['torch-promote', 'build']; from _torch_promote_hooks import main; sys.exit(main())"


def compiler(folder: Path, compiles: str, links: str) -> str:
    """Writes a compiler that runs one line of shell to compile a file, and another to link; $out is what it writes."""
    file = folder / "fake-c++"
    file.write_text(f"""#!/bin/sh
while [ $# -gt 0 ]; do
  case $1 in -o) out=$2; shift;; -MF) deps=$2; shift;; -shared) links=1;; esac
  shift
done
if [ -z "$out" ]; then echo 13.0.0; exit; fi
if [ "$links" ]; then {links}; exit; fi
{compiles}
echo "$out:" > "${{deps:-/dev/null}}"
""")
    file.chmod(0o755)
    return str(file)


def test_what_is_compiled_is_kept_and_used(installation: Installation, tmp_path: Path) -> None:
    """Two processes ask for it at once, and one of them compiles."""
    links = f"sleep 1; echo once >> {tmp_path / 'linked'}; cp '{_C.__file__}' $out"
    variables = {"CXX": compiler(tmp_path, "touch $out", links), "TORCH_PROMOTE_AUTOCAST": "1"}
    both = run_together([installation.start(COMMAND, **variables) for _ in range(2)])
    assert [done.returncode for done in both] == [0, 0], both
    assert (tmp_path / "linked").read_text() == "once\n"
    texts = sorted(done.stdout.split(f"torch {torch.__version__}: ")[1].split("/")[0] for done in both)
    assert texts == ["compiled ", "the cache already has "]
    assert {done.stderr.strip() for done in both} - {""} == {
        f"torch-promote: compiling the extension for torch {torch.__version__} with {variables['CXX']}: 13.0.0 (log: "
        f"{next(installation.cache.glob('*.log'))})"
    }
    assert installation.file().startswith("cache/_C-torch")
    # Only the cache was written to: the extension, its log and its lock.
    assert len(list(installation.cache.iterdir())) == 3
    assert not list(installation.package.rglob("*.so"))


def test_the_module_compiles_again_what_is_kept_and_does_not_load(installation: Installation, tmp_path: Path) -> None:
    """`python -m torch_promote` imports the package before it is the command."""

    def run(command: str) -> tuple[int, str, str]:
        env = environment(
            TORCH_PROMOTE_BUILD_DIR=str(installation.cache),
            CXX=compiler(tmp_path, "touch $out", f"cp '{_C.__file__}' $out"),
            PYTHONPATH=str(installation.package.parent),
        )
        line = [sys.executable, "-m", "torch_promote", command]
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    status, out, err = run("info")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("torch-promote: error: ")
    assert "torch_promote has no extension for it: none has been built. `torch-promote build` compiles" in err
    installation.cache.mkdir()
    cached = Path(installation.run("import runpy; print(" + CACHED + ")").stdout.strip())
    whole = Path(_C.__file__).read_bytes()
    cached.write_bytes(whole[: len(whole) // 2])  # to load it would kill the process
    assert f"and {cached} does not load with it: the file is cut off. `torch-promote build` " in installation.error()
    status, out, err = run("build")
    assert (status, out) == (0, f"torch {torch.__version__}: compiled {cached}\n"), err
    assert installation.file() == f"cache/{cached.name}"


@pytest.mark.parametrize(
    ("there", "asked", "found"),
    [
        (["c++", "clang++"], "", "c++"),
        (["clang++", "g++-12"], "", "clang++"),
        (["clang++-9", "clang++-16", "g++-12", "clang++-17.old"], "", "clang++-16"),
        (["aarch64-linux-gnu-g++-12"], "", None),
        (["c++", "clang++-16"], "clang++-16 -m64", "clang++-16 -m64"),
        (["c++"], "clang++-16 -m64", None),
    ],
)
def test_the_compiler_is_the_one_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: list[str], asked: str, found: str | None
) -> None:
    for name in there:
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/nowhere")
    monkeypatch.setenv("CXX", asked)
    assert building.find_compiler() == found


#: What prevents a compilation: variables of the environment, the compiler's line, and texts of the error.
FAILURES = {
    "no compiler": ({"CXX": "", "PATH": "/nowhere"}, "", ["there is no C++ compiler: c++, g++, clang++ not found on"]),
    "another compiler": ({"CXX": "gone-c++ -m64"}, "", ["CXX=gone-c++ -m64 not found on PATH."]),
    "a folder that is a file": (
        {"TORCH_PROMOTE_BUILD_DIR": "/dev/null/cache"},
        "",
        ["/dev/null/cache: Not a directory. The extension is kept in /dev/null/cache. Set TORCH_PROMOTE_BUILD_DIR to"],
    ),
    "a source that does not compile": (
        {},
        "echo \"op.h:7: error: 'Gone' is not a member of 'c10'\"; exit 1",
        ["(exit status 1):\n", "  op.h:7: error: 'Gone' is not a member of 'c10'\n", "The log is /", ".so.log."],
    ),
    "an extension that does not load": (
        {},
        "touch $out",
        ["compiled, but does not load with torch", "file too short. The log is /", "cache is on a file system without"],
    ),
    "no home": (
        {"TORCH_PROMOTE_BUILD_DIR": "", "XDG_CACHE_HOME": "", "HOME": ""},
        "",
        ["error: this user has no home folder in which the extension could be kept. Set TORCH_PROMOTE_BUILD_DIR to a"],
    ),
}


@pytest.mark.parametrize(("variables", "compiles", "texts"), FAILURES.values(), ids=FAILURES)
def test_a_failure_says_why_and_leaves_no_extension(
    installation: Installation, tmp_path: Path, variables: dict[str, str], compiles: str, texts: list[str]
) -> None:
    done = installation.run(NO_HOME + COMMAND, **{"CXX": compiler(tmp_path, compiles, "touch $out"), **variables})
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "torch-promote: error: " in done.stderr
    assert "Traceback" not in done.stderr.partition("torch-promote: error: ")[2].partition("\n")[0]
    assert [text for text in texts if text not in done.stderr] == []
    assert not list(installation.cache.glob("*.so"))


#: Code after which the package cannot be imported, and what its error says.
BROKEN = {
    "a kernel on our key": (
        "library = torch.library.Library('aten', 'IMPL'); library.impl('mm', lambda a, b: a, 'AutocastPrivateUse1')",
        "the dispatch key AutocastPrivateUse1 already has kernels",
    ),
    "a fallback on our key": (
        "library = torch.library.Library('_', 'IMPL')\n"
        "library.fallback(torch.library.fallthrough_kernel, 'AutocastPrivateUse1')",
        "the dispatch key AutocastPrivateUse1 already has kernels",
    ),
    "deleted from the modules": (
        "import torch_promote\n"
        "for name in [name for name in sys.modules if name.startswith('torch_promote')]: del sys.modules[name]",
        "importlib.reload(torch_promote) works",
    ),
    "all but the extension deleted from the modules": (
        "import torch_promote; kept = sys.modules['torch_promote._C']\n"
        "for name in [name for name in sys.modules if name.startswith('torch_promote')]: del sys.modules[name]\n"
        "sys.modules['torch_promote._C'] = kept",
        "importlib.reload(torch_promote) works",
    ),
}


@pytest.mark.parametrize(("before", "text"), BROKEN.values(), ids=BROKEN)
def test_an_import_that_fails_says_why(before: str, text: str) -> None:
    done = run_python(f"import sys, torch\n{before}\nimport torch_promote", finalize=True)
    assert done.returncode == 1
    assert text in done.stderr
    assert ".ExtensionError: " in done.stderr


def run(code: str, **variables: str) -> str:
    before = "import importlib, sys, warnings, torch\nwarnings.simplefilter('error', RuntimeWarning)\n"
    done = run_python(before + code, env=environment(**variables), finalize=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


REGISTERED = """
def registered():
    return (
        len(sys.meta_path),
        len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks),
        len(torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS),
        torch.fx.Tracer.trace,
        __import__("asyncio").Handle._run,
    )
"""


def test_reloaded() -> None:
    """Nothing is registered twice, and a default that was set since is kept."""
    code = f"""
import torch_promote as tp
{REGISTERED}
assert str(tp.default_policy()) == "Policy.named('cuda')"
tp.set_default_policy(None)
before = registered()
assert importlib.reload(tp) is tp
assert registered() == before
assert tp.default_policy() is None
with tp.my_autocast("cpu"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
"""
    run(code, TORCH_PROMOTE_POLICY="cuda")


def test_imported_after_an_import_that_failed() -> None:
    code = f"""
import os
for _ in range(2):
    try:
        import torch_promote
    except ValueError as error:
        assert "TORCH_PROMOTE_POLICY" in str(error)
    else:
        raise AssertionError("it was imported")
{REGISTERED}
before = registered()
del os.environ["TORCH_PROMOTE_POLICY"]
import torch_promote as tp
assert registered() == before
with tp.my_autocast("cpu"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
"""
    run(code, TORCH_PROMOTE_POLICY="no policy")


# The linker compares names and parameters, but not return types, so each declaration is compared with PyTorch's header.

#: The headers of PyTorch that declare them.
HEADERS = ("ATen/autocast_mode.h", "ATen/CachedTensorUtils.h", "torch/csrc/jit/python/pybind_utils.h")
DECLARATION = re.compile(r"\bTORCH_(?:PYTHON_)?API\s+([\w:]+)\s+(\w+)\(([^()]*)\);")


def declarations(text: str) -> set[str]:
    """Returns the functions that a text declares, without namespaces, names of parameters and defaults."""
    return {f"{plain(result)} {name}({types(parameters)})" for result, name, parameters in DECLARATION.findall(text)}


def types(parameters: str) -> str:
    without_defaults = re.sub(r"=[^,]*", "", parameters)
    return ", ".join(plain(re.sub(r"(?<=[\w&>]) +\w+ *$", "", one.strip())) for one in without_defaults.split(","))


def plain(type_name: str) -> str:
    return re.sub(r"\b(?:at|c10|std|torch::jit)::", "", " ".join(type_name.split()))


def test_each_declaration_is_pytorchs() -> None:
    roots = [Path(path) for path in include_paths()]
    files = [next(root / header for root in roots if (root / header).exists()) for header in HEADERS]
    ours, pytorchs = (
        set().union(*(declarations(path.read_text(encoding="utf-8")) for path in paths))
        for paths in (CSRC.rglob("*.*"), files)
    )
    assert len(ours) >= 10
    assert ours <= pytorchs
