"""The models with casts by hand match the models under autocast bit for bit; counts of casts and memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp
from torch_promote.bench.by_hand import cast_before
from torch_promote.bench.cases import ALREADY_CAST, HAND, LOW, OURS, PLAIN, STOCK, Settings
from torch_promote.bench.casts import count_casts
from torch_promote.bench.memory import peak_bytes
from torch_promote.bench.steps import MODELS, Step, Subject, evaluate, forward, measured, subject, train
from torch_promote.bench.suite_models import evaluation_steps, training_steps

SIZES = (Settings(tiny=True), Settings())
TINY = SIZES[0]
STOCK_REGION = partial(tp.stock_autocast, "cpu", LOW)
OUR_REGION = partial(tp.my_autocast, "cpu", LOW)

#: Models in which one cast by hand serves several consumers, so that gradients are summed in another dtype than
#: stock's.
SHARED = {"Llama-like", "Llama-like, no rotary"}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("settings", SIZES, ids=["tiny", "whole"])
def test_outputs_by_hand_have_the_bits_of_autocast(model: str, settings: Settings) -> None:
    made = subject(model, settings)
    stock = forward(made.net, made.x, STOCK_REGION)()
    assert stock.dtype is LOW
    assert not torch.equal(stock.float(), forward(made.net, made.x)())
    by_hand = {"ours": forward(made.net, made.x, OUR_REGION), "hand": forward(made.by_hand, made.x)}
    for name, step in {**by_hand, "cast before": forward(cast_before(made.by_hand), made.x)}.items():
        found = step()
        assert (name, found.dtype, torch.equal(found, stock)) == (name, LOW, True)


def _gradients(net: nn.Module, made: Subject, stock: bool) -> dict[str, Tensor]:
    with tp.stock_autocast("cpu", LOW, enabled=stock):
        loss = nn.functional.mse_loss(net(made.x).float(), made.target)
    loss.backward()
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def test_gradients_by_hand_have_the_bits_of_autocast_unless_a_cast_is_shared(model: str) -> None:
    made = subject(model, TINY)
    stock, hand = _gradients(made.net, made, True), _gradients(made.by_hand, made, False)
    assert list(stock) == list(hand) == [name for name, _ in made.net.named_parameters()]
    assert all(hand[name].dtype is torch.float32 for name in hand)
    same = {name for name in stock if torch.equal(stock[name], hand[name])}
    assert (same == set(stock)) == (model not in SHARED)
    for name in stock:
        torch.testing.assert_close(hand[name], stock[name], rtol=0, atol=0.02 * stock[name].abs().max().item())


def test_a_subject_is_the_same_at_every_call_and_leaves_the_seed_alone(model: str) -> None:
    state = torch.get_rng_state()
    first, second = subject(model, TINY), subject(model, TINY)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.x, second.x)
    assert torch.equal(first.target, second.target)
    for net in (first.by_hand, second.net):
        for name, tensor in first.net.state_dict().items():
            assert torch.equal(net.state_dict()[name], tensor)


def test_models_have_sizes_for_tests_for_counts_and_for_times_on_a_gpu() -> None:
    def size(settings: Settings) -> int:
        with torch.device("meta"):
            net, same, x = MODELS["Llama-like"](settings)
            assert net(x).shape == same(x).shape == x.shape
        return sum(parameter.numel() for parameter in net.parameters()) + x.numel()

    sizes = [size(settings) for settings in (TINY, Settings("cuda", counted=True), Settings(), Settings("cuda"))]
    assert sizes == sorted(set(sizes))


def test_a_model_that_is_cast_before_leaves_its_original_alone(model: str) -> None:
    made = subject(model, TINY)
    low = cast_before(made.by_hand)
    assert {parameter.dtype for parameter in made.by_hand.parameters()} == {torch.float32}
    assert LOW in {parameter.dtype for parameter in low.parameters()}
    assert count_casts(forward(low, made.x), low.parameters())["weights"] == 0


# --- steps


def test_a_training_step_has_a_gradient_and_lets_it_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made = subject("MLP", TINY)
    before = [parameter.clone() for parameter in made.net.parameters()]
    backwards: list[bool] = []
    grads: list[bool] = []
    backward, zero_grad = Tensor.backward, made.net.zero_grad

    def noted(loss: Tensor) -> None:
        backwards.append(torch.is_autocast_enabled("cpu"))
        backward(loss)

    def letting_go(set_to_none: bool) -> None:
        grads.extend(parameter.grad is not None for parameter in made.net.parameters())
        zero_grad(set_to_none=set_to_none)

    monkeypatch.setattr(Tensor, "backward", noted)
    monkeypatch.setattr(made.net, "zero_grad", letting_go)
    train(made, made.net, STOCK_REGION, batches=3)()
    assert backwards == [False] * 3
    assert grads == [True] * 6
    assert all(parameter.grad is None for parameter in made.net.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, made.net.parameters(), strict=True))


def test_an_evaluation_loop_enters_a_region_for_each_batch_and_records_nothing() -> None:
    seen: list[tuple[bool, bool]] = []
    entered: list[bool] = []

    def net(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return x

    def region() -> tp.stock_autocast:
        entered.append(True)
        return tp.stock_autocast("cpu", LOW)

    evaluate(net, torch.ones(1), region, batches=3)()
    assert (seen, entered) == ([(False, True)] * 3, [True] * 3)


# --- casts


def _counts(step: Step, net: nn.Module) -> tuple[int, int, int]:
    casts = count_casts(step, net.parameters())
    return casts["weights"], casts["activations"], casts["gradients"]


@pytest.mark.parametrize("region", [STOCK_REGION, OUR_REGION], ids=["stock", "ours"])
def test_casts_of_a_forward(region: Callable[[], object]) -> None:
    def casts(model: str) -> tuple[int, int, int]:
        made = subject(model, TINY)
        return _counts(forward(made.net, made.x, region), made.net)  # type: ignore[arg-type]

    # Three layers of a weight and a bias, and the input.
    assert casts("MLP") == (6, 1, 0)
    # Of one block q, k, v, o, gate, up and down, and the head. The inputs of q, k, v, gate, up and the head, and twice
    # a rotated tensor.
    assert casts("Llama-like") == (8, 8, 0)
    assert casts("Llama-like, no rotary") == (8, 6, 0)
    # Three convolutions, and the weight and bias of the head; the picture.
    assert casts("conv net") == (5, 1, 0)


def test_casts_by_hand() -> None:
    def casts(model: str) -> tuple[int, int, int]:
        made = subject(model, TINY)
        return _counts(forward(made.by_hand, made.x), made.by_hand)

    # One cast for q, k and v, and one for gate and up.
    assert casts("Llama-like") == (8, 5, 0)
    assert casts("Llama-like, no rotary") == (8, 3, 0)
    assert casts("MLP") == (6, 1, 0)


def test_casts_in_the_backward_are_those_of_gradients() -> None:
    made = subject("MLP", TINY)
    # The output, for the loss; back from there, and each weight's gradient back to float32.
    assert _counts(train(made, made.net, STOCK_REGION), made.net) == (6, 2, 7)
    assert _counts(train(made, made.net, STOCK_REGION, batches=2), made.net) == (12, 4, 14)


def test_copies_in_one_dtype_and_other_ops_are_no_casts() -> None:
    weight = torch.ones(2, 2)

    def step() -> None:
        weight.to(torch.float32, copy=True)
        weight.clone()
        weight.to(memory_format=torch.contiguous_format)

    assert count_casts(step, [weight]) == {"weights": 0, "activations": 0, "gradients": 0}


def test_an_evaluation_loop_casts_each_weight_for_each_batch_and_by_hand_never() -> None:
    made = subject("MLP", TINY)
    steps = evaluation_steps(made, STOCK_REGION, OUR_REGION)
    found = {name: dict(result.casts) for name, result in measured(steps, made, "cpu").items()}
    eight_batches = {"weights": 8 * 6, "activations": 8, "gradients": 0}
    none = {"weights": 0, "activations": 0, "gradients": 0}
    assert found == {STOCK: eight_batches, OURS: eight_batches, HAND: {**none, "activations": 8}, PLAIN: none}


def test_contenders_of_a_training_step() -> None:
    made = subject("MLP", TINY)
    found = measured(training_steps(made, STOCK_REGION, OUR_REGION), made, "cpu")
    assert list(found) == [STOCK, OURS, HAND, ALREADY_CAST, PLAIN]
    assert [result.casts["weights"] for result in found.values()] == [6, 6, 6, 0, 0]
    assert all(result.peak_bytes > 0 for result in found.values())


# --- memory


def test_peak_is_the_most_that_is_held_at_a_time() -> None:
    def step() -> None:
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(200, dtype=torch.uint8)
        del first
        third = torch.empty(500, dtype=torch.uint8)
        del second, third

    assert peak_bytes(step, "cpu") == 1200


def test_peak_counts_from_what_was_held_before() -> None:
    held = [torch.empty(5000, dtype=torch.uint8)]

    def step() -> None:
        held.clear()
        held.append(torch.empty(100, dtype=torch.uint8))

    assert peak_bytes(step, "cpu") == 0
    assert peak_bytes(lambda: held.append(torch.empty(300, dtype=torch.uint8)), "cpu") == 300


def test_peak_is_that_of_the_second_run() -> None:
    sizes = [5000, 70]
    assert peak_bytes(lambda: torch.empty(sizes.pop(0), dtype=torch.uint8), "cpu") == 70
    assert sizes == []


def test_peak_of_a_graph_holds_what_the_backward_needs() -> None:
    leaf = torch.ones(256, requires_grad=True)

    def step() -> None:
        # Each sine keeps its input: 1 KiB a step, and the last has its output too.
        leaf.sin().sin().sin()

    assert peak_bytes(step, "cpu") == 3 * 1024


def test_measuring_memory_is_no_dispatch_mode_and_leaves_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    modes: list[int] = []
    peak_bytes(lambda: modes.append(len(_get_current_dispatch_mode_stack())), "cpu")
    assert modes == [0, 0]
    assert "KINETO_LOG_LEVEL" not in os.environ
