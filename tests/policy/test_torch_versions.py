"""The policies of PyTorch's versions: their data compared with the running PyTorch, and what regions do under them.

`tools/torch_policies.py` measures policies by what reaches the kernels below autocast. It replaces these kernels, so it
runs in processes of its own.
"""

from __future__ import annotations

import functools
import itertools
import json
import tomllib
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_policies
import torch_promote as tp
from helpers.command_line import Capture, error_of, terminal_of_80_columns, wide
from helpers.program_defaults import as_it_was
from helpers.subprocesses import output_of
from torch_promote.cli.program import main
from torch_promote.policy import named_policies
from torch_promote.policy.named_policies import left_out
from torch_promote.policy.op_table import DEVICE_TYPES, op_table, schema_of
from torch_promote.policy.policy import Policy
from torch_promote.regions.defaults import use_environment

__all__ = ["as_it_was", "terminal_of_80_columns", "wide"]  # fixtures

DATA = tomllib.loads(torch_policies.FILE.read_text(encoding="utf-8"))
VERSIONS = list(DATA["measured"])
RUNNING = ".".join(torch.__version__.split(".")[:2])
NAMES = [f"torch-{version}" for version in VERSIONS]


def number(version: str) -> int:
    return VERSIONS.index(version)


@functools.cache
def policies_in(version: str, device: str) -> dict[str, str]:
    """The policy of each op that a version's autocast acts on: the op table, with what differs between versions."""
    policies = {row.name: row.policy(device).value for row in op_table()}
    for op, history in DATA[device].items():
        policies[op] = [policy for since, policy in history.items() if number(since) <= number(version)][-1]
    return {op: policy for op, policy in policies.items() if policy != "fallthrough"}


# --- the data


@pytest.mark.parametrize("device", DEVICE_TYPES)
def test_the_data_is_what_the_running_pytorch_does(device: str) -> None:
    code = "import json, sys, torch_policies; print(json.dumps(torch_policies.measure(sys.argv[1])))"
    measured = json.loads(output_of(code, device, compiler=True, quiet=True))
    assert measured == policies_in(RUNNING, device), "run `make torch-policies`, and change op_policies.def if need be"


def test_each_version_has_a_name_and_a_meaning() -> None:
    assert sorted(name for name in Policy.names() if name.startswith("torch-")) == sorted(NAMES)
    assert [version.rpartition(".")[0] for version in torch_policies.VERSIONS] == VERSIONS
    assert torch_policies.FILE.read_text(encoding="utf-8").startswith(torch_policies.HEADER)


def test_the_file_says_from_which_version_on_an_op_has_a_policy() -> None:
    measured = {
        "2.8": {"torch": "2.8.0", "cpu": {"aten::a": "fp32", "aten::b": "promote"}},
        "2.9": {"torch": "2.9.0+cu", "cpu": {"aten::a": "fp32"}},
        "2.10": {"torch": "2.10.0", "cpu": {"aten::a": "fp32", "aten::b": "promote", "aten::c": "fp32"}},
    }
    none: dict[str, object] = {device: {} for device in torch_policies.KEYS}
    data = tomllib.loads(torch_policies.text_of({minor: none | policies for minor, policies in measured.items()}))
    assert data["measured"] == {"2.8": "2.8.0", "2.9": "2.9.0+cu", "2.10": "2.10.0"}
    assert data["cpu"] == {
        "aten::b": {"2.8": "promote", "2.9": "fallthrough", "2.10": "promote"},
        "aten::c": {"2.8": "fallthrough", "2.10": "fp32"},
    }
    assert data["cuda"] == {}


# --- regions under them


@pytest.mark.parametrize(
    "device", ["cpu", "cuda", *(pytest.param(device, marks=pytest.mark.slow) for device in DEVICE_TYPES[2:])]
)
def test_a_region_does_what_the_version_does(device: str) -> None:
    """Every op that a version's autocast, or the running one's, acts on, measured in regions of ours."""
    ops = {op for version in VERSIONS for op in policies_in(version, device)}
    ops = {op for op in ops if schema_of(op) is not None}
    code = """
        import functools, json, sys, torch, torch_policies, torch_promote as tp
        from torch_promote.parity.model import pretend_cuda
        device, names, ops = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
        region = lambda policy: lambda device: tp.my_autocast(device, dtype=torch.bfloat16, policy=policy)
        measured = functools.cache(lambda policy: torch_policies.measure(device, ops, region(policy)))
        with pretend_cuda():  # several names are equal policies
            print(json.dumps({name: measured(tp.Policy.named(name)) for name in names}))
    """
    measured = json.loads(output_of(code, device, *map(json.dumps, (NAMES, sorted(ops))), compiler=True, quiet=True))
    for version in VERSIONS:
        expected = {op: policies_in(version, device).get(op, "fallthrough") for op in ops}
        assert measured[f"torch-{version}"] == expected, version


