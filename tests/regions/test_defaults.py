"""Settings of a whole program: default policies and registered ops."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_promote as tp
from helpers.autoloading import entry_point, variables
from helpers.program_defaults import as_it_was
from helpers.subprocesses import environment, output_of, run_python

__all__ = ["as_it_was", "entry_point"]


HALF, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def exp_dtype() -> torch.dtype:
    """float32 under CUDA's list, float16 under the CPU's."""
    return torch.exp(torch.ones(2, dtype=HALF)).dtype


# --- the default policy


def test_regions_start_from_the_default() -> None:
    assert tp.set_default_policy("cuda") is None
    with tp.my_autocast("cpu"):
        assert exp_dtype() is FP32
        with tp.my_autocast("cpu"):
            assert exp_dtype() is FP32
        with tp.my_autocast("cpu", policy="stock"):
            assert exp_dtype() is HALF
        with tp.stock_autocast("cpu"):
            assert exp_dtype() is FP32
        assert exp_dtype() is FP32
    with tp.my_autocast("cpu", overrides={"exp": "float64"}), tp.my_autocast("cpu", overrides={"log": "float64"}):
        assert exp_dtype() is FP64
    assert exp_dtype() is HALF
    assert tp.set_default_policy(None) == tp.Policy.named("cuda")
    with tp.my_autocast("cpu"):
        assert exp_dtype() is HALF


def test_compiled_functions_see_a_change() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def inside(x: torch.Tensor) -> torch.Tensor:
        with tp.my_autocast("cpu"):
            return torch.exp(x)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def around(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x)

    x = torch.ones(2, dtype=HALF)
    for policy, dtype in ((None, HALF), ("cuda", FP32), (None, HALF), ("cuda", FP32)):
        tp.set_default_policy(policy)
        assert inside(x).dtype is dtype
        with tp.my_autocast("cpu"):
            assert around(x).dtype is dtype


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("cudda", "no policy is called 'cudda'. Closest: cuda."),
        ("nowhere/policy.toml", "nowhere/policy.toml"),
        (3, "got 3 of type int"),
    ],
)
def test_a_wrong_default_changes_nothing(value: object, message: str) -> None:
    tp.set_default_policy("cuda")
    with pytest.raises(tp.PolicyError) as caught:
        tp.set_default_policy(value)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert tp.default_policy() == tp.Policy.named("cuda")


# --- the environment


def imported(policy: str, code: str = "") -> subprocess.CompletedProcess[str]:
    return run_python(f"import torch, torch_promote as tp\n{code}", env=environment(TORCH_PROMOTE_POLICY=policy))


def test_the_environment_names_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    tp.Policy.stock().override({"exp": "float64"}).save(path)
    code = "with tp.my_autocast('cpu'): print(torch.exp(torch.ones(2, dtype=torch.float16)).dtype)"
    asked = {"cuda": "torch.float32", "fp32": "torch.float32", str(path): "torch.float64", "": "torch.float16"}
    for policy, dtype in asked.items():
        result = imported(policy, code)
        assert (result.returncode, result.stdout.strip()) == (0, dtype), result.stderr


def test_a_wrong_environment_is_an_error_at_the_import(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text('format = 1\n\n[cpu]\nsofmax = "fp32"\n')
    for policy, message in (("cudda", "Closest: cuda"), (str(path), f'{path}: [cpu] "sofmax":')):
        result = imported(policy)
        assert (result.returncode, result.stderr.count("Traceback")) == (1, 1)
        assert f"TORCH_PROMOTE_POLICY is {policy!r}" in result.stderr
        assert message in result.stderr
        assert "Correct it, or unset it." in result.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def op() -> Iterator[str]:
    """A custom op that multiplies, with a gradient and a fake kernel."""

    @torch.library.custom_op("torch_promote_test_defaults::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b

    product.register_fake(lambda a, b: torch.empty_like(a * b))
    product.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return "torch_promote_test_defaults::product"


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.torch_promote_test_defaults.product(a, b)
    return result


def test_a_custom_op_follows_the_region(op: str) -> None:
    a, b = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    with tp.register_policy(op, "fp16"):
        for dtype in (BF16, HALF):
            with tp.my_autocast("cpu", dtype):
                result = product(a, b)
            assert result.dtype is dtype
            result.sum().backward()
        assert torch.equal(a.grad, torch.full((2,), 6.0)) if a.grad is not None else False
        with tp.my_autocast("cpu", enabled=False):
            assert product(a, b).dtype is FP32
        with tp.my_autocast("cpu", policy="cuda"):
            assert product(a, b).dtype is BF16
        with tp.my_autocast("cpu", policy="off"):
            assert product(a, b).dtype is FP32
        with tp.my_autocast("cpu", policy="fp32"):
            assert product(a.half(), b.half()).dtype is FP32
        with tp.my_autocast("cpu", overrides={op: "float64"}):
            assert product(a, b).dtype is FP64
        with tp.my_autocast("cpu", policy=tp.Policy.stock().override({op: "float64"})):
            assert product(a, b).dtype is FP64
    with tp.my_autocast("cpu"):
        assert product(a, b).dtype is FP32


def test_change_and_remove(op: str) -> None:
    x = torch.ones(2)

    def dtype() -> torch.dtype:
        with tp.my_autocast("cpu"):
            return product(x, x).dtype

    first = tp.register_policy(op, "fp16")
    second = tp.register_policy(op, "float64", replace=True)
    assert dtype() is FP64
    first.remove()
    assert dtype() is FP64  # another has taken its place
    second.remove()
    second.remove()
    assert dtype() is FP32


def test_an_op_that_is_registered_already(op: str) -> None:
    with tp.register_policy(op, "fp32", device_type="cuda") as handle:
        for again in (op, op + ".default"):
            with pytest.raises(tp.PolicyError, match="already has a registered policy on cuda, 'fp32'"):
                tp.register_policy(again, "lower")
        with tp.register_policy(op, "lower", device_type="cpu"):
            assert len(tp.registered_policies()) == 2
        assert tp.registered_policies() == {(op, "cuda"): tp.CastPolicy.fp32}
        tp.register_policy(op, "lower", replace=True).remove()
        assert not tp.registered_policies()
        handle.remove()
    with tp.register_policy(op, "fp32", replace=True):  # there may be nothing to replace
        assert {device for _, device in tp.registered_policies()} == {"cpu", "cuda", "xpu", "mps"}


def test_stocks_registration_works_where_ours_does_not_apply() -> None:
    @torch.library.custom_op("torch_promote_test_defaults::half", mutates_args=())
    def half(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    half.register_autocast("cpu", HALF)
    x = torch.ones(2)

    def dtype(**policy: object) -> torch.dtype:
        with tp.my_autocast("cpu", **policy):  # type: ignore[arg-type]
            return half(x).dtype  # type: ignore[no-any-return]

    assert dtype() is HALF
    with tp.register_policy("torch_promote_test_defaults::half", "fp16"):
        assert dtype() is BF16
        with tp.stock_autocast("cpu"):
            assert half(x).dtype is HALF
    assert dtype() is HALF
    assert dtype(overrides={"torch_promote_test_defaults::half": "fallthrough"}) is FP32
    with tp.register_policy("torch_promote_test_defaults::half", "fp16", device_type="cuda"):
        assert dtype() is HALF


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("torch_promote_test_defaults::prodct", "fp32"), "torch_promote_test_defaults::prodct"),
        (("torch_promote_test_defaults::product", "fp23"), "no cast policy is called 'fp23'"),
        (("torch_promote_test_defaults::product", "match_self"), "torch_promote_test_defaults::product cannot use"),
        (("torch_promote_test_defaults::product", torch.int8), "torch.int8 is not a floating dtype"),
        (("mm.default", "fp16"), "this is what PyTorch's autocast does"),
    ],
)
def test_invalid_registrations_are_errors(op: str, arguments: tuple[object, object], message: str) -> None:
    with pytest.raises(tp.PolicyError) as caught:
        tp.register_policy(*arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert not tp.registered_policies()


# --- TORCH_PROMOTE_AUTOCAST: `import torch` installs this package, or warns once and changes nothing


#: Prints whether the package is imported, the dtypes of a product and of exp under torch.autocast, what is installed.
PROGRAM = """
import sys, torch
with torch.autocast("cpu"):
    product, exp = torch.ones(2, 2) @ torch.ones(2, 2), torch.exp(torch.ones(2, dtype=torch.float16))
