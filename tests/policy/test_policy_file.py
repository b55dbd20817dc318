"""Policy files: their content, round trips, atomic saves, and the errors of invalid ones."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

import torch_promote as tp
from helpers.library_for_policies import NAMESPACE
from helpers.policies import MINE, POLICIES, TEXT, TORCH, WAYS, path
from torch_promote import PolicyError
from torch_promote.errors import ArgumentError
from torch_promote.policy.files import to_toml
from torch_promote.policy.module_tables import quoted
from torch_promote.policy.op_table import DEVICE_TYPES, TABLE_VERSION
from torch_promote.policy.overrides import select
from torch_promote.policy.policy import Policy

__all__ = ["path"]  # a fixture

FP64 = torch.float64


# --- what is written, and comes back


def test_a_file_has_a_line_for_each_op(path: Path) -> None:
    MINE.save(path)
    assert path.read_text(encoding="utf-8") == TEXT
    assert Policy.load(path) == MINE


@given(POLICIES)
@settings(max_examples=50, deadline=None)
def test_any_policy_comes_back(tmp_path_factory: pytest.TempPathFactory, policy: Policy) -> None:
    path = tmp_path_factory.mktemp("policies") / "p.toml"
    policy.save(path)
    assert Policy.load(path) == policy
    sections = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith('"')]
    patterns = {line for line in sections if "*" in line}
    assert len(sections) <= len(policy.changes) + len(patterns), "no op is named twice for a device"


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


FAMILY = {"linalg_*": "fp32", "linalg_norm": "lower"}


@pytest.mark.parametrize(
    "text",
    [
        '[all]\n"linalg_*" = "fp32"\n"linalg_norm" = "lower"\n',
        '[all]\n"linalg_norm" = "lower"\n"linalg_*" = "fp32"\n',
        '[all]\n"linalg_*" = "fp32"\n' + "".join(f'[{device}]\n"linalg_norm" = "lower"\n' for device in DEVICE_TYPES),
        "".join(f'[{device}]\n"linalg_*" = "fp32"\n' for device in DEVICE_TYPES) + '[all]\n"linalg_norm" = "lower"\n',
    ],
)
def test_a_name_takes_precedence_over_a_pattern(path: Path, text: str) -> None:
    path.write_text(f"format = 1\n{text}")
    assert Policy.load(path) == Policy.stock().override(FAMILY)
    path.write_text(text.replace("[all]", 'format = 2\n[modules."head"]'))
    if "[cpu]" not in text:
        assert Policy.load(path) == Policy.stock().override_modules({"head": FAMILY})


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
    for target, why in {"p.toml": "it is a directory", "no/p.toml": os.strerror(errno.ENOENT)}.items():
        with pytest.raises(PolicyError) as error:
            MINE.save(target)
        assert str(error.value) == f"cannot write the policy file {target!r}: {why}."
    assert os.listdir() == ["p.toml"]


def test_a_policy_is_saved_as_toml_alone(path: Path) -> None:
    for name in ("p.json", Path("p.yaml")):
        with pytest.raises(PolicyError, match=r"^a policy file is TOML: its name ends in \.toml, got 'p\."):
            MINE.save(name)
    assert os.listdir() == []
    Path("p.json").touch()
    with pytest.raises(PolicyError, match=r"^p\.json is there, but the name of a policy file ends in \.toml\. Rename"):
        Policy.of("p.json")


# --- patterns


def lines_of(policy: Policy) -> list[str]:
    """The sections and entries of the policy's file."""
    return to_toml(policy.to_dict()).splitlines()[5:]


