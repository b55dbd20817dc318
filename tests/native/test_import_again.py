"""The package imported again: after deletion from sys.modules, and with importlib.reload."""

from __future__ import annotations

import pytest

from helpers.subprocesses import environment, run_python

# What registers something with PyTorch or Python, for the whole process.
USES = {
    "nothing": "",
    "everything": """
import asyncio, torch._dynamo, torch.utils.checkpoint
tp.set_default_policy("cuda")
model = torch.nn.Sequential(torch.nn.Linear(4, 4))
tp.set_module_policy(model, {"0": "fp32"})
compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
def use(tp):
    x = torch.ones(2, 4, requires_grad=True)
    async def step():
        with tp.my_autocast("cpu", overrides={"matmul": "fp32"}):
            await asyncio.sleep(0)
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    with tp.my_autocast("cpu", overrides={"linear": "fp32"}, cache="persistent"):
        torch.utils.checkpoint.checkpoint(lambda x: model[0].weight @ x.t(), x, use_reentrant=False).sum().backward()
        assert model(x).dtype is compiled(x).dtype is torch.float32
    torch.optim.SGD(model.parameters()).step()
    with tp.my_autocast("cpu"):
        assert torch.exp(x.half()).dtype is torch.float32  # the default policy
    with tp.promotion("numpy"):
        assert (torch.ones(1, dtype=torch.int32) + torch.ones(1)).dtype is torch.float64
    with tp.crosscheck() as report, tp.my_autocast("cpu"):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert not report.mismatches
    assert asyncio.run(step()) is torch.float32
use(tp)
""",
}
DELETE = """
for name in [name for name in sys.modules if name.partition(".")[0] == "torch_promote"]:
    del sys.modules[name]
"""
AGAIN = {
    "deleted": f"{DELETE}import torch_promote as again",
    "deleted, and a submodule imported": f"{DELETE}import torch_promote.policy.policy, torch_promote as again",
    "only the package deleted": "del sys.modules['torch_promote']\nimport torch_promote as again",
    "reloaded": "again = importlib.reload(tp)",
    "deleted twice": f"{DELETE}import torch_promote\n{DELETE}import torch_promote as again",
}


def run(code: str, **variables: str) -> str:
    before = "import importlib, sys, warnings, torch\nwarnings.simplefilter('error', RuntimeWarning)\n"
    done = run_python(before + code, env=environment(**variables), finalize=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("used", "how"),
    [
        *(("nothing", how) for how in AGAIN),
        *(pytest.param("everything", how, marks=pytest.mark.slow) for how in ("deleted twice", "reloaded")),
    ],
)
def test_imported_again(used: str, how: str) -> None:
    """The modules of the first import are used again, and nothing is registered twice."""
    code = f"""
import torch_promote as tp
{USES[used]}
def registered():
    return (
        len(sys.meta_path),
        len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks),
        len(torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS),
        len(torch.utils._pytree.SUPPORTED_NODES),
        torch.fx.Tracer.trace,
        __import__("asyncio").Handle._run,
        sys.modules["torch.ao.quantization.quantize"].swap_module,
    )
before, modules = registered(), {{name: module for name, module in sys.modules.items() if "torch_promote" in name}}
region = tp.my_autocast("cpu")
{AGAIN[how]}
changed = [name for name, module in modules.items() if sys.modules.get(name) is not module]
assert changed in ([], ["torch_promote"]), changed
assert again.my_autocast is tp.my_autocast
for package in (tp, again):
    with package.my_autocast("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    {"use(package)" if used == "everything" else ""}
with region:
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
assert registered() == before, (before, registered())
"""
    run(code)


@pytest.mark.parametrize("how", ["deleted", "reloaded"])
def test_the_environment_is_read_once(how: str) -> None:
    """A default that was set since is kept."""
    code = f"""
import torch_promote as tp
assert str(tp.default_policy()) == "Policy.named('cuda')"
tp.set_default_policy(None)
{AGAIN[how]}
assert again.default_policy() is None
"""
    run(code, TORCH_PROMOTE_POLICY="cuda")


def test_imported_again_before_dynamo_is() -> None:
    """Both finders that wait for the import of Dynamo are one."""
    code = f"""
import torch_promote as tp
finders = len(sys.meta_path)
{AGAIN["deleted"]}
importlib.reload(again)
assert len(sys.meta_path) == finders
@torch.compile(backend="aot_eager", fullgraph=True)
def function(x):
    with again.my_autocast("cpu"):
        return x @ x
assert function(torch.ones(2, 2)).dtype is torch.bfloat16
"""
    run(code)