print("torch_promote" in sys.modules, product.dtype, exp.dtype)
if "torch_promote" in sys.modules:
    import torch_promote as tp
    print(tp.installed(), tp.default_policy())
"""
STOCK = ["False torch.bfloat16 torch.float16"]


def run(folder: Path, command: list[str], **more: str) -> tuple[int, str, list[str]]:
    """The status, errors and lines of a Python process, which finds the entry point in a folder."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=variables(folder, **more),
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stderr, done.stdout.splitlines()


def test_nothing_is_imported_unless_asked_for(entry_point: Path) -> None:
    asked = {"TORCH_PROMOTE_POLICY": "nonsense", "TORCH_PROMOTE_CACHE": "nonsense"}
    assert run(entry_point, ["-c", PROGRAM], **asked) == (0, "", STOCK)
    code = f"import _torch_promote_hooks\n_torch_promote_hooks.autoload()\n{PROGRAM}"
    assert output_of(code, env=variables(entry_point, TORCH_PROMOTE_AUTOCAST="0", **asked)).splitlines() == STOCK


def test_the_environment_installs(entry_point: Path) -> None:
    asked = {
        "TORCH_PROMOTE_POLICY": "cuda",
        "TORCH_PROMOTE_CACHE": "all",
        "TORCH_PROMOTE_OVERRIDES": " matmul=fp32, relu=float64,",
    }
    found = run(entry_point, ["-W", "error", "-c", PROGRAM], TORCH_PROMOTE_AUTOCAST="1", **asked)
    installed = "<torch_promote.install(overrides={'matmul': 'fp32', 'relu': 'float64'}, cache='all')>"
    assert found == (0, "", ["True torch.float32 torch.float32", f"{installed} Policy.named('cuda')"])


