"""Invalid policy files: the text of every error, with the file and the place in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.policies import MINE, TEXT, TORCH, path
from helpers.policy_errors import LEGAL_WRITING, NAMED, NO_DTYPE, NOT_AN_OP, WRITES
from helpers.policy_errors import POLICIES as POLICIES_TEXT
from torch_promote import CastPolicy, PolicyError
from torch_promote.policy import files
from torch_promote.policy.op_table import TABLE_VERSION
from torch_promote.policy.policy import Policy

__all__ = ["path"]  # a fixture


SECTIONS = 'Legal: format, torch, table and the sections [all], [cpu], [cuda], [modules."NAME"].'
QUOTED = 'An entry has the form "OP" = "POLICY", both in quotes.'
HERE = f"torch {TORCH}, table {TABLE_VERSION}"

ERRORS: dict[str, tuple[str, str]] = {
    "empty": ("", "p.toml: the key 'format' is missing. Start with: format = 1"),
    "no format": ("[cpu]\nmm = 'fp32'\n", "p.toml: the key 'format' is missing. Start with: format = 1"),
    "a newer format": (
        '# new\nformat = 3\ntorch = "3.0"\n[cpu]\nwhatever = 3\n',
        "p.toml: format 3 is newer than 2, the newest that this torch_promote reads. It was written with torch 3.0. "
        "Use a newer torch_promote.",
    ),
    "a format in words": ("format = 'one'\n", "p.toml: format is an integer from 1 to 2, got 'one'."),
    "a format that is a bool": ("format = true\n", "p.toml: format is an integer from 1 to 2, got True."),
    "format zero": ("\nformat = 0\n", "p.toml: format is an integer from 1 to 2, got 0."),
    "a version that is a number": (
        "format = 1\ntorch = 2.13\n",
        f"p.toml: torch is a version such as {TORCH!r}, got 2.13.",
    ),
    "a version that is none": (
        "format = 1\ntable = 'latest'\n",
        f"p.toml: table is a version such as {TABLE_VERSION!r}, got 'latest'.",
    ),
    "an unknown key": (
        "format = 1\ntroch = '2.13'\n",
        f"p.toml: 'troch' is not a key of a policy. Closest: torch. {SECTIONS}",
    ),
    "an unknown section": (
        "format = 1\n\n[cuad]\nmm = 'fp32'\n",
        f"p.toml: 'cuad' is not a key of a policy. Closest: cuda. {SECTIONS}",
    ),
    "another device's section": (
        "format = 1\n[xla]\nmm = 'fp32'\n",
        f"p.toml: 'xla' is not a key of a policy. {SECTIONS}",
    ),
    "an op outside of sections": (
        "format = 1\n'aten::mm' = 'fp32'\n",
        f"p.toml: 'aten::mm' is not a key of a policy. {SECTIONS}",
    ),
    "a section that is none": (
        "format = 1\ncpu = 'fp32'\n",
        "p.toml: cpu is a section of ops, got 'fp32'. Write [cpu].",
    ),
    "a misspelt op": (
        'format = 1\n[all]\n\n"policy_tests::jion" = "fp32"\n',
        f"p.toml: [all] \"policy_tests::jion\": no op is called 'policy_tests::jion'. Closest: join. {NAMED}",
    ),
    "a pattern that matches nothing": (
        'format = 1\n[cuda]\n"policy_tests::jion*" = "fp32"\n',
        "p.toml: [cuda] \"policy_tests::jion*\": the pattern 'policy_tests::jion*' matches no op. Closest: join. "
        f"{NAMED}",
    ),
    "a library that is not there": (
        'format = 1\n[cuda]\n"zzz::op" = "fp32"\n',
        "p.toml: [cuda] \"zzz::op\": no op is registered in namespace 'zzz'. Import the library that defines 'zzz::op' "
        "first.",
    ),
    "a misspelt policy": (
        'format = 1\n[cpu]\nmm = "fp16"\nbmm = "promot"\n',
        f"p.toml: [cpu] \"bmm\": no cast policy is called 'promot'. Closest: promote. {POLICIES_TEXT}",
    ),
    "a dtype that is not floating": (
        'format = 1\n[cpu]\n"mm.default" = "int8"\n',
        f'p.toml: [cpu] "mm.default": torch.int8 is not a floating dtype. {POLICIES_TEXT}',
    ),
    "a policy that is not for this op": (
        'format = 1\n[cpu]\n"mm.default" = "fp32_set_opt_dtype"\n',
        f"p.toml: [cpu] \"mm.default\": aten::mm cannot use 'fp32_set_opt_dtype': {NO_DTYPE}. Legal: "
        "lower_precision_fp, fp32, promote, fallthrough, keep, banned or a floating dtype.",
    ),
    "a cast of what is written": (
        'format = 1\n[cpu]\n"mm.out" = "fp32"\n',
        f"p.toml: [cpu] \"mm.out\": aten::mm.out cannot use 'fp32': {WRITES}. {LEGAL_WRITING}",
    ),
    "a number for a policy": (
        'format = 1\n[cpu]\n"mm.default" = 32\n',
        'p.toml: [cpu] "mm.default": expected the name of a policy in quotes, got 32.',
    ),
    "a list for a policy": (
        'format = 1\n[cpu]\n"mm.default" = ["fp32"]\n',
        "p.toml: [cpu] \"mm.default\": expected the name of a policy in quotes, got ['fp32'].",
    ),
    "an overload without quotes": (
        "format = 1\n[cpu]\nsoftmax.int = 'fp32'\n",
        'p.toml: [cpu] "softmax": sections do not nest. Quote the names of ops: "softmax.int".',
    ),
    "a section within a section": (
        "format = 1\n[cpu.cuda]\nmm = 'fp32'\n",
        'p.toml: [cpu] "cuda": sections do not nest. Quote the names of ops: "cuda.mm".',
    ),
    "one op by two names": (
        'format = 1\n[cpu]\n"mm.default" = "fp32"\n"aten::mm.default" = "fp32"\n',
        'p.toml: [cpu] "aten::mm.default": aten::mm on cpu already has a policy from [cpu] "mm.default". '
        "Name each overload once.",
    ),
    "one op for all and for one": (
        'format = 1\n[cuda]\n"mm.default" = "fp32"\n[all]\n"mm" = "fp32"\n',
        'p.toml: [all] "mm": aten::mm on cuda already has a policy from [cuda] "mm.default". Name each overload once.',
    ),
    "one op by two patterns": (
        'format = 1\n[cpu]\n"policy_tests::j*" = "fp32"\n[all]\n"policy_tests::*in" = "keep"\n',
        'p.toml: [all] "policy_tests::*in": policy_tests::join on cpu already has a policy from [cpu] '
        '"policy_tests::j*". Name the op itself as well, which takes precedence over patterns, or change a pattern.',
    ),
    "a newer PyTorch's": (
        'format = 1\ntorch = "9.5.0"\ntable = "9.5"\n[all]\n"mm.default" = "fp32"\n"policy_tests::new" = "fp32"\n'
        '[xpu]\n"mm" = "fp32"\n[cpu]\n"bmm" = "stochastic"\n"newlib::op" = "keep"\n',
        "p.toml was written with torch 9.5.0, table 9.5. This is "
        f'{HERE}, which does not know [all] "policy_tests::new" = "fp32"; [xpu]; [cpu] "bmm" = "stochastic"; [cpu] '
        '"newlib::op" = "keep". Use the newer version, or remove these entries.',
    ),
    "a newer table's": (
        f'format = 1\ntorch = "{TORCH}"\ntable = "9.5"\n[all]\n"policy_tests::new" = "fp32"\n',
        f"p.toml was written with torch {TORCH}, table 9.5. This is {HERE}, which does not know "
        '[all] "policy_tests::new" = "fp32". Use the newer version, or remove these entries.',
    ),
    "an older PyTorch's": (
        'format = 1\ntorch = "1.0"\ntable = "1.0"\n[all]\n"policy_tests::jion" = "fp32"\n',
        f"p.toml: [all] \"policy_tests::jion\": no op is called 'policy_tests::jion'. Closest: join. {NAMED}",
    ),
    "a newer PyTorch's, illegal here": (
        'format = 1\ntorch = "9.5"\n[all]\n"mm.out" = "fp32"\n"policy_tests::new" = "fp32"\n',
        f'p.toml was written with torch 9.5. This is {HERE}, which does not know [all] "mm.out" = "fp32"; '
        '[all] "policy_tests::new" = "fp32". Use the newer version, or remove these entries.',
    ),
}


@pytest.mark.parametrize(("text", "message"), ERRORS.values(), ids=ERRORS)
def test_a_wrong_file(path: Path, text: str, message: str) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PolicyError) as error:
        Policy.load(path)
    assert str(error.value) == message


def test_a_file_from_a_newer_pytorch_that_says_nothing_new_is_read(path: Path) -> None:
    path.write_text(TEXT.replace(TORCH, "9.5.0").replace(TABLE_VERSION, "9.5"), encoding="utf-8")
    assert Policy.load(path) == MINE


# Python versions word tomllib's errors differently; the place and the remedy stay.
SYNTAX: dict[str, tuple[str, str]] = {
    "an op without quotes": ("format = 1\n[cpu]\naten::mm = 'fp32'\n", "line 3"),
    "a pattern without quotes": ("format = 1\n[cpu]\n\nlinalg_* = 'fp32'\n", "line 4"),
    "a policy without quotes": ("format = 1\n[cpu]\n'mm' = fp32\n", "line 3"),
    "an open quote": ("format = 1\n[cpu]\n'mm' = 'fp32\n", "line 3"),
    "an open section": ("format = 1\n[cpu\n", "line 2"),
    "no value": ("format = 1\n[cpu]\n'mm'\n", "line 3"),
    "no toml": ("format: 1\n", "line 1"),
    "an open list at the end": ("format = 1\n[cpu]\nmm = ['fp32',", "line 3"),
    "an entry twice": ("format = 1\n[cpu]\nmm = 'fp32'\n\"mm\" = 'keep'\n", "line 4"),
    "a section twice": ("format = 1\n[cpu]\nmm = 'fp32'\n[cuda]\n[cpu]\n", "line 5"),
    "format twice": ("format = 1\nformat = 1\n", "line 2"),
}


@pytest.mark.parametrize(("text", "place"), SYNTAX.values(), ids=SYNTAX)
def test_not_toml(path: Path, text: str, place: str) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PolicyError) as error:
        Policy.load(path)
    message = str(error.value)
    assert message.startswith("p.toml: not valid TOML: ")
    assert f" (at {place}" in message or " (at end of document)" in message
    assert message.endswith(f"). {QUOTED}")
    assert "\n" not in message


def test_what_is_no_file(path: Path) -> None:
    def message(name: Any) -> str:
        with pytest.raises(PolicyError) as error:
            Policy.load(name)
        return str(error.value)

    named = "Policies that need no file: stock, cpu, cuda, fp32_safe, off."
    assert message("p.toml") == f"there is no policy file 'p.toml'. {named}"
    assert message("no/p.toml") == f"there is no policy file 'no/p.toml'. {named}"
    assert message(".") == "cannot read the policy file '.': Is a directory."
    path.write_bytes(b"format = 1\n# \xff\n")
    assert message(path) == "p.toml: not a text file in UTF-8 (byte 13). Policy.save() writes one."
    assert message(3) == "the path of a policy file is a str or a path object, got 3."


WRONG_DATA: list[tuple[Any, str]] = [
    (None, "a policy as data is a mapping, got NoneType. Policy.to_dict() makes one."),
    ([("format", 1)], "a policy as data is a mapping, got list. Policy.to_dict() makes one."),
    ({}, "the policy: the key 'format' is missing. Start with: format = 1"),
    (
        {"format": 1, "cpu": {"mm.out": "fp32"}},
        f"the policy: [cpu] \"mm.out\": aten::mm.out cannot use 'fp32': {WRITES}. {LEGAL_WRITING}",
    ),
    (
        {"format": 1, "cpu": {"mm": CastPolicy.fp32}},
        "the policy: [cpu] \"mm\": expected the name of a policy in quotes, got <CastPolicy.fp32: 'fp32'>.",
    ),
    (
        {"format": 1, "cpu": {3: "fp32"}},
        f"the policy: [cpu] 3: {NOT_AN_OP}3. {NAMED}",
    ),
    ({"format": 1, 7: {}}, f"the policy: 7 is not a key of a policy. {SECTIONS}"),
    (
        {"format": 1, "cpu": {"mm.default": "keep"}, "all": {"mm.default": "keep"}},
        'the policy: [all] "mm.default": aten::mm on cpu already has a policy from [cpu] "mm.default". Name each '
        "overload once.",
    ),
    (
        {"format": 1, "torch": "9.0", "xpu": {}},
        f"the policy was written with torch 9.0. This is {HERE}, which does not know [xpu]. Use the newer version, or "
        "remove these entries.",
    ),
]


@pytest.mark.parametrize(("data", "message"), WRONG_DATA, ids=lambda value: str(value)[:50])
def test_wrong_data(data: Any, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        Policy.from_dict(data)
    assert str(error.value) == message


def test_a_higher_format_would_be_written_in_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files, "_FORMAT_OF_MODULES", 4)
        files.save(MINE.changes, path)
    with pytest.raises(PolicyError, match=r"^p\.toml: format 3 is newer than 2"):
        Policy.load(path)


@pytest.mark.parametrize("text", ["format = 1" + "0" * 5000, "format = " + "[" * 5000], ids=["digits", "brackets"])
def test_what_no_reader_of_toml_takes(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=r"policy\.toml: not valid TOML: "):
        Policy.load(path)


def test_a_path_that_cannot_be_one() -> None:
    with pytest.raises(PolicyError, match="cannot read the policy file"):
        Policy.load("a\0b.toml")
