"""Names of ops as in Python, and what is said about names that no op has."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import torch_promote as tp
from helpers.policy_errors import NAMED, NOT_AN_OP
from torch_promote.policy.op_names import closest_ops, find_op, find_overloads, matches, name_op

OPS = sorted(
    {name.partition(".")[0][6:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
)

# --- what resolves

SAME: dict[str, list[Any]] = {
    "softmax": [
        "torch.softmax",
        "F.softmax",
        "nn.functional.softmax",
        "torch.nn.functional.softmax",
        "Tensor.softmax",
        "torch.Tensor.softmax",
        "torch.ops.aten.softmax",
        torch.softmax,
        F.softmax,
        torch.Tensor.softmax,
        torch.ops.aten.softmax,
    ],
    "mm": ["torch.mm", "torch.ops.aten.mm", torch.mm, torch.Tensor.mm],
    "mm.default": ["torch.ops.aten.mm.default", torch.ops.aten.mm.default],
    "softmax.int": ["torch.ops.aten.softmax.int"],
    "matmul": [torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, "Tensor.__matmul__"],
    "layer_norm": [F.layer_norm, "F.layer_norm", torch.layer_norm],
    "linear": [F.linear, "F.linear"],
    "cross_entropy_loss": [F.cross_entropy, "F.cross_entropy"],
    "nll_loss_nd": [F.nll_loss],
    "mse_loss": [F.mse_loss],
    "scaled_dot_product_attention": [F.scaled_dot_product_attention],
    "max_pool2d": [F.max_pool2d],
    "log_sigmoid": [F.logsigmoid],
    "linalg_norm": [torch.linalg.norm, "torch.linalg.norm"],
    "fft_fft": [torch.fft.fft, "torch.fft.fft"],
    "special_expit": [torch.special.expit],
    "einsum": [torch.einsum, torch.functional.einsum],
    "linalg_v*": ["torch.ops.aten.linalg_v*"],
}


@pytest.mark.parametrize(("name", "keys"), SAME.items(), ids=SAME)
def test_a_name_in_python_means_the_op(name: str, keys: list[Any]) -> None:
    for key in keys:
        assert find_overloads(key) == find_overloads(name), key
        assert find_overloads(find_op(name_op(key))) == find_overloads(name), key
        assert matches(find_overloads(name)[0], key) if isinstance(key, str) else True


def test_everywhere_that_ops_are_named(tmp_path: Path) -> None:
    x = torch.ones(2, 3)

    def dtypes(**options: Any) -> tuple[torch.dtype, torch.dtype]:
        with tp.my_autocast("cpu", **options):
            return F.softmax(x, -1).dtype, torch.mm(x.T, x).dtype

    expected = (torch.float64, torch.float32)
    overrides = {F.softmax: "float64", "torch.mm": "fp32"}
    assert dtypes(overrides=overrides) == expected
    policy = tp.Policy.stock().override(overrides)
    assert dtypes(policy=policy) == expected
    assert policy.lookup(torch.Tensor.mm, "cpu") is tp.CastPolicy.fp32
    file = tmp_path / "mine.toml"
    file.write_text('format = 1\n[all]\n"F.softmax" = "float64"\n"torch.ops.aten.mm" = "fp32"\n')
    assert tp.Policy.load(file) == policy
    with tp.register_policy(F.softmax, "float64"), tp.register_policy("torch.mm", "fp32"):
        assert dtypes() == expected
    model = nn.Softmax(-1)
    tp.set_module_policy(model, {"": {"F.softmax": "float64"}})
    assert tp.module_policies(model) == {"": {"aten::softmax": "float64"}}
    table = tp.Policy.stock().override_modules({"head": {"Tensor.softmax": "lower"}}).modules
    assert table == tp.Policy.stock().override_modules({"head": {"softmax": "lower"}}).modules


def test_a_region_with_functions_is_copied_pickled_and_printed() -> None:
    region = tp.my_autocast("cpu", overrides={torch.mm: "fp32", "F.softmax": "lower"})
    assert repr(region) == "my_autocast('cpu', overrides={'aten::mm': 'fp32', 'F.softmax': 'lower'})"
    for other in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        assert repr(other) == repr(region)
        with other:
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


def test_in_a_compiled_function() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with tp.my_autocast("cpu", dtype="half", overrides={F.softmax: "lower", "torch.mm": "fp32"}):
            return F.softmax(x, -1), torch.mm(x, x)

    assert [y.dtype for y in compiled(torch.ones(2, 2))] == [torch.float16, torch.float32]


# --- what does not

MODULE = "is a module, and overrides are for ops. For the modules of a model, write: torch_promote.set_module_policy"


class Mine(nn.LayerNorm): ...


NOT_OPS: list[tuple[Any, str]] = [
    *(
        (key, f'nn.LayerNorm {MODULE}(model, {{nn.LayerNorm: "fp32"}}). Or name the op, wherever it is called: '
        "'layer_norm'.")
        for key in (nn.LayerNorm, nn.LayerNorm(3), "nn.LayerNorm", "torch.nn.LayerNorm")
    ),
    (Mine(3), f'Mine {MODULE}(model, {{Mine: "fp32"}}).'),
    (
        nn.MaxPool2d,  # F._max_pool2d is no op
        f'nn.MaxPool2d {MODULE}(model, {{nn.MaxPool2d: "fp32"}}). Or name the op, wherever it is called: '
        "'max_pool2d'.",
    ),
    (nn.Softmin, f'nn.Softmin {MODULE}(model, {{nn.Softmin: "fp32"}}).'),
    ("nn.Transformer", f'nn.Transformer {MODULE}(model, {{nn.Transformer: "fp32"}}).'),
    (
        "Linear",
        f"no op is called 'Linear'. nn.Linear {MODULE}(model, {{nn.Linear: \"fp32\"}}). Or name the op, wherever it is "
        "called: 'linear'.",
    ),
    (
        "cross_entropy",
        "no op is called 'cross_entropy'. F.cross_entropy calls the op 'cross_entropy_loss'. Use that name.",
    ),
    (
        "softmin",
        "no op is called 'softmin'. F.softmin is not an op. It calls several, or one of several, such as neg, softmax. "
        "Name the ops that you mean.",
    ),
    (
        F.normalize,
        "F.normalize is not an op. It calls several, or one of several, such as linalg_vector_norm, clamp_min, div. "
        "Name the ops that you mean.",
    ),
    (
        torch.from_numpy,
        "torch.from_numpy is not an op, and this package does not know which ops it calls. Name those ops; "
        f"torch_promote.trace shows them. {NAMED}",
    ),
    ("torch.sofmax", f"no op is called 'torch.sofmax'. Closest: softmax. {NAMED}"),
    ("torch.compile", f"{NOT_AN_OP}'torch.compile'. {NAMED}"),
    ("torch.nn", f"no op is called 'torch.nn'. {NAMED}"),
    (
        "F.*_loss",
        "the pattern 'F.*_loss' matches no op. A pattern has to match names of ops: write '*_loss'.",
    ),
    (
        "torch.ops.nolib.op",
        "no op is registered in namespace 'nolib'. Import the library that defines 'nolib::op' first.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text"), NOT_OPS, ids=[str(getattr(key, "__name__", key))[:30] for key, _ in NOT_OPS])
def test_what_is_no_op(key: Any, text: str) -> None:
    with pytest.raises(tp.PolicyError) as error:
        tp.Policy.stock().override({key: "fp32"})
    assert str(error.value) == text


TYPOS = {
    "sofmax": "softmax",
    "softmx": "softmax",
    "sotfmax": "softmax",
    "Softmax": "softmax",
    "soft_max": "softmax",
    "logsoftmax": "log_softmax",
    "layernorm": "layer_norm",
    "layer_nrom": "layer_norm",
    "groupnorm": "group_norm",
    "batchnorm": "batch_norm",
    "matmull": "matmul",
    "mamtul": "matmul",
    "mat_mul": "matmul",
    "liner": "linear",
    "lienar": "linear",
    "conv_2d": "conv2d",
    "cov2d": "conv2d",
    "exo": None,
    "bernouli": "bernoulli",
    "embeding": "embedding",
    "dropuot": "dropout",
    "cumsm": "cumsum",
    "binary_crossentropy": "binary_cross_entropy",
    "scaled_dot_product": "scaled_dot_product_attention",
    "attention": "scaled_dot_product_attention",
    "entropy": "binary_cross_entropy",
    "layer": "layer_norm",
    "LayerNrom": "layer_norm",
    "addmn": "addmm",
    "relus": None,
    "epx": "exp",
}


@pytest.mark.parametrize(("typo", "meant"), TYPOS.items())
def test_a_typo_gets_the_op_that_was_meant_first(typo: str, meant: str | None) -> None:
    found = closest_ops(typo, OPS)
    assert found[:1] == ([meant] if meant else [])


NONSENSE = """
torch nn F Tensor model net train test foo bar baz xyz abc qux head block attn transformer encoder resnet mylib custom
kernel forward loss_fn optimizer fp16 bfloat16 float32 cuda cpu lower my_op amp autocast banana hello world qqqqqq _ _x
é 1 12 everything default weights mlp ffn qkv proj embeddings_table
"""


@pytest.mark.parametrize("name", NONSENSE.split())
def test_nonsense_gets_no_suggestion(name: str) -> None:
    assert closest_ops(name, OPS) == []