# --- whatever goes wrong is one warning


#: The last lines of warnings.
WRONG_VARIABLES = [
    ({"TORCH_PROMOTE_AUTOCAST": "yes"}, "TORCH_PROMOTE_AUTOCAST is 'yes'. Legal: 1 (torch_promote runs the regions of"),
    ({"TORCH_PROMOTE_POLICY": "cudda"}, "TORCH_PROMOTE_POLICY is 'cudda': no policy is called 'cudda'. Closest: cuda."),
    ({"TORCH_PROMOTE_POLICY": "no/such.toml"}, "no/such.toml"),
    ({"TORCH_PROMOTE_CACHE": "al"}, "TORCH_PROMOTE_CACHE is 'al': cache says which casts are reused"),
    ({"TORCH_PROMOTE_OVERRIDES": "sofmax=fp32"}, "TORCH_PROMOTE_OVERRIDES is 'sofmax=fp32': no op is called 'sofmax'"),
    ({"TORCH_PROMOTE_OVERRIDES": "softmax"}, "'softmax' is not an override. Write OP=POLICY, as in softmax=fp32."),
]
#: Calls the entry point under each of many environments, and prints the warnings.
MANY = """
import json, os, sys, warnings, torch, _torch_promote_hooks
for variables in json.loads(sys.argv[1]):
    os.environ.update({"TORCH_PROMOTE_AUTOCAST": "1"} | variables)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _torch_promote_hooks.autoload()
    with torch.autocast("cpu"):
        exp = torch.exp(torch.ones(2, dtype=torch.float16)).dtype
    print(json.dumps([str(exp), *(f"{one.category.__name__}: {one.message}" for one in caught)]))
    for name in variables:
        del os.environ[name]
"""


def test_a_wrong_variable_is_one_warning(entry_point: Path) -> None:
    asked = json.dumps([asked for asked, _ in WRONG_VARIABLES])
    output = output_of(MANY, asked, env=variables(entry_point), cwd=entry_point)
    for (_, reason), line in zip(WRONG_VARIABLES, output.splitlines(), strict=True):
        exp, text = json.loads(line)
        assert exp == "torch.float16"
        assert text.startswith("RuntimeWarning: torch_promote is not in use, and torch.autocast stays PyTorch's. ")
        assert reason in text
