"""Writes the autocast policies of PyTorch versions, `torch_promote/policy/torch_versions.toml`, from installations.

    python tools/torch_policies.py              # installs each version, measures it, and deletes it: 10 GB, 20 minutes
    python tools/torch_policies.py --measure    # prints the policies of the PyTorch that runs this, as JSON

A policy is measured, not read: a kernel below autocast, for each op that has a kernel on an autocast key, records the
dtypes that arrive there. So no op computes anything, and any arguments of the schema's types will do. Tensors are fake,
which needs no device. Only `--measure` runs in the other versions: it imports nothing but PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "torch_promote" / "policy" / "torch_versions.toml"
#: Stock's wrapper of this op flattens weights, and only builds for CUDA have it. The op table leaves it to stock.
LEFT_TO_STOCK = ("aten::_cudnn_rnn",)
#: The releases. Later ones of the same minor version have the same policies.
VERSIONS = [f"2.{minor}.0" for minor in range(8, 16)]
KEYS = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}
LOWER, FP32 = torch.bfloat16, torch.float32
#: The dtypes of a call's tensors, in turn.
CALLS = ((LOWER,), (FP32,), (LOWER, FP32), (FP32, LOWER))
HEADER = """\
# The autocast policies of PyTorch's versions, where these differ. `make torch-policies` writes this file.
#
# Ops with the same policy in every version are in op_policies.def. An entry is an op's policy from a version on: with
# {"2.8" = "fallthrough", "2.12" = "fp32"}, 2.11 does nothing, and 2.12 and later run it in float32. `fallthrough` also
# says that a version has no such op.
"""


# --- measuring the PyTorch that runs this


class ReachedError(Exception):
    """A call has reached the kernel below autocast."""


@contextlib.contextmanager
def stock_region(device_type: str) -> Iterator[None]:
    """Stock's autocast, on where `torch.autocast` would find no device."""
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, LOWER)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, False)


def measure(device_type: str, ops: Any = None, region: Any = stock_region) -> dict[str, str]:
    """Returns the policy of each op in a region, by default of the ops on which stock's autocast acts."""
    FakeTensorMode()  # imports modules that call ops
    every = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    if ops is None:
        has_kernel, key = torch._C._dispatch_has_kernel_for_dispatch_key, f"Autocast{KEYS[device_type]}"
        ops = [name for name in sorted(every) if name not in LEFT_TO_STOCK and has_kernel(name, key)]
    seen: list[tuple[str, list[torch.dtype], object]] = []

    def record(name: str, *args: Any, **kwargs: Any) -> None:
        values = [*args, *kwargs.values()]
        parts = [part for value in values for part in (value if isinstance(value, (list, tuple)) else [value])]
        given = dict(zip((one.name for one in schema_of(name).arguments), args)) | kwargs  # noqa: B905
        dtypes = [part.dtype for part in parts if isinstance(part, torch.Tensor) and part.dtype.is_floating_point]
        seen.append((name, dtypes, given.get("dtype")))
        raise ReachedError

    def reached(op: str, dtypes: tuple[torch.dtype, ...]) -> tuple[str, list[torch.dtype], object]:
        made = iter(range(100))

        def make() -> torch.Tensor:
            return torch.empty((2, 2), dtype=dtypes[next(made) % len(dtypes)], device=device_type)

        seen.clear()
        with FakeTensorMode():
            arguments = schema_of(op).arguments
            args = [value(one.type, make) for one in arguments if not one.kwarg_only]
            kwargs = {one.name: value(one.type, make) for one in arguments if one.kwarg_only}
            name, _, overload = op.removeprefix("aten::").partition(".")
            with region(device_type), contextlib.suppress(ReachedError):
                getattr(getattr(torch.ops.aten, name), overload or "default")(*args, **kwargs)
        return seen[0]

    library = torch.library.Library("aten", "IMPL")
    names = {op.partition(".")[0] for op in ops}
    for name in every:
        if name.partition(".")[0] in names:
            library.impl(name.removeprefix("aten::"), functools.partial(record, name), f"Autograd{KEYS[device_type]}")
    policies = {op: policy_of(op, functools.partial(reached, op)) for op in ops}
    library._destroy()
    key = getattr(torch._C.DispatchKey, f"Autocast{KEYS[device_type]}")
    if key in flex_attention.py_kernels and region is stock_region:
        policies["aten::flex_attention"] = policy_of("", functools.partial(reached_flex, key, device_type))
    return policies


