"""A trace does not change a program's bits, random numbers, memory, hooks or warnings."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_globals
from torch.utils._pytree import tree_leaves

import torch_promote as tp
from helpers.comparison import assert_same
from helpers.thread_state import thread_state
from helpers.traced_programs import Block
from torch_promote.reading.trace import trace


def _fast_encoder() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_fast_paths_of_attention_are_taken(grad: Any) -> None:
    """PyTorch's transformer layers have a fused path, which they skip if there is a hook."""
    model, x = _fast_encoder()
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    with grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model(x), model(x, src_key_padding_mask=mask), attention(x, x, x)
        with trace(model) as report:
            got = model(x), model(x, src_key_padding_mask=mask), attention(x, x, x)
    for ours, plain in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert_same(ours, plain)
    ops = {call.op for call in report.calls}
    assert {"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"} <= ops
    assert {"layers.0", "layers.1"} <= {call.module for call in report.calls}


def test_no_hook_no_state_and_no_warning_stay(recwarn: pytest.WarningsRecorder) -> None:
    def hooks() -> dict[str, int]:
        found = {n: v for n, v in vars(module_globals).items() if n.startswith("_global_") and hasattr(v, "__len__")}
        return {name: len(value) for name, value in found.items()}

    model = Block()
    before, state = hooks(), thread_state()
    inside: list[Any] = []
    model.register_forward_hook(lambda *_: inside.append(hooks()))
    with trace(model), tp.my_autocast("cpu"):
        model(torch.ones(1, 2, 8))
    assert inside == [before]
    assert hooks() == before
    assert thread_state() == state
    assert not recwarn.list


def _ops_of(traced: Any) -> list[str]:
    return [node.kind() for node in traced.inlined_graph.nodes()]


def test_jit_traces_and_scripts_are_the_same() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(1, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        expected = _ops_of(torch.jit.trace(model, x))
        scripted = torch.jit.script(model)
        with trace(model) as report:
            assert _ops_of(torch.jit.trace(model, x, check_trace=False)) == expected
            before = len(report.calls)
            assert_same(scripted(x), model(x))
    assert [call.op for call in report.calls[before:]].count("aten::tanh") == 2


def test_no_tensor_is_kept_alive() -> None:
    gc.disable()
    try:
        model = nn.Sequential(Block(), Block())
        with trace(model) as report:
            with tp.my_autocast("cpu"):
                x = torch.randn(2, 3, 8)
                hidden = model(x)
            hidden.float().sum().backward()
            kept = [weakref.ref(one) for one in (x, hidden, model[0].mix.weight)]
            del x, hidden
            assert [one() is None for one in kept] == [True, True, False]
            del model
            gc.collect()
            assert kept[2]() is None
    finally:
        gc.enable()
    assert report.casts()


def test_gradients_are_accumulated_in_place_as_without() -> None:
    """Autograd reuses a gradient's memory if it holds the only reference."""

    def run(around: Callable[[], Any]) -> list[bool]:
        weight = torch.ones(4, requires_grad=True)
        taken: list[int] = []
        weight.register_post_accumulate_grad_hook(lambda w: taken.append(w.grad.data_ptr()))
        with around():
            for _ in range(3):
                (weight * torch.ones(4)).sum().backward()
        return [taken[0] == one for one in taken]

    assert run(trace) == run(contextlib.nullcontext) == [True] * 3


def test_memory_is_bounded() -> None:
    x = torch.ones(2)
    with trace(max_calls=100) as report:
        tracemalloc.start()
        try:
            for _ in range(2_600):
                x.exp()
            grown = []
            for _ in range(3):  # a thread of the test runner may allocate in one of them
                before = tracemalloc.get_traced_memory()[0]
                for _ in range(3_000):
                    x.exp()
                grown.append(tracemalloc.get_traced_memory()[0] - before)
        finally:
            tracemalloc.stop()
    assert (len(report.calls), report.dropped, report.total.calls) == (100, 11_500, 11_600)
    assert min(grown) < 5_000
