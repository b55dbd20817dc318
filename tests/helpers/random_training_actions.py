"""The actions of random trainings, except for CUDA graphs. random_trainings draws from these."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.random_training_state import OPTIMIZERS, Trained, loss_of


def train(run: Trained) -> None:
    """One to three forwards in a region, and a backward in or after it."""
    inside = run.draw.random() < 0.3
    with run.open(**run.options()):
        losses = [loss_of(run.forward(run.x * (i + 1), run.some_layers(), True)) for i in range(run.draw.randint(1, 3))]
        if inside:
            sum(losses).backward()  # type: ignore[union-attr]
    if not inside:
        sum(losses).backward()  # type: ignore[union-attr]
    run.note(*losses, *(p.grad for p in run.layers.parameters()))


def train_nested(run: Trained) -> None:
    """In one dtype, because stock's cache does not distinguish dtypes."""
    options = run.options()
    with run.open(**options):
        hidden = run.forward(run.x, run.some_layers())
        with run.region(**{**run.options(), "dtype": options["dtype"]}):
            hidden = run.forward(hidden, run.some_layers())
        with run.region(dtype=options["dtype"], choice=0.5, enabled=False):
            hidden = hidden.float() @ run.layer(0).weight
        loss = loss_of(run.forward(hidden, run.some_layers()))
    loss.backward()
    run.note(loss, *(p.grad for p in run.layers.parameters()))


def train_in_blocks(run: Trained) -> None:
    """A region for each layer."""
    hidden = run.x
    options = run.options()
    for at in run.some_layers():
        with run.open(**options):
            hidden = run.layer(at)(hidden)
    loss_of(hidden).backward()
    run.note(hidden, *(p.grad for p in run.layers.parameters()))


def train_checkpointed(run: Trained) -> None:
    reentrant, inside = run.draw.random() < 0.5, run.draw.random() < 0.3
    layers = run.some_layers() or [0]
    with run.open(**run.options()):
        hidden = run.x.clone().requires_grad_()
        for at in range(0, len(layers), 2):

            def block(x: Tensor, at: int = at) -> Tensor:
                for layer in layers[at : at + 2]:
                    x = torch.tanh(run.layers[layer](x))
                return x

            hidden = checkpoint(block, hidden, use_reentrant=reentrant)
        loss = loss_of(hidden)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    run.note(loss, *(p.grad for p in run.layers.parameters()))


def train_twice_through(run: Trained) -> None:
    with run.open(**run.options()):
        x = run.x.clone().requires_grad_()
        loss = loss_of(run.forward(x, run.some_layers()))
        (first,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
        if first.requires_grad:
            first.square().sum().backward()
    run.note(loss, first, *(p.grad for p in run.layers.parameters()))


def train_with_hooks(run: Trained) -> None:
    with run.open(**run.options()), torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.cuda()):
        loss = loss_of(run.forward(run.x, run.some_layers()))
    loss.backward()
    run.note(loss, *(p.grad for p in run.layers.parameters()))


def train_observed(run: Trained) -> None:
    kind = run.draw.randrange(3)
    with contextlib.ExitStack() as stack:
        if kind == 0:
            stack.enter_context(torch.autograd.detect_anomaly(check_nan=False))
        elif kind == 1:
            stack.enter_context(torch.profiler.profile())
        else:
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        with run.open(**run.options()):
            loss = loss_of(run.forward(run.x, run.some_layers()))
        loss.backward()
    run.note(loss, *(p.grad for p in run.layers.parameters()))


def transform(run: Trained) -> None:
    layers, weights = run.some_layers(), dict(run.layers[0].named_parameters())
    if run.draw.random() < 0.5:
        with run.open(**run.options()):
            hidden = run.forward(run.x, layers)

            def call(weights: Any, x: Tensor) -> Tensor:
                return loss_of(torch.func.functional_call(run.layers[0], weights, (x,)))

            gradients = torch.func.grad(call)(weights, hidden)
            each = torch.vmap(run.layers[1])(hidden.detach())
        run.note(*gradients.values(), each)
        return
    with run.open(**run.options()):
        hidden, tangent = torch.func.jvp(lambda x: run.forward(x, [0, 1]), (run.x,), (torch.ones_like(run.x),))
        again = run.forward(run.x, [0, 1])
    run.note(hidden, tangent, again)


def evaluate(run: Trained) -> None:
    without = torch.no_grad() if run.draw.random() < 0.5 else torch.inference_mode()
    with without, run.open(**run.options()):
        run.note(*(run.forward(run.x, run.some_layers()) for _ in range(run.draw.randint(1, 2))))


def step(run: Trained) -> None:
    run.optimizer.step()
    if run.draw.random() < 0.7:
        run.optimizer.zero_grad(set_to_none=run.draw.random() < 0.5)


def another_optimizer(run: Trained) -> None:
    run.optimizer = run.draw.choice(OPTIMIZERS)(run.layers.parameters())


