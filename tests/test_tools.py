"""The programs in tools/ start: each explains itself, rejects an unknown option, and two of them run in small."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import cpus
import cuda_stand_in
from helpers.subprocesses import environment, run_python
from torch_promote import building

TOOLS = Path(__file__).parents[1] / "tools"
PROGRAMS = sorted(path.parent.name for path in TOOLS.glob("*/__main__.py") if path.parent.name != "cuda_stand_in")


def run(tool: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOLS / tool), *arguments],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def program(tool: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The same in a fork. With this variable, tools/soak does not start Python anew."""
    code = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    return run_python(code, str(TOOLS / tool), *arguments, env=environment(MALLOC_ARENA_MAX="1", **variables))


@pytest.mark.parametrize("tool", PROGRAMS)
def test_each_program_explains_itself_and_rejects_an_unknown_option(tool: str) -> None:
    helped = program(tool, "--help")
    assert helped.returncode == 0, helped.stderr
    assert "usage:" in helped.stdout
    rejected = program(tool, "--no-such-option")
    assert (rejected.returncode, rejected.stdout) == (2, "")
    assert "--no-such-option" in rejected.stderr


def test_without_a_gpu_make_gpu_says_what_to_do() -> None:
    done = program("gpu", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert "finds no GPU: it is" in done.stderr
    assert "make gpu ARGS='--device cuda-stand-in'" in done.stderr


@pytest.mark.parametrize("run", [program, pytest.param(run, marks=pytest.mark.slow)])
def test_growth_is_measured(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run("soak", "--iterations", "40", "--only", "overrides", "--json")
    assert done.returncode in (0, 1), done.stderr  # 1: too few iterations to tell
    assert json.loads(done.stdout)


def test_what_a_cpu_lacks_is_said_and_not_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpus, "flags", lambda: {"sse4_1", "avx2", "fma"})
    monkeypatch.setattr(cpus, "without_effect", lambda setting, _: "2" if setting is cpus.SETTINGS["sse41"] else None)
    monkeypatch.setattr(cpus, "run", lambda *_: (1, Counter(passed=1, failed=2)))
    monkeypatch.setattr(sys, "argv", ["cpus.py", "--only=amx"])
    assert cpus.main() == 0
    assert "amx: not run: this CPU has no avx512f, avx512bw" in capsys.readouterr().out
    for name, result in (("sse41", "no effect"), ("avx2", "failed")):
        monkeypatch.setattr(sys, "argv", ["cpus.py", f"--only={name}"])
        assert cpus.main() == 1
        assert f"{name}: {result}" in capsys.readouterr().out


@pytest.mark.slow
def test_make_gpu_on_the_stand_in(tmp_path: Path) -> None:
    if reason := cuda_stand_in.why_not():
        pytest.skip(reason)
    chosen = [f"--step={name}" for name in ("cuda_captured_steps", "parity", "bench")]
    done = run("gpu", "--device", "cuda-stand-in", "--tiny", "--no-build", "--out", os.fspath(tmp_path), *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| models: MLP, forward | 81 | 81 | " in text  # as many kernels as stock
    assert "| 0 failed" not in text


def test_an_extension_of_a_wheel_needs_no_newer_glibc_than_pytorch(tmp_path: Path) -> None:
    """What the extension uses of newer versions: `std::call_once`, `try_lock` and the counts of `std::shared_ptr`."""
    (tmp_path / "some code.cpp").write_text("""
#include <memory>
#include <mutex>
std::once_flag flag;
std::mutex mutex;
int run(std::shared_ptr<int> value) {
  std::call_once(flag, [] {});
  if (mutex.try_lock()) mutex.unlock();
  auto copy = value;
  return *copy;
}
""")
    compiler = building.find_compiler()
    assert compiler is not None
    library = str(tmp_path / "library.so")
    flags = [
        "-std=c++20",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-include",
        str(TOOLS / "wheel" / "glibc.h"),
    ]
    subprocess.run([*shlex.split(compiler), *flags, str(tmp_path / "some code.cpp"), "-o", library], check=True)
    command = ["readelf", "--dyn-syms", "--wide", library]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = [(int(major), int(minor)) for major, minor in re.findall(r"\w@GLIBC_(\d+)\.(\d+)", symbols)]
    assert "pthread_once@GLIBC_" in symbols
    assert max(versions) <= (2, 28)