#: The ops of the namespace that can have the policy "keep", except join.
LEFT = [
    f"{op}{'' if '.' in op else '.default'}"
    for op in sorted(name.partition("::")[2] for name in select(f"{NAMESPACE}::*", "keep")[1])
    if not op.startswith("jo")
]
#: Policies, and the entries that their files have.
PATTERNS: dict[str, tuple[Policy, list[str]]] = {
    "a pattern": (Policy.stock().override({"linalg_*": "fp32"}), ["[all]", '"linalg_*" = "fp32"']),
    "for one device": (
        Policy.stock().override({"linalg_*": FP64}, device_type="cuda"),
        ["[cuda]", '"linalg_*" = "float64"'],
    ),
    "with an exception": (
        Policy.stock().override({"linalg_*": "fp32", "linalg_norm.default": "lower"}),
        ["[all]", '"linalg_*" = "fp32"', '"aten::linalg_norm.default" = "lower_precision_fp"'],
    ),
    "an exception that is stock's policy": (
        Policy.stock().override({"*mm": "fp32"}).override({"mm.default": "lower"}),
        ["[all]", '"*mm" = "fp32"', '"aten::mm.default" = "lower_precision_fp"'],
    ),
    "an exception on one device": (
        Policy.stock().override({"linalg_*": "fp32"}).override({"linalg_norm.default": "keep"}, device_type="cpu"),
        ["[all]", '"linalg_*" = "fp32"', "", "[cpu]", '"aten::linalg_norm.default" = "keep"'],
    ),
    "a pattern without effect": (
        Policy.stock().override({"linea?": "lower"}, "cpu"),
        ["[cpu]", '"linea?" = "lower_precision_fp"'],
    ),
    "beyond 16 bits": (Policy.stock().override({"[\U0001f600m]m": "fp32"}), ["[all]", '"[\U0001f600m]m" = "fp32"']),
    "two patterns": (
        Policy.stock().override({f"{NAMESPACE}::j*": "fp32", f"{NAMESPACE}::m*": "keep"}),
        ["[all]", '"policy_tests::j*" = "fp32"', '"policy_tests::m*" = "keep"'],
    ),
    "a pattern with a policy of its own on each device": (
        Policy.stock().override({"linalg_*": "fp32"}, "cpu").override({"linalg_*": "lower"}, "cuda"),
        ["[cpu]", '"linalg_*" = "fp32"', "", "[cuda]", '"linalg_*" = "lower_precision_fp"'],
    ),
    "a pattern again": (
        Policy.stock().override({"linalg_*": "fp32"}).override({"linalg_*": "keep"}),
        ["[all]", '"linalg_*" = "keep"'],
    ),
    "a pattern that another covers": (
        Policy.stock().override({f"{NAMESPACE}::join*": "fp32"}).override({f"{NAMESPACE}::*": "keep"}),
        ["[all]", '"policy_tests::*" = "keep"'],
    ),
    "a later pattern takes a part": (
        Policy.stock().override({f"{NAMESPACE}::*": "keep"}).override({f"{NAMESPACE}::jo*": "fp32"}),
        ["[all]", '"policy_tests::jo*" = "fp32"', *(f'"policy_tests::{op}" = "keep"' for op in LEFT)],
    ),
    "of modules": (
        Policy.stock().override_modules(
            {"blocks.*": {"linalg_*": "fp32"}, "**.head": "off", "a?[bc]": {"*mm": "keep"}}
        ),
        [
            '[modules."**.head"]', 'policy = "off"', "", '[modules."a?[bc]"]', '"*mm" = "keep"', "",
            '[modules."blocks.*"]', '"linalg_*" = "fp32"',
        ],
    ),
    "of modules, with an exception": (
        Policy.stock()
        .override({"linalg_*": "lower"})
        .override_modules({"head": {"linalg_*": "fp32", "linalg_norm.default": "keep"}}),
        [
            "[all]", '"linalg_*" = "lower_precision_fp"', "", '[modules."head"]', '"linalg_*" = "fp32"',
            '"aten::linalg_norm.default" = "keep"',
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "lines"), PATTERNS.values(), ids=PATTERNS)
def test_a_file_keeps_the_patterns_of_a_policy(policy: Policy, lines: list[str], path: Path) -> None:
    assert lines_of(policy) == lines
    policy.save(path)
    for read in (Policy.load(path), *(way(policy) for way in WAYS.values())):
        assert read == policy
        assert hash(read) == hash(policy)
        assert lines_of(read) == lines
    changed = Policy.load(path).override({"relu.default": "fp32"}).override_modules({"z": "off"})
    added = {"[all]", '"aten::relu.default" = "fp32"', "", '[modules."z"]', 'policy = "off"'}
    assert set(lines_of(changed)) == {*lines, *added}


@given(POLICIES, POLICIES)
@settings(max_examples=30, deadline=None)
def test_patterns_say_nothing_besides(first: Policy, second: Policy) -> None:
    """Equal policies are equal, also if one was made of patterns; and a file of either gives the same policy."""
    by_name = Policy(first.changes, first.modules)
    assert (by_name == first, hash(by_name) == hash(first), repr(by_name) == repr(first)) == (True,) * 3
    assert (first == second) == (first.changes == second.changes)
    assert Policy.from_dict(first.to_dict()) == Policy.from_dict(by_name.to_dict()) == first


def test_a_pattern_of_a_library_that_is_not_imported_is_not_saved(path: Path) -> None:
    namespace = "torch_promote_test_patterns"
    with torch.library._scoped_library(namespace, "DEF") as library:
        library.define("one(Tensor x) -> Tensor")
        policy = Policy.stock().override({f"{namespace}::*": "fp32"})
        assert lines_of(policy) == ["[all]", f'"{namespace}::*" = "fp32"']
    assert lines_of(policy) == ["[all]", f'"{namespace}::one.default" = "fp32"']


# --- invalid files

#: The text of a file, below "format = 1" if it has no format, and what the error says.
ERRORS: list[tuple[str, str]] = [
    ("troch = '2.13'\n", "'troch' is not a key of a policy. Closest: torch. Legal: format, torch, table and the"),
    ("[cuad]\nmm = 'fp32'\n", "'cuad' is not a key of a policy. Closest: cuda."),
    ("cpu = 'fp32'\n", "cpu is a section of ops, got 'fp32'. Write [cpu]."),
    ("[all]\n'policy_tests::jion' = 'fp32'\n", "[all] \"policy_tests::jion\": no op is called 'policy_tests::jion'."),
    ("[cpu]\nmm = 'fp16'\nbmm = 'promot'\n", "[cpu] \"bmm\": no cast policy is called 'promot'. Closest: promote."),
    ("[cpu]\n'mm.out' = 'fp32'\n", "[cpu] \"mm.out\": aten::mm.out cannot use 'fp32': it writes"),
    ("[cpu]\n'mm.default' = 32\n", '[cpu] "mm.default": expected the name of a policy in quotes, got 32.'),
    ("[cpu]\nsoftmax.int = 'fp32'\n", 'sections do not nest. Quote the names of ops: "softmax.int".'),
    (
        "[cpu]\n'mm.default' = 'fp32'\n'aten::mm.default' = 'fp32'\n",
        'aten::mm on cpu already has a policy from [cpu] "mm.default". Name each overload once.',
    ),
    (
        "[cuda]\n'mm.default' = 'fp32'\n[all]\nmm = 'fp32'\n",
        '[all] "mm": aten::mm on cuda already has a policy from [cuda] "mm.default".',
    ),
    (
        "[cpu]\n'policy_tests::j*' = 'fp32'\n[all]\n'policy_tests::*in' = 'keep'\n",
        'already has a policy from [cpu] "policy_tests::j*". Name the op itself as well,',
    ),
    (
        "torch = '9.5.0'\n[all]\n'mm.default' = 'fp32'\n'policy_tests::new' = 'fp32'\n",
        f"It was written with torch 9.5.0, and this is torch {TORCH}, table {TABLE_VERSION}. Use the newer version.",
    ),
    ("[cpu]\naten::mm = 'fp32'\n", "not valid TOML: "),
    ("x = " + "[" * 5000, "not valid TOML: "),
    ("format = 2\n[module.head]\npolicy = 'fp32'\n", "'module' is not a key of a policy. Closest: modules."),
    ("[modules.head]\npolicy = 'fp32'\n", "[modules] is a section of format 2, got format = 1."),
    *(
        (f"format = 2\n[modules.head]\n{table}", message)
        for table, message in [
            ("", '[modules."head"]: the table is empty. Add an op and its policy, or leave it out.'),
            ("'mm.out' = 'promot'\n", "[modules.\"head\"]: aten::mm.out: no cast policy is called 'promot'."),
            ("'mm.default' = 'fp32'\n'aten::mm.default' = 'keep'\n", "aten::mm gets two policies, 'fp32' from"),
            ("policy = 'cuda'\n", "the policy of a whole module is 'fp32' or 'off', got 'cuda'."),
            ("policy = 'fp32'\nmm = 'keep'\n", "is for the whole module, so the table can have no other key."),
        ]
    ),
    ("format = 2\n[modules.blocks.0]\nmm = 'keep'\n", 'that contain dots: [modules."blocks.0"], "softmax.int".'),
    (
        "format = 2\ntorch = '9.5'\n[modules.head]\n'policy_tests::new' = 'fp32'\n",
        "It was written with torch 9.5, and this is",
    ),
]


@pytest.mark.parametrize(("text", "message"), ERRORS, ids=[text[:40] for text, _ in ERRORS])
def test_a_wrong_file(path: Path, text: str, message: str) -> None:
    path.write_text(text if text.startswith("format") else f"format = 1\n{text}", encoding="utf-8")
    with pytest.raises(PolicyError) as error:
        Policy.load(path)
    assert message in str(error.value)
    assert str(error.value).startswith("p.toml")


def test_a_file_from_a_newer_pytorch_that_contains_nothing_new_is_read(path: Path) -> None:
    path.write_text(TEXT.replace(TORCH, "9.5.0").replace(TABLE_VERSION, "9.5"), encoding="utf-8")
    assert Policy.load(path) == MINE


def test_what_is_not_a_file(path: Path) -> None:
    path.write_bytes(b"format = 1\n# \xff\n")
    for name, message in {
        "no/p.toml": "there is no policy file 'no/p.toml'. Policies that need no file: stock, cpu,",
        ".": f"cannot read the policy file '.': {os.strerror(errno.EISDIR)}.",
        "a\0b.toml": "cannot read the policy file",
        "p.toml": "p.toml: not a text file in UTF-8 (byte 13). Policy.save() writes one.",
        3: "path is the name of a file, a str or os.PathLike, got 3.",
    }.items():
        with pytest.raises(ArgumentError if name == 3 else PolicyError) as error:
            Policy.load(name)  # type: ignore[arg-type]
        assert message in str(error.value)


# --- names and numbers that terminals and Python cannot take

STRANGE = {
    "escape": "mm\x1b[2J",
    "C1 escape": "mm\x9b2J",
    "bell": "mm\x07",
    "right to left": "mm\u202egpj",
    "line separator": "mm\u2028x",
    "carriage return": "mm\rdone",
    "delete": "mm\x7f",
}


def in_toml(name: str) -> str:
    """A string of TOML: a literal one where the name may be in one, which `tomllib` reads many times faster."""
    return f"'{name}'" if name.isprintable() and "'" not in name else quoted(name)


#: Errors that contain a name.
NAMED: dict[str, Callable[[str, Path], object]] = {
    "an op": lambda name, _: Policy.stock().override({name: "fp32"}),
    "a policy of an op": lambda name, _: Policy.stock().override({"mm": name}),
    "a policy": lambda name, _: Policy.of(name),
    "a path": lambda name, _: Policy.of(f"{name}.toml"),
    "an op in a file": lambda name, path: loaded(path, f'format = 1\n[all]\n{in_toml(name)} = "fp32"'),
    "an op in a file, with a number": lambda name, path: loaded(path, f"format = 1\n[all]\n{in_toml(name)} = 3"),
    "a policy in a file": lambda name, path: loaded(path, f'format = 1\n[all]\n"mm" = {in_toml(name)}'),
    "a section": lambda name, path: loaded(path, f'format = 1\n[{in_toml(name)}]\n"mm" = "fp32"'),
    "a module in a file": lambda name, path: loaded(path, f'format = 2\n[modules.{in_toml(name)}]\n"mm" = "fp33"'),
    "a version": lambda name, path: loaded(path, f"format = 1\ntorch = {in_toml(name)}"),
    "a newer version": lambda name, path: loaded(
        path, f'format = 1\ntorch = {in_toml("99." + name)}\n[al]\n"mm" = "x"'
    ),
    "a module": lambda name, _: tp.set_module_policy(torch.nn.Linear(1, 1), {name: "fp32"}),
    "an op of a module": lambda name, _: tp.set_module_policy(torch.nn.Linear(1, 1), {"": {name: "fp32"}}),
    "a module of a table": lambda name, _: Policy.stock().override_modules({name: "off"}).apply_to(torch.nn.ReLU()),
    "a table without a model": lambda name, _: tp.my_autocast(
        "cpu", policy=Policy.stock().override_modules({name: "off"})
    ),
}


def loaded(path: Path, text: str) -> Policy:
    path.write_text(text, encoding="utf-8")
    return Policy.load(path)


@pytest.mark.parametrize("name", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("place", NAMED)
def test_errors_escape_what_would_control_a_terminal(path: Path, place: str, name: str) -> None:
    with pytest.raises(PolicyError) as error:
        NAMED[place](name, path)
    assert str(error.value).replace("\n", "").isprintable()
    assert "mm" in str(error.value)


@pytest.mark.parametrize("name", STRANGE.values(), ids=STRANGE)
def test_a_policy_with_a_strange_name_of_a_module_is_printed_and_saved(path: Path, name: str) -> None:
    policy = Policy.stock().override_modules({name: "off"})
    policy.save(path)
    assert Policy.load(path) == policy
    for text in (path.read_text(encoding="utf-8"), str(policy.diff("stock")), repr(policy)):
        assert text.replace("\n", "").isprintable()


VERY_LONG = {
    "one word": "x" * 1_000_000,
    "words": "x y" * 300_000,
    "a pattern": "*a" * 500_000,
    "stars": "**." * 300_000 + "x",
    "dots": "a." * 500_000,
    "brackets": "[" * 1_000_000,
    "in Python": "F." + "a" * 1_000_000,
    "a namespace": "y" * 1_000_000 + "::x",
    "an overload": "mm." + "y" * 1_000_000,
}


#: The everyday run has a third of the names in each place.
LONG_NAMES = [
    pytest.param(place, name, id=f"{place}-{kind}", marks=pytest.mark.slow if (i + j) % 3 else ())
    for i, place in enumerate(NAMED)
    for j, (kind, name) in enumerate(VERY_LONG.items())
]


@pytest.mark.parametrize(("place", "name"), LONG_NAMES)
def test_a_name_of_a_megabyte_is_refused_soon_and_shortened(path: Path, place: str, name: str) -> None:
    start = time.process_time()
    with pytest.raises(PolicyError) as error:
        NAMED[place](name, path)
    assert time.process_time() - start < 1  # it took 5 seconds; now it takes 0.02 to 0.2
    assert len(str(error.value)) < 5_000
    assert " characters ...]" in str(error.value)


def test_a_long_listing_is_not_shortened() -> None:
    listing = "\n".join(f"mismatch {number}: expected float32, got bfloat16" for number in range(1_000))
    assert str(tp.TorchPromoteError(listing)) == listing


DIGITS = "9" * 5_000
LONG_NUMBERS: dict[str, tuple[str, str]] = {
    "torch": (f'format = 1\ntorch = "{DIGITS}"', "torch is a version such as"),
    "table": (f'format = 1\ntable = "2.{DIGITS}"', f"table is a version such as '{TABLE_VERSION}', got '2.999"),
    "format": (f"format = {DIGITS}", "not valid TOML: Exceeds the limit (4300 digits)"),
    "format, hexadecimal": (f"format = 0x{DIGITS}", "is newer than 2, the newest that this torch_promote reads."),
    "a policy": (f'format = 1\n[all]\n"mm" = 0x{DIGITS}', '[all] "mm": expected the name of a policy in quotes, got'),
    "a section": (f"format = 1\nall = 0x{DIGITS}", "all is a section of ops, got a value of type int that cannot be"),
    "modules": (f"format = 2\nmodules = 0x{DIGITS}", "modules holds the tables for modules, got a value of type int"),
    "a table": (f"format = 2\n[modules]\nx = 0x{DIGITS}", '[modules] "x": expected a table of ops, got a value of'),
    "an op of a module": (f"format = 2\n[modules.x]\nmm = 0x{DIGITS}", "'mm': a policy is a str, a CastPolicy"),
}


@pytest.mark.parametrize(("text", "message"), LONG_NUMBERS.values(), ids=LONG_NUMBERS)
def test_a_number_that_python_does_not_convert(path: Path, text: str, message: str) -> None:
    with pytest.raises(PolicyError) as error:
        loaded(path, text)
    assert type(error.value) is PolicyError
    assert message in str(error.value)
