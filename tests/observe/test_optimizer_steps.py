"""`watch_steps`: listeners can be added and removed during a notification; PyTorch has one hook while there are any."""

from __future__ import annotations

import contextlib

import torch
from torch.optim import optimizer as torchs

from torch_promote.observe.surroundings import watch_steps


def step() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    torch.optim.SGD([weight], lr=0.1).step()


def test_each_step_is_told_to_those_who_came_last_first() -> None:
    told: list[str] = []
    before = len(torchs._global_optimizer_post_hooks)
    with watch_steps(lambda: told.append("one")):
        step()
        with watch_steps(lambda: told.append("two")):
            step()
        step()
        assert len(torchs._global_optimizer_post_hooks) == before + 1
    step()
    assert told == ["one", "two", "one", "one"]
    assert len(torchs._global_optimizer_post_hooks) == before


def test_listeners_come_and_go_at_a_step() -> None:
    """PyTorch raises if a hook adds another one during the iteration. Hooks registered later are called as well."""
    told: list[str] = []
    with contextlib.ExitStack() as blocks, contextlib.ExitStack() as inner:

        def first() -> None:
            told.append("first")
            if len(told) == 1:
                inner.enter_context(watch_steps(lambda: told.append("inner")))
            else:
                inner.close()

        blocks.enter_context(watch_steps(first))
        handle = torchs.register_optimizer_step_post_hook(lambda *args: told.append("program"))
        blocks.callback(handle.remove)
        for _ in range(3):
            step()
    assert told == ["first", "program", "inner", "first", "program", "first", "program"]
