"""What the package changes outside of itself: the list that `torch-promote info` prints, against what happens."""

from __future__ import annotations

import json

import pytest

from helpers.subprocesses import environment, run_python
from torch_promote.integrations.side_effects import NEVER_UNDONE, SIDE_EFFECTS

BY_PLACE = {effect.place: effect for effect in SIDE_EFFECTS}

#: In force wherever the package is installed.
INSTALLED = {
    "entry point torch_promote of the group torch.backends",
    "entry point torch_promote_pytest of the group pytest11",
}

AFTER = """
import json
from torch_promote.integrations.side_effects import side_effects_in_force
print(json.dumps(side_effects_in_force()))
"""


def in_force_after(code: str, **variables: str) -> set[str]:
    done = run_python(f"import torch\nimport torch_promote as tp\n{code}\n{AFTER}", env=environment(**variables))
    assert done.returncode == 0, done.stderr
    found = {place for place, in_force in json.loads(done.stdout.splitlines()[-1]).items() if in_force}
    return found - INSTALLED


AT_IMPORT = {effect.place for effect in SIDE_EFFECTS if effect.on_import}


def test_the_import_changes_what_the_list_says_and_nothing_else_of_it() -> None:
    assert in_force_after("") == AT_IMPORT


def test_each_entry_has_texts() -> None:
    assert len(BY_PLACE) == len(SIDE_EFFECTS)
    for effect in SIDE_EFFECTS:
        for text in (effect.what, effect.when, effect.why, effect.undone):
            assert text.endswith("."), effect
        assert set(effect.to_dict()) == {"place", "what", "when", "why", "undone", "on_import", "in_force"}


#: By place: code after which the change is in force. What else it changes is in the same line.
USES = {
    "torch._dynamo": "import torch._dynamo",
    "torch._dynamo TorchCtxManagerClassVariable.call_function": "import torch._dynamo\ntp.install()",
    "asyncio.Handle._run": (
        "import asyncio\nasync def main():\n    with tp.my_autocast('cpu'):\n        pass\nasyncio.run(main())"
    ),
    "torch.utils.checkpoint": "with tp.my_autocast('cpu', policy='cuda'): pass",
    "dispatcher, ops outside the table": "with tp.my_autocast('cpu', overrides={'gelu': 'fp32'}): pass",
    "torch.optim.Optimizer, more hooks": "block = tp.trace(); block.__enter__()",
    "torch.cuda.CUDAGraph": "with tp.my_autocast('cpu', cache='persistent'): pass",
    "torch.autograd._unsafe_preserve_version_counter": "with tp.my_autocast('cpu', cache='all'): pass",
    "torch.autocast.__enter__, __exit__": "tp.install()",
    "nn.Module.forward of single modules": (
        "m = torch.nn.Sequential(torch.nn.Linear(2, 2)); tp.set_module_policy(m, {'0': 'fp32'})"
    ),
    "dispatcher, key TESTING_ONLY_GenericMode": "with tp.crosscheck(): pass",
    "torch._functorch AOTAutogradCacheDetails.__init__": ("import torch._functorch._aot_autograd.autograd_cache"),
}


@pytest.mark.parametrize("place", USES)
def test_a_use_makes_its_change(place: str) -> None:
    assert place not in AT_IMPORT
    assert place in in_force_after(USES[place])


def test_each_change_is_tried() -> None:
    left = set(BY_PLACE) - AT_IMPORT - set(USES) - INSTALLED
    assert left == {
        "DistributedDataParallel.__init__, FSDPState.init",
        "torch.fx.Tracer.trace, nn.Module._replicate_for_data_parallel, torch.ao.quantization swap_module",
    }


def test_a_region_of_pytorchs_own_policy_makes_no_change() -> None:
    code = "with tp.my_autocast('cpu'): torch.ones(2, 2) @ torch.ones(2, 2)"
    assert in_force_after(code) == AT_IMPORT


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("torch.autocast.__enter__, __exit__", "tp.install(); tp.uninstall()"),
        (
            "nn.Module.forward of single modules",
            "m = torch.nn.Linear(2, 2); tp.set_module_policy(m, {'': 'fp32'}); tp.remove_module_policy(m)\n"
            "assert 'forward' not in vars(m) and not m._forward_pre_hooks",
        ),
    ],
)
def test_what_is_undone(place: str, code: str) -> None:
    assert BY_PLACE[place].undone != NEVER_UNDONE
    in_force = in_force_after(code)
    if place.startswith("torch.autocast"):
        assert place not in in_force


def test_finders_remove_themselves() -> None:
    code = "from torch_promote.integrations.after_import import waiting_for\nbefore = waiting_for()\n"
    code += "import torch._dynamo\nassert 'torch._dynamo' in before and 'torch._dynamo' not in waiting_for()"
    in_force_after(code)
