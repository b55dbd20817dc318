"""Type checkers on a user's program: exact types of decorated functions and of results, and the lines that are errors.

`make lint` runs this file with the commands: python tests/test_types.py pyright.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import torch_promote as tp
from torch_promote import types
from torch_promote._C import RegionBase
from torch_promote.errors import DecoratorError
from torch_promote.policy.named_policies import MEANINGS
from torch_promote.policy.op_table import DEVICE_TYPES, POLICY_ALIASES, CastPolicyName, DeviceType
from torch_promote.policy.policy import PolicyName
from torch_promote.reference.promotion_rules import RuleName, promotion_rule
from torch_promote.regions.autocast import CacheInfo, CacheMode, allows_cache
from torch_promote.regions.promotion import KindLike, PromotionKind

SCRIPTS = tuple(Path(__file__).parent / "helpers" / f"{name}_script.py" for name in ("user", "decorated"))
#: The second script is checked with each of them.
DECORATORS = (
    'tp.my_autocast("cpu")',
    'tp.promotion("strict")',
    'tp.stock_autocast("cpu")',
    "tp.trace(values=True)",
    "tp.find_nonfinite(raise_at_first=True)",
)


def check(command: Sequence[str]) -> None:
    """Compares the lines with errors of a type checker with those that are marked."""
    user, decorated = (script.read_text(encoding="utf-8") for script in SCRIPTS)
    assert decorated.count(DECORATORS[0]) == 1
    with tempfile.TemporaryDirectory() as folder:
        scripts = {"user": user}
        scripts |= {f"by_{at}": decorated.replace(DECORATORS[0], one) for at, one in enumerate(DECORATORS)}
        for name, text in scripts.items():
            Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
        files = [str(Path(folder, f"{name}.py")) for name in scripts]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        ran = subprocess.run([*command, *files], capture_output=True, text=True, env=environment)
    found = {(name, int(line)) for name, line in re.findall(r"(\w+)\.py:(\d+)(?::\d+)?(?: -|:) error", ran.stdout)}
    lines = {name: enumerate(text.splitlines(), 1) for name, text in scripts.items()}
    marked = {(name, at) for name, numbered in lines.items() for at, line in numbered if line.endswith("# error")}
    assert marked == found, f"{sorted(marked ^ found)}\n{ran.stdout}{ran.stderr}"


@pytest.mark.slow  # it reads all of PyTorch; `make lint` keeps what it has read
def test_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    check([sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path}"])


async def coroutine() -> None:
    """Its body would run after the block."""


def generator() -> Iterator[None]:
    """Its body would run after the block."""
    yield


async def asynchronous_generator() -> AsyncIterator[None]:
    """Its body would run after the block."""
    yield


class Callee:
    async def __call__(self) -> None:
        """Its body would run after the block."""


SUSPENDING = {
    "a coroutine function": (coroutine, Callee(), functools.partial(coroutine)),
    "a generator function": (generator, functools.partial(generator)),
    "an asynchronous generator function": (asynchronous_generator,),
}


@pytest.mark.parametrize("name", ["trace", "find_nonfinite"])
def test_a_block_of_calls_decorates_nothing_that_suspends(name: str, tmp_path: Path) -> None:
    decorator = getattr(tp, name)
    for kind, functions in SUSPENDING.items():
        for function in functions:
            with pytest.raises(DecoratorError, match=rf"^{name}\(\.\.\.\) cannot decorate .*, {kind}: the block would"):
                decorator()(function)
    with pytest.raises(DecoratorError, match=rf"^{name}\(\.\.\.\) decorates a callable, got int"):
        decorator()(3)
    with pytest.raises(DecoratorError, match=rf"^{name}\(\) as a decorator loses its report\. Write `with {name}"):
        decorator()(len)
    keeping: dict[str, object] = {"record": tmp_path / "a.jsonl.gz"} if name == "trace" else {"raise_at_first": True}
    assert decorator(**keeping)(len)("ab") == 2
    assert tp.installed() is None


def public_names() -> set[str]:
    modules = tp, tp.errors, tp.reference
    return {name for module in modules for name in module.__all__} | {*vars(types)}


def annotations(name: str) -> Iterator[tuple[str, str]]:
    """Yields the annotations that users of a public name meet: of its arguments, results, attributes and methods."""
    value = getattr(tp, name, None) or getattr(types, name)
    members = {"": value}
    if inspect.isclass(value):
        ours = [one for one in value.__mro__ if one.__module__.startswith("torch_promote.") and one is not RegionBase]
        members = {key: one for base in reversed(ours) for key, one in vars(base).items() if not key.startswith("_")}
        members |= {key: getattr(value, key) for key in ("__init__", "__enter__", "__call__") if hasattr(value, key)}
        for base in ours:
            for key, hint in vars(base).get("__annotations__", {}).items():
                yield f"{name}.{key}" * (not key.startswith("_")), str(hint)
            for key, hint in re.findall(r"self\.([a-z]\w*): ([^=\n]+) =", inspect.getsource(base)):
                yield f"{name}.{key}", hint
    for key, member in members.items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        for argument, hint in getattr(function, "__annotations__", {}).items():
            yield f"{name}.{key}({argument})" * (not argument.startswith("_")), str(hint)


#: What users meet but do not name: the parts of rendered reports, names for a tuple or a dtype, and our own arguments.
NOT_NAMED = {"Content", "Kind", "Place", "Tables", "Table", "Value", "Change", "Key", "Pairs", "PairFunction", "Region"}
NOT_NAMED |= {"Extremes", "ModulePolicy", "Sides"}


def test_every_type_that_users_meet_has_a_public_name() -> None:
    public, met = public_names(), set()
    for name in [*tp.__all__, *(name for name in vars(types) if name[0].isupper())]:
        for where, hint in annotations(name) if name not in tp.errors.__all__ else ():
            for found in re.findall(r"(?<![\w.\"'])[A-Z]\w*(?![\w.\"'])", hint) if where else ():
                met.add((found, where))
    ours = {
        name
        for module in [*sys.modules.values()]
        if module.__name__.startswith("torch_promote.")
        for name, value in vars(module).items()
        if name[0].isupper() and (getattr(value, "__module__", None) or "").startswith("torch_promote.")
    }
    assert len(met) > 150
    assert {one for one in met if one[0] in ours - public - NOT_NAMED} == set()


def test_the_names_of_arguments_are_those_that_exist() -> None:
    assert get_args(DeviceType) == DEVICE_TYPES
    assert get_args(PolicyName) == tuple(MEANINGS)
    assert {*get_args(CastPolicyName)} == {*(policy.value for policy in tp.CastPolicy), *POLICY_ALIASES}
    assert [allows_cache(mode, None) for mode in get_args(CacheMode)] == [True, True, True, False]
    assert [promotion_rule(name).name for name in get_args(RuleName)] == list(get_args(RuleName))
    names = {name for one in get_args(KindLike) for name in get_args(one) or [one]} - {PromotionKind}
    assert names == {*(kind.value for kind in PromotionKind), *(kind.name.lower() for kind in PromotionKind)}
    assert get_type_hints(CacheInfo).keys() == tp.cache_info().keys()


if __name__ == "__main__":
    check(sys.argv[1:])
