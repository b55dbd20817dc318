"""TORCH_PROMOTE_AUTOCAST: `import torch` installs this package, or warns once and changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from helpers.autoloading import entry_point, variables
from helpers.subprocesses import output_of

__all__ = ["entry_point"]  # a fixture

#: Prints whether the package is imported, the dtypes of a product and of exp under torch.autocast, what is installed.
PROGRAM = """
import sys, torch
with torch.autocast("cpu"):
    product, exp = torch.ones(2, 2) @ torch.ones(2, 2), torch.exp(torch.ones(2, dtype=torch.float16))
print("torch_promote" in sys.modules, product.dtype, exp.dtype)
if "torch_promote" in sys.modules:
    import torch_promote as tp
    print(tp.installed(), tp.default_policy())
"""
STOCK = ["False torch.bfloat16 torch.float16"]


def run(folder: Path, command: list[str], **more: str) -> tuple[int, str, list[str]]:
    """The status, errors and lines of a Python process, which finds the entry point in a folder."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=variables(folder, **more),
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stderr, done.stdout.splitlines()


def test_nothing_is_imported_unless_asked_for(entry_point: Path) -> None:
    asked = {"TORCH_PROMOTE_POLICY": "nonsense", "TORCH_PROMOTE_CACHE": "nonsense"}
    for more in ({}, {"TORCH_PROMOTE_AUTOCAST": "0"}):
        assert run(entry_point, ["-c", PROGRAM], **asked, **more) == (0, "", STOCK)


def test_the_environment_installs(entry_point: Path) -> None:
    asked = {
        "TORCH_PROMOTE_POLICY": "cuda",
        "TORCH_PROMOTE_CACHE": "all",
        "TORCH_PROMOTE_OVERRIDES": " matmul=fp32, relu=float64,",
    }
    found = run(entry_point, ["-W", "error", "-c", PROGRAM], TORCH_PROMOTE_AUTOCAST="1", **asked)
    installed = "<torch_promote.install(overrides={'matmul': 'fp32', 'relu': 'float64'}, cache='all')>"
    assert found == (0, "", ["True torch.float32 torch.float32", f"{installed} Policy.named('cuda')"])


# --- whatever goes wrong is one warning


#: The last lines of warnings.
WRONG_VARIABLES = [
    ({"TORCH_PROMOTE_AUTOCAST": "yes"}, "TORCH_PROMOTE_AUTOCAST is 'yes'. Legal: 1 (torch_promote runs the regions of"),
    ({"TORCH_PROMOTE_POLICY": "cudda"}, "TORCH_PROMOTE_POLICY is 'cudda': no policy is called 'cudda'. Closest: cuda."),
    ({"TORCH_PROMOTE_POLICY": "no/such.toml"}, "no/such.toml"),
    ({"TORCH_PROMOTE_CACHE": "al"}, "TORCH_PROMOTE_CACHE is 'al': cache says which casts are reused"),
    ({"TORCH_PROMOTE_OVERRIDES": "sofmax=fp32"}, "TORCH_PROMOTE_OVERRIDES is 'sofmax=fp32': no op is called 'sofmax'"),
    ({"TORCH_PROMOTE_OVERRIDES": "softmax"}, "'softmax' is not an override. Write OP=POLICY, as in softmax=fp32."),
]
#: Calls the entry point under each of many environments, and prints the warnings.
MANY = """
import json, os, sys, warnings, torch, _torch_promote_hooks
for variables in json.loads(sys.argv[1]):
    os.environ.update({"TORCH_PROMOTE_AUTOCAST": "1"} | variables)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _torch_promote_hooks.autoload()
    with torch.autocast("cpu"):
        exp = torch.exp(torch.ones(2, dtype=torch.float16)).dtype
    print(json.dumps([str(exp), *(f"{one.category.__name__}: {one.message}" for one in caught)]))
    for name in variables:
        del os.environ[name]
"""


def test_a_wrong_variable_is_one_warning(entry_point: Path) -> None:
    asked = json.dumps([asked for asked, _ in WRONG_VARIABLES])
    output = output_of(MANY, asked, env=variables(entry_point), cwd=entry_point)
    for (_, reason), line in zip(WRONG_VARIABLES, output.splitlines(), strict=True):
        exp, text = json.loads(line)
        assert exp == "torch.float16"
        assert text.startswith("RuntimeWarning: torch_promote is not in use, and torch.autocast stays PyTorch's. ")
        assert reason in text
