"""install, uninstall, installed, installed_as: effects, results and errors."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest import mock

import pytest
import torch

import torch_promote as tp
from helpers.installed import ENTER, EXIT, MARKED, OURS, STOCKS, is_restored, region_is
from helpers.probes import mm_dtype
from helpers.subprocesses import run_python
from helpers.thread_state import thread_state

pytestmark = pytest.mark.usefixtures("nothing_installed")


def test_install_and_uninstall() -> None:
    assert tp.installed() is None
    installation = tp.install(**MARKED)
    assert tp.installed() is installation
    assert region_is() is OURS
    assert tp.uninstall() is installation
    assert tp.installed() is None
    assert region_is() is STOCKS
    assert is_restored()


def test_uninstall_without_install() -> None:
    assert tp.uninstall() is None
    assert is_restored()


def test_a_second_call_replaces() -> None:
    first = tp.install(**MARKED)
    second = tp.install(policy="off")
    assert (tp.installed(), second is first) == (second, False)
    assert region_is() is torch.float32
    tp.install()
    assert region_is() is torch.bfloat16
    assert tp.uninstall() is not first
    assert is_restored()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        MARKED,
        {"policy": "cuda"},
        {"policy": "cuda", "overrides": {"mm": "fp16"}, "cache": "all"},
        {"cache": "none"},
    ],
    ids=str,
)
def test_the_same_again_changes_nothing(arguments: Any) -> None:
    first = tp.install(**arguments)
    torch.compile(torch.relu, backend="eager")(torch.ones(2))  # something to forget
    with mock.patch.object(torch._dynamo, "reset") as reset:
        assert tp.install(**arguments) is first
        with tp.installed_as(**arguments) as again:
            assert again is first
        assert tp.installed() is first
        assert not reset.called
        tp.install(policy="off")
        assert reset.called


BROKEN: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"policy": "no such policy"}, tp.PolicyError, "no such policy"),
    ({"policy": 3}, tp.PolicyError, "int"),
    ({"policy": "no/such/file.toml"}, tp.PolicyError, "file"),
    ({"overrides": {"no_such_op": "fp32"}}, tp.PolicyError, "no_such_op"),
    ({"overrides": {"mm": "fp32_set_opt_dtype"}}, tp.PolicyError, "can use"),
    ({"overrides": {"mm": "fp33"}}, tp.PolicyError, "fp33"),
    ({"overrides": ["mm"]}, tp.PolicyError, "list"),
    ({"overrides": "mm"}, tp.PolicyError, "str"),
    ({"cache": "al"}, tp.errors.OptionError, "'all'"),
    ({"cache": True}, tp.errors.OptionError, "bool"),
]


@pytest.mark.parametrize("before", [None, MARKED], ids=["nothing", "marked"])
@pytest.mark.parametrize(("arguments", "error", "text"), BROKEN, ids=str)
def test_broken_arguments_change_nothing(arguments: Any, error: type[Exception], text: str, before: Any) -> None:
    was = tp.install(**before) if before else None
    state, whose, methods = thread_state(), region_is(), (torch.autocast.__enter__, torch.autocast.__exit__)
    with mock.patch.object(torch._dynamo, "reset") as reset:
        for function in (tp.install, tp.installed_as):
            with pytest.raises(error, match=text):
                function(**arguments).__enter__()
        assert not reset.called
    assert tp.installed() is was
    assert (torch.autocast.__enter__, torch.autocast.__exit__) == methods
    assert (thread_state(), region_is()) == (state, whose)


def test_installed_as_restores_the_previous_installation() -> None:
    outer = tp.install(policy="off")
    with tp.installed_as() as inner:
        assert (tp.installed(), inner is outer) == (inner, False)
        assert region_is() is torch.bfloat16
        with pytest.raises(ZeroDivisionError), tp.installed_as(**MARKED):
            1 / 0  # noqa: B018
        assert tp.installed() is inner
        tp.uninstall()
        assert region_is() is STOCKS
    assert tp.installed() is outer
    assert region_is() is torch.float32
    tp.uninstall()
    with tp.installed_as():
        pass
    assert tp.installed() is None


# --- regions that are open meanwhile


@pytest.mark.parametrize("region", [torch.autocast, tp.stock_autocast, tp.my_autocast])
def test_install_inside_an_open_region(region: Any) -> None:
    before = thread_state()
    with region("cpu", torch.float16):
        inside = thread_state()
        tp.install(**MARKED)
        assert thread_state() == inside
        assert mm_dtype() is torch.float16
        with torch.autocast("cpu"):
            assert mm_dtype() is OURS
        assert thread_state() == inside
    assert thread_state() == before
    assert region_is() is OURS


def test_uninstall_inside_an_open_region() -> None:
    before = thread_state()
    tp.install(**MARKED)
    with torch.autocast("cpu", torch.float16):
        inside = thread_state()
        tp.uninstall()
        assert torch.autocast.__enter__ is ENTER
        assert thread_state() == inside
        assert mm_dtype() is torch.float32
        with torch.autocast("cpu"):
            assert thread_state()["regions"] == 1
        assert thread_state() == inside
    assert thread_state() == before
    assert is_restored()


def test_uninstall_while_another_thread_has_a_region_open() -> None:
    entered, uninstalled, seen = threading.Event(), threading.Event(), []

    def run() -> None:
        before = thread_state()
        with torch.autocast("cpu"):
            entered.set()
            assert uninstalled.wait(60)
            seen.append(mm_dtype())
        seen.append(thread_state() == before)

    tp.install(**MARKED)
    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(60)
    tp.uninstall()
    assert torch.autocast.__enter__ is ENTER
    assert torch.autocast.__exit__ is not EXIT
    assert region_is() is STOCKS
    uninstalled.set()
    thread.join(60)
    assert seen == [OURS, True]
    assert is_restored()


FORK = """
import os, threading, torch, torch_promote as tp
started, over = threading.Event(), threading.Event()
def hold():
    with torch.autocast("cpu"):
        started.set()
        over.wait(60)
def dtype():
    with torch.autocast("cpu"):
        return torch.ones(2, 2).mm(torch.ones(2, 2)).dtype
enter, exit_ = torch.autocast.__enter__, torch.autocast.__exit__
tp.install(overrides={"mm": "fp32"})
thread = threading.Thread(target=hold)
thread.start()
started.wait(60)
with torch.autocast("cpu"):
    child = os.fork()
    if child == 0:
        inherited = tp.installed() is not None and dtype() is torch.float32
        tp.uninstall()
        ends = torch.autocast.__exit__ is not exit_
if child == 0:
    restored = (torch.autocast.__enter__, torch.autocast.__exit__) == (enter, exit_)
    os._exit(0 if inherited and ends and restored and dtype() is torch.bfloat16 else 1)
status = os.waitpid(child, 0)[1]
over.set()
thread.join()
print(status, tp.installed() is not None, dtype())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_inherits_and_changes_its_own() -> None:
    done = run_python(FORK, quiet=True)
    assert done.stdout.split() == ["0", "True", "torch.float32"], done.stderr


# --- importing