@pytest.mark.parametrize("name", NAMES)
def test_the_entries_are_legal_and_without_ops_that_are_not_there(name: str, tmp_path: Path) -> None:
    policy, path = Policy.named(name), tmp_path / "saved.toml"
    assert Policy.named(f"torch-{RUNNING}") == Policy.stock()
    policy.save(path)
    assert Policy.load(path) == policy
    there = {(op, device) for op, device, _ in policy.changes}
    differing = {
        (op, device)
        for device in DEVICE_TYPES
        for op in DATA[device]
        if policies_in(name.removeprefix("torch-"), device).get(op) != policies_in(RUNNING, device).get(op)
    }
    assert there == {place for place in differing if schema_of(place[0]) is not None}
    assert {(op, device) for op, device, _ in left_out(name)} == differing - there
    assert "torch-" not in repr(policy), "an override of rms_norm alone would be called torch-2.8"


def rms_norm(opened: AbstractContextManager[object]) -> torch.dtype:
    """The dtype of rms_norm on CUDA for an input in bfloat16."""
    with FakeTensorMode(), opened:
        return nn.functional.rms_norm(torch.empty(4, dtype=torch.bfloat16, device="cuda"), (4,)).dtype


@pytest.mark.usefixtures("pretend_cuda", "as_it_was")
def test_rms_norm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = {"torch-2.11": torch.bfloat16, "torch-2.12": torch.float32}
    for name, dtype in dtypes.items():
        assert rms_norm(tp.my_autocast("cuda", dtype=torch.bfloat16, policy=name)) is dtype
        monkeypatch.setenv("TORCH_PROMOTE_POLICY", name)
        use_environment()
        assert rms_norm(tp.my_autocast("cuda", dtype=torch.bfloat16)) is dtype
        with tp.install(policy=name):
            assert rms_norm(torch.autocast("cuda", dtype=torch.bfloat16)) is dtype


# --- names


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("torch2.11", "torch-2.11"),
        ("PyTorch 2.11.0+cu130", "torch-2.11"),
        ("v2.9", "torch-2.9"),
        ("torhc-2.11", "torch-2.11"),
        ("torch-2.7", ""),
        ("torch-2.16", ""),
    ],
)
def test_misspelt_names(name: str, closest: str) -> None:
    hint = f" Closest: {closest}." if closest else ""
    legal = "Legal: stock, cpu, cuda, xpu, mps, fp32_safe, fp32, off, torch-2.8 to torch-2.15"
    with pytest.raises(tp.errors.PolicyError) as error:
        Policy.of(name)
    assert str(error.value).startswith(f"no policy is called {name!r}.{hint} {legal}, or the path")


# --- torch-promote policies


def shown(capsys: Capture, *arguments: str, status: int = 0) -> str:
    assert main(["policies", *arguments]) == status
    return capsys.readouterr().out.replace(torch.__version__, "VERSION")


@pytest.mark.usefixtures("wide")
def test_two_versions_and_a_file(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Policy.stock().override({"rms_norm": "keep"}, "cuda").save("mine.toml")
    only = ("--device", "cuda", "--op", "rms_norm")
    assert_expected_inline(
        shown(capsys, "--diff", "torch-2.11", "torch-2.12", *only, status=1),
        """\
op        devices  torch-2.11   torch-2.12
rms_norm  cuda     fallthrough  fp32

torch-2.11 compared with torch-2.12. differences: 1, ops: 1.
""",
    )
    policies = {"torch-2.11": "fallthrough", "mine.toml": "keep"}
    for first, second in itertools.permutations(policies):
        row = shown(capsys, "--diff", first, second, *only, status=1).splitlines()[1]
        assert row.split() == ["rms_norm", "cuda", policies[first], policies[second]]
    assert shown(capsys, "--diff", "torch-2.11", "torch-2.8", *only).endswith("differences: 0, ops: 0.\n")
    for name in ("torch2.9", "2.9"):
        assert "Closest: torch-2.9. Legal: stock" in error_of(capsys, "policies", "--diff", "stock", name)
    assert "Closest: mine.toml. Policies that" in error_of(capsys, "policies", "--diff", "./mien.toml", "torch-2.11")


@pytest.mark.usefixtures("wide")
def test_ops_that_are_left_out_are_listed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    there = named_policies.schema_of
    monkeypatch.setattr(named_policies, "schema_of", lambda op: None if op == "aten::rms_norm" else there(op))
    name = "torch-2.11" if RUNNING != "2.11" else "torch-2.12"
    entry = {"op": "aten::rms_norm", "device": "cuda", "policy": "fallthrough" if RUNNING != "2.11" else "fp32"}
    for arguments in (["--policy", name], ["--diff", "stock", name]):
        only, status = ["--op", "rms_norm", "--device", "cuda"], int("--diff" in arguments)
        assert json.loads(shown(capsys, *arguments, *only, "--json", status=status))["left_out"] == {name: [entry]}
        line = f"left out of {name}, because torch VERSION has no such op: rms_norm\n"
        assert line in shown(capsys, *arguments, *only, status=status)
