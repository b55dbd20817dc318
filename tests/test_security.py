"""SECURITY.md: files from others choose dtypes and fill reports. They run and import nothing, and open no file."""

from __future__ import annotations

import gzip
import stat
import tempfile
from pathlib import Path

import pytest
import torch

import torch_promote as tp
from helpers.subprocesses import output_of

#: Reads a harmless file first, after which nothing is left to import, and then one that names everything it can.
PROGRAM = """
import sys, torch, torch_promote as tp
from torch_promote.numerics.tuning import Tuning
from torch_promote.reading.trace_report import TraceReport
load = {"policy": tp.Policy.load, "trace": TraceReport.load}[sys.argv[1]]
print(load(sys.argv[2]))
seen = []
def audit(event, args):
    if event == "open" and isinstance(args[0], str) or event.split(".")[0] in (
        "exec", "compile", "import", "marshal", "os", "pickle", "shutil", "socket", "subprocess", "urllib", "ctypes"
    ):
        seen.append((event, str(args[0])))
sys.addaudithook(audit)
try:
    loaded = load(sys.argv[3])
except ValueError as error:
    loaded = error
print(repr(loaded)); str(loaded)
seen = [(event, name) for event, name in seen if (event, name) != ("open", sys.argv[3])]
assert not seen, seen
"""

FILE = """\
format = 1
[all]
"aten::mm.default" = "fp32"
{key} = {value}
"""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ('"os::system.default"', '"fp32"'),
        ('"mylib::antigravity"', '"fp32"'),
        ('"aten::exp"', '"os.system"'),
        ('"aten::exp"', "\"__import__('antigravity')\""),
        ('"aten::exp"', '"other.toml"'),
        ('"aten::exp"', '"file:///etc/passwd"'),
        ('"*"', '"fp32"'),
    ],
)
def test_a_policy_file_runs_and_opens_nothing(tmp_path: Path, key: str, value: str) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(FILE.format(key='"aten::exp"', value='"fp32"'))
    bad.write_text(FILE.format(key=key, value=value))
    assert output_of(PROGRAM, "policy", str(good), str(bad))


@pytest.mark.parametrize(
    "text", ["os.system", "<script>alert(1)</script>", "cos\\nsystem\\n(S'true'\\ntR.", "file:///x"]
)
def test_a_recording_runs_and_opens_nothing(tmp_path: Path, text: str) -> None:
    good, bad = tmp_path / "good.jsonl.gz", tmp_path / "bad.jsonl.gz"
    with tp.trace(record=good), tp.my_autocast("cpu"):
        torch.ones(2, 2) @ torch.ones(2, 2)
    data = gzip.decompress(good.read_bytes())
    changed = data.replace(b"aten::m", text.encode())
    assert changed != data
    bad.write_bytes(gzip.compress(changed))
    assert output_of(PROGRAM, "trace", str(good), str(bad))


def test_folders_of_records_are_private() -> None:
    with tempfile.TemporaryDirectory(prefix="torch-promote-") as folder:
        assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o700
    package = Path(tp.__file__).parent
    reading = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in ("pickle.load", "torch.load(", "Unpickler"))
    }
    assert not reading  # one would change SECURITY.md
