"""The package imported again: reloaded, after an import that failed, and after deletion from sys.modules."""

from __future__ import annotations

import pytest

from helpers.subprocesses import environment, run_python


def run(code: str, **variables: str) -> str:
    before = "import importlib, sys, warnings, torch\nwarnings.simplefilter('error', RuntimeWarning)\n"
    done = run_python(before + code, env=environment(**variables), finalize=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


REGISTERED = """
def registered():
    return (
        len(sys.meta_path),
        len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks),
        len(torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS),
        torch.fx.Tracer.trace,
        __import__("asyncio").Handle._run,
    )
"""


def test_reloaded() -> None:
    """Nothing is registered twice, and a default that was set since is kept."""
    code = f"""
import torch_promote as tp
{REGISTERED}
assert str(tp.default_policy()) == "Policy.named('cuda')"
tp.set_default_policy(None)
before = registered()
assert importlib.reload(tp) is tp
assert registered() == before
assert tp.default_policy() is None
with tp.my_autocast("cpu"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
"""
    run(code, TORCH_PROMOTE_POLICY="cuda")


def test_imported_after_an_import_that_failed() -> None:
    code = f"""
import os
for _ in range(2):
    try:
        import torch_promote
    except ValueError as error:
        assert "TORCH_PROMOTE_POLICY" in str(error)
    else:
        raise AssertionError("it was imported")
{REGISTERED}
before = registered()
del os.environ["TORCH_PROMOTE_POLICY"]
import torch_promote as tp
assert registered() == before
with tp.my_autocast("cpu"):
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
"""
    run(code, TORCH_PROMOTE_POLICY="no policy")


@pytest.mark.parametrize("kept", ["", "torch_promote._C"])
def test_deleted_from_the_modules(kept: str) -> None:
    code = f"""
import torch_promote
for name in [name for name in sys.modules if name.partition(".")[0] == "torch_promote" and name != {kept!r}]:
    del sys.modules[name]
try:
    import torch_promote
except ImportError as error:
    assert type(error).__name__ == "ExtensionError"
    assert "importlib.reload(torch_promote) works" in str(error), error
else:
    raise AssertionError("it was imported")
"""
    run(code)
