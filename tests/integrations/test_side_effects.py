"""docs/side_effects.md lists the changes that importing and using the package makes, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

from helpers.subprocesses import environment, run_python

PAGE = (Path(__file__).parents[2] / "docs" / "side_effects.md").read_text(encoding="utf-8")

#: By place on the page: an expression that is true while the change is in force, and code that makes the change.
AT_IMPORT = {
    "dispatcher, key AutocastPrivateUse1": "has_kernel('aten::mm', 'AutocastPrivateUse1')",
    "higher-order operators": (
        "torch._C._dispatch_key_parse('AutocastPrivateUse1') in"
        " torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS"
    ),
    "flex_attention": "has_kernel('aten::flex_attention', 'AutocastPrivateUse1')",
    "torch.utils._pytree": "tp.Policy in torch.utils._pytree.SUPPORTED_NODES",
    "torch.optim.Optimizer": "count_of_ours(optimizer._global_optimizer_post_hooks) == 1",
    "torch.clear_autocast_cache": "is_ours(torch.clear_autocast_cache)",
    "sys.meta_path": "'torch._dynamo' in waiting_for()",
    "fork": "True",
}
ON_USE = {
    "torch._dynamo": (
        "any(kind.__module__.startswith('torch_promote.') for kind in kinds_of_dynamo())",
        "import torch._dynamo\nassert 'torch._dynamo' not in waiting_for()",
    ),
    "torch._functorch AOTAutogradCacheDetails.__init__": (
        "is_ours(found('torch._functorch._aot_autograd.autograd_cache', 'AOTAutogradCacheDetails.__init__'))",
        "torch.compile(lambda x: x + 1, backend='aot_eager')(torch.ones(2))",
    ),
    "AOTDispatchAutograd.post_compile": (
        "is_ours(found('torch._functorch._aot_autograd.runtime_wrappers', 'AOTDispatchAutograd.post_compile'))",
        "torch.compile(lambda x: x + 1, backend='aot_eager')(torch.ones(2))",
    ),
    "torch.autograd._unsafe_preserve_version_counter": (
        "is_ours(torch.autograd.grad_mode._unsafe_preserve_version_counter.__exit__)",
        "with tp.my_autocast('cpu', cache='all'): pass",
    ),
    "asyncio.Handle._run": (
        "is_ours(asyncio.Handle._run)",
        "async def main():\n    with tp.my_autocast('cpu'): pass\nasyncio.run(main())",
    ),
    "torch.utils.checkpoint": (
        "type(vars(torch.utils.checkpoint._CheckpointFrame).get('recompute_fn')).__module__.startswith('torch_promote.')",
        "with tp.my_autocast('cpu', policy='cuda'): pass",
    ),
    "dispatcher, ops outside the table": (
        "has_kernel('aten::gelu', 'AutocastPrivateUse1')",
        "with tp.my_autocast('cpu', overrides={'gelu': 'fp32'}): pass",
    ),
    "torch.cuda.CUDAGraph": (
        "is_ours(torch.cuda.CUDAGraph.replay)",
        "with tp.my_autocast('cpu', cache='persistent'): pass",
    ),
    "torch._dynamo TorchCtxManagerClassVariable.call_function": (
        "is_ours(found('torch._dynamo.variables.torch', 'TorchCtxManagerClassVariable.call_function'))",
        "tp.install()",
    ),
    "threading.setprofile": (
        "is_ours(__import__('threading').getprofile())",
        "threads = tp.trace()\nthreads.__enter__()",
    ),
    "torch.optim.Optimizer, more hooks": (
        "count_of_ours(optimizer._global_optimizer_post_hooks) > 1",
        "block = tp.trace()\nblock.__enter__()",
    ),
    "torch.autocast.__enter__, __exit__": (
        "is_ours(torch.amp.autocast_mode.autocast.__enter__)",
        "tp.installed().remove()\nassert not is_ours(torch.amp.autocast_mode.autocast.__enter__)\ntp.install()",
    ),
    "nn.Module.__call__": (
        "is_ours(torch.nn.Module.__call__)",
        "import tempfile\n"
        "with tempfile.NamedTemporaryFile('w', suffix='.toml') as file:\n"
        "    file.write('format = 2\\n[modules.head]\\npolicy = \"fp32\"')\n"
        "    file.flush()\n"
        "    os.environ['TORCH_PROMOTE_POLICY'] = file.name\n"
        "    importlib.import_module('torch_promote.regions.defaults').use_environment()\n"
        "    tp.set_default_policy(None)",
    ),
    "nn.Module.forward of single modules": (
        "'forward' in vars(linear)",
        "tp.set_module_policy(linear, {'': 'fp32'})\ntp.remove_module_policy(linear)\n"
        "assert 'forward' not in vars(linear) and not linear._forward_pre_hooks\n"
        "tp.set_module_policy(linear, {'': 'fp32'})",
    ),
    "torch.fx.Tracer.trace, nn.Module._replicate_for_data_parallel": (
        "is_ours(torch.fx.Tracer.trace)",
        "tp.set_module_policy(linear, {'': 'fp32'})",
    ),
    "dispatcher, key TESTING_ONLY_GenericMode": (
        "torch._C._dispatch_has_backend_fallback(torch._C._dispatch_key_parse('TESTING_ONLY_GenericMode'))",
        "with tp.crosscheck(): pass",
    ),
}

PROGRAM = """
import asyncio, importlib, json, os, sys
import torch, torch.utils.checkpoint
from torch.optim import optimizer
import torch_promote as tp

linear = torch.nn.Linear(2, 2)

def waiting_for():
    return [getattr(finder, "name", None) for finder in sys.meta_path]

def is_ours(function):
    code = getattr(function, "__code__", None)
    return code is not None and os.path.abspath(code.co_filename).startswith(os.path.dirname(tp.__file__))

def count_of_ours(hooks):
    return sum(map(is_ours, hooks.values()))

def found(module, path):
    value = sys.modules.get(module)
    for name in path.split("."):
        value = getattr(value, name, None)
    return value

def has_kernel(op, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)

def kinds_of_dynamo():
    builder = found("torch._dynamo.variables.builder", "VariableBuilder")
    return () if builder is None else builder._type_dispatch_impl(False)

assert not torch._C._is_any_autocast_enabled() and "torch._dynamo" not in sys.modules
at_import, on_use = json.loads(sys.argv[1])
for place, expression in at_import.items():
    assert eval(expression), place
for place, (expression, _) in on_use.items():
    assert not eval(expression), place
with tp.my_autocast("cpu"):
    torch.ones(2, 2) @ torch.ones(2, 2)
for place, (expression, _) in on_use.items():
    assert not eval(expression), f"{place}, after a region of PyTorch's own policy"
for place, (expression, use) in on_use.items():
    exec(use)
    assert eval(expression), place
"""


def places(heading: str) -> list[str]:
    """Returns the first column of the table under a heading of the page."""
    table = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| (?!place)([^|]+?) \|", table.replace("`", "").replace("tp.", ""), re.MULTILINE)


def test_the_page_lists_what_is_tried_here() -> None:
    assert places("Importing the package") == list(AT_IMPORT)
    assert sorted(places("Importing other modules, and using features")) == sorted(ON_USE)


def test_each_change_is_made_when_the_page_says() -> None:
    done = run_python(PROGRAM, json.dumps([AT_IMPORT, ON_USE]), env=environment())
    assert done.returncode == 0, done.stderr
