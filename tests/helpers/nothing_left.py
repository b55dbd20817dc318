"""A fixture that checks that runs of a step restore all global state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import torch_promote as tp


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Any:
    def present() -> Any:
        stance = torch._dynamo.eval_frame._stance.stance
        dtypes = [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")]
        hooks = dict(_global_optimizer_pre_hooks), dict(_global_optimizer_post_hooks)
        # A step that installs the same again may leave an equal installation.
        return tp.default_policy(), repr(tp.installed()), stance, dtypes, hooks, torch.is_grad_enabled()

    before = present()
    yield
    assert present() == before