def reached_flex(key: Any, device_type: str, dtypes: tuple[torch.dtype, ...]) -> tuple[str, list[torch.dtype], object]:
    """The same for `flex_attention`, which is not in the dispatcher: its kernel calls the op again."""
    kernel = flex_attention.py_kernels[key]
    below = mock.patch.dict(kernel.__globals__, flex_attention=lambda *args: args)
    with FakeTensorMode(), below, stock_region(device_type):
        tensors = [torch.empty((2, 2), dtype=(dtypes * 3)[each], device=device_type) for each in range(3)]
        args = kernel(*tensors, None, (), 1.0, {})
    return "", [arg.dtype for arg in args[:3]], None


def schema_of(op: str) -> Any:
    name, _, overload = op.partition(".")
    return torch._C._get_schema(name, overload)


def value(kind: Any, make: Any) -> Any:
    """An argument of a schema's type. Optional ones are only given if they are tensors."""
    text = str(kind)
    if text.startswith("Optional["):
        return value(kind.getElementType(), make) if "Tensor" in text else None
    if text == "Tensor":
        return make()
    if text.startswith("List["):
        return [value(kind.getElementType(), make) for _ in range(2)]
    # A str may be the name of a dimension.
    return {"int": 1, "number": 1, "float": 1.0, "bool": False, "str": "dimname::x", "Generator": None}[text]


def policy_of(op: str, reached: Any) -> str:
    """The policy that explains what reaches an op in each of the calls."""
    try:
        (name, lower, dtype), (_, fp32, _), *mixed = [reached(dtypes) for dtypes in CALLS]
    except RuntimeError as error:
        if "unsafe" in str(error):
            return "banned"
        raise
    if dtype is FP32 and set(lower) == {LOWER}:
        return "fp32_set_opt_dtype" if name == op else "fp32_append_dtype"
    if {LOWER} == {*lower, *fp32}:
        return "lower_precision_fp"
    if {FP32} == {*lower, *fp32}:
        return "fp32"
    if ({LOWER}, {FP32}) == (set(lower), set(fp32)):
        # Tensors of indices are not cast.
        ends = {each for _, dtypes, _ in mixed for each in (dtypes[0], dtypes[-1])}
        return "promote" if ends == {FP32} else "fallthrough"
    raise RuntimeError(f"no policy explains what reaches {op}: {lower}, {fp32}")


# --- measuring installations, and the file


def measured_in(version: str, environments: str | None) -> dict[str, Any]:
    """Returns what `--measure` prints under a version of PyTorch."""
    with tempfile.TemporaryDirectory() if environments is None else contextlib.nullcontext(environments) as folder:
        python = Path(folder, version, "bin", "python")
        if not python.exists():
            print(f"installing torch {version}", file=sys.stderr)
            venv.create(Path(folder, version), with_pip=True)
            options = ["--quiet", "--no-cache-dir", "--no-compile"]
            subprocess.run([python, "-m", "pip", "install", *options, f"torch=={version}"], check=True)
        command = [python, "-W", "ignore", __file__, "--measure"]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def text_of(measured: dict[str, dict[str, Any]]) -> str:
    """Returns the content of the file, from what each version measured, in the order of the versions."""
    lines = [HEADER, "[measured]"]
    lines += [f'"{minor}" = "{policies["torch"]}"' for minor, policies in measured.items()]
    for device_type in KEYS:
        lines += ["", f"[{device_type}]"]
        for op in sorted(set().union(*(policies[device_type] for policies in measured.values()))):
            history: dict[str, str] = {}
            for minor, policies in measured.items():
                policy = policies[device_type].get(op, "fallthrough")
                if policy != next(reversed(history.values()), None):
                    history[minor] = policy
            if len(history) > 1:
                entries = ", ".join(f'"{minor}" = "{policy}"' for minor, policy in history.items())
                lines.append(f'"{op}" = {{ {entries} }}')
    return "\n".join(lines) + "\n"


def main() -> None:
    summary, _, details = str(__doc__).partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="print the policies of the running PyTorch")
    parser.add_argument("--environments", metavar="DIR", help="keep an environment for each version in this folder")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps({"torch": torch.__version__, **{name: measure(name) for name in KEYS}}))
        return
    measured = {version.rpartition(".")[0]: measured_in(version, options.environments) for version in VERSIONS}
    FILE.write_text(text_of(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