def step_in_backward(run: Trained) -> None:
    """Steps each weight as soon as its gradient is ready."""
    optimizers = {p: torch.optim.SGD([p], lr=0.03) for p in run.layers.parameters() if p.requires_grad}

    def hook(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(hook) for p in optimizers]
    with run.open(**run.options()):
        loss = loss_of(run.forward(run.x, run.some_layers()))
    if loss.requires_grad:
        loss.backward()
    for handle in handles:
        handle.remove()
    run.note(loss, *run.layers.parameters())


# Kinds of `write` that leave the memory of a weight where it is, so that captured graphs find it.
IN_PLACE = (0, 1, 6, 8, 9)


def write(run: Trained) -> None:
    """Between regions."""
    draw = run.draw
    layers = [run.layers[at] for at in range(6) if draw.random() < 0.5]
    kind = draw.choice(IN_PLACE if run.graphs else range(10))
    with torch.no_grad():
        for layer in layers:
            weight = layer.weight
            if kind == 0:
                weight.mul_(0.9)
            elif kind == 1:
                weight.data.mul_(0.9)
            elif kind == 2:
                weight.data = weight * 0.9
            elif kind == 3:
                old = weight.data
                weight.data = torch.zeros_like(weight)
                weight.data = old.mul_(0.9)
            elif kind == 4:
                weight.set_(weight.clone() * 0.9)  # type: ignore[arg-type]
            elif kind == 5:
                values, storage = weight.clone() * 0.9, weight.untyped_storage()
                size = storage.size()
                storage.resize_(0)
                storage.resize_(size)
                weight.copy_(values)
            elif kind == 6:
                weight.untyped_storage().copy_((weight * 0.9).untyped_storage())
            elif kind == 7:
                layer.weight = nn.Parameter(weight * 0.9)
                run.optimizer = torch.optim.SGD(run.layers.parameters(), lr=0.05)
            elif kind == 8:
                torch._fused_sgd_(
                    [weight], [torch.ones_like(weight)], [], weight_decay=0.0, momentum=0.0, lr=0.01, dampening=0.0,
                    nesterov=False, maximize=False, is_first_step=True,
                )  # fmt: skip
            else:
                torch._foreach_mul_([weight], 0.9)


def swap(run: Trained) -> None:
    if run.graphs:
        return
    one, other = run.draw.sample(range(6), 2)
    first, second = run.layers[one].weight, run.layers[other].weight
    kind = run.draw.randrange(3)
    run.optimizer.zero_grad(set_to_none=True)
    if kind == 0 and not run.held:
        with contextlib.suppress(RuntimeError):  # weak references, under stock too
            torch.utils.swap_tensors(first, second)
    elif kind == 1:
        first.data, second.data = second.data, first.data
    else:
        run.layers[one], run.layers[other] = run.layers[other], run.layers[one]


def load(run: Trained) -> None:
    state = {k: v * 0.9 + 0.01 for k, v in run.layers.state_dict().items()}
    run.layers.load_state_dict(state)


def hold(run: Trained) -> None:
    kind = run.draw.randrange(3)
    if kind == 0:
        run.held.append(run.layers.state_dict())
    elif kind == 1:
        run.held.append(copy.deepcopy(run.layers))
    else:
        run.held.clear()


def freeze(run: Trained) -> None:
    for layer in run.layers:
        layer.weight.requires_grad_(run.draw.random() < 0.6)


def tie(run: Trained) -> None:
    if run.graphs:
        return
    one, other = run.draw.sample(range(6), 2)
    run.layers[one].weight = run.layers[other].weight


def clear(run: Trained) -> None:
    torch.clear_autocast_cache()


def clear_inside(run: Trained) -> None:
    with run.open(**run.options()):
        first = run.forward(run.x, run.some_layers())
        torch.clear_autocast_cache()
        loss = loss_of(run.forward(first, run.some_layers()))
    loss.backward()
    run.note(loss, *(p.grad for p in run.layers.parameters()))


def fail(run: Trained) -> None:
    with contextlib.suppress(ZeroDivisionError), run.open(**run.options()):
        run.forward(run.x, run.some_layers())
        raise ZeroDivisionError


def suspend(run: Trained) -> None:
    """A generator that is suspended in a region, while the program opens others."""
    options = run.options()

    def generate() -> Iterator[Tensor]:
        with run.region(**options):
            hidden = run.x
            for layer in run.layers:
                hidden = layer(hidden)
                yield hidden

    running = generate()
    for _ in range(run.draw.randint(1, 4)):
        run.note(next(running))
        if run.draw.random() < 0.5:
            with run.region(**options), torch.set_grad_enabled(run.draw.random() < 0.5):
                run.note(run.forward(run.x, run.some_layers()))
    running.close()


def in_a_thread(run: Trained) -> None:
    thread = threading.Thread(target=run.draw.choice((train, evaluate, train_in_blocks)), args=(run,))
    thread.start()
    thread.join()


def on_a_stream(run: Trained) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run.draw.choice((train, evaluate, step, write))(run)
    torch.cuda.current_stream().wait_stream(side)
