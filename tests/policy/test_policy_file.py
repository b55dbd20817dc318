"""Policy files: their content, round trips, and atomic saves."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from helpers.library_for_policies import NAMESPACE
from helpers.policies import MINE, POLICIES, TEXT, TORCH, path
from torch_promote import CastPolicy, PolicyError
from torch_promote.policy.op_table import TABLE_VERSION
from torch_promote.policy.policy import Policy

__all__ = ["path"]  # fixture

FP64 = torch.float64


# --- what is written, and comes back


def test_a_file_has_a_line_for_each_op(path: Path) -> None:
    MINE.save(path)
    assert path.read_text(encoding="utf-8") == TEXT
    assert Policy.load(path) == MINE


def test_as_a_dict_it_has_the_same_structure() -> None:
    assert MINE.to_dict() == {
        "format": 1,
        "torch": TORCH,
        "table": TABLE_VERSION,
        "all": {
            "aten::mm.default": "fp32",
            "aten::softmax.int": "lower_precision_fp",
            "policy_tests::many.out": "match_self",
        },
        "cpu": {"aten::add_.Tensor": "match_self", "aten::exp.default": "float64"},
    }
    assert Policy.stock().to_dict() == {"format": 1, "torch": TORCH, "table": TABLE_VERSION}


@pytest.mark.parametrize("name", Policy.names())
def test_named_policies_come_back(path: Path, name: str) -> None:
    Policy.named(name).save(path)
    assert Policy.load(path) == Policy.named(name)
    again = path.read_bytes()
    Policy.load(path).save(path)
    assert path.read_bytes() == again


@given(POLICIES)
@settings(max_examples=50, deadline=None)
def test_any_policy_comes_back(tmp_path_factory: pytest.TempPathFactory, policy: Policy) -> None:
    path = tmp_path_factory.mktemp("policies") / "p.toml"
    policy.save(path)
    assert Policy.load(path) == policy
    sections = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith('"')]
    assert len(sections) <= len(policy.changes), "no op is named twice for a device"


def test_what_a_person_writes(path: Path) -> None:
    path.write_text(
        "format = 1\n\n[cpu]\nsoftmax = 'fp16' # a comment\n'mm.default' = \"torch.float64\"\n[cuda]\n"
        '"linalg_*" = "fp32"\n[all]\n"policy_tests::many" = "match_self"\n',
        encoding="utf-8",
    )
    by_hand = (
        Policy.stock()
        .override({"softmax": "fp16", "mm.default": FP64}, "cpu")
        .override({"linalg_*": "fp32"}, "cuda")
        .override({f"{NAMESPACE}::many": "match_self"})
    )
    assert Policy.load(path) == Policy.load(str(path)) == by_hand


def test_windows_line_ends(path: Path) -> None:
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert Policy.load(path) == MINE
    path.write_bytes(TEXT.replace("fp32", "pf32").replace("\n", "\r\n").encode())
    with pytest.raises(PolicyError, match=r"^p\.toml: \[all\] \"aten::mm.default\": no cast policy is called 'pf32'"):
        Policy.load(path)


# --- writing is whole or not at all


def test_a_file_is_replaced_as_a_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MINE.save(path)

    def fail(*_: object) -> None:
        raise OSError(28, "no space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(PolicyError) as error:
                Policy.named("cuda").save(path)
        assert str(error.value) == "cannot write the policy file 'p.toml': no space left on device."
        assert os.listdir() == ["p.toml"], "nothing is left beside it"
        assert Policy.load(path) == MINE


def test_a_link_stays_and_so_do_the_permissions(path: Path) -> None:
    target = Path("target.toml")
    MINE.save(target)
    target.chmod(0o640)
    path.symlink_to(target)
    Policy.named("cuda").save(path)
    assert path.is_symlink()
    assert Policy.load(target) == Policy.named("cuda")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    mask = os.umask(0)
    os.umask(mask)
    MINE.save("new.toml")
    assert stat.S_IMODE(Path("new.toml").stat().st_mode) == 0o666 & ~mask


def test_where_nothing_can_be_written(path: Path) -> None:
    path.mkdir()
    for target, why in {"p.toml": "it is a directory", "no/p.toml": "No such file or directory"}.items():
        with pytest.raises(PolicyError) as error:
            MINE.save(target)
        assert str(error.value) == f"cannot write the policy file {target!r}: {why}."
    assert os.listdir() == ["p.toml"]


def test_several_threads_save_one_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    policies = [Policy.stock().override({"mm.default": f"float{bits}"}) for bits in (16, 32, 64)]
    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(policy.save, path) for policy in policies * 20]:
            done.result()
    assert Policy.load(path) in policies
    assert [file.name for file in tmp_path.iterdir()] == ["policy.toml"]


def test_a_mark_before_the_text_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_bytes(b"\xef\xbb\xbf" + b'format = 1\n[cpu]\n"softmax.int" = "fp32"\n')
    assert Policy.load(path).lookup("softmax.int", "cpu") is CastPolicy.fp32
