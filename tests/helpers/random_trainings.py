"""Random programs that train, evaluate, write to weights and capture CUDA graphs, on any device with graphs.

A program is drawn from a seed, and is correct under stock: it writes to no weight that the open region has used, and a
region does not cross the border of a capture. All draws are made before anything runs, so every kind of region runs the
same program.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp

__all__ = ["ACTIONS", "MODES", "outcome", "program"]

MODES = ("weights", "persistent", "all", "none")
SIZE = 8
BATCH = 4

OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    functools.partial(torch.optim.SGD, lr=0.05, foreach=False),
    functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True),
    functools.partial(torch.optim.SGD, lr=0.05, fused=True),
    functools.partial(torch.optim.AdamW, lr=0.01, foreach=False),
    functools.partial(torch.optim.AdamW, lr=0.01, foreach=True),
    functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
)


class Trained:
    """The state of one program under one kind of region."""

    def __init__(self, draw: random.Random, region: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.draw = draw
        self.region = region
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE, bias=draw.random() < 0.3) for _ in range(6)).cuda()
        self.optimizer = draw.choice(OPTIMIZERS)(self.layers.parameters())
        self.x = torch.linspace(-1, 1, BATCH * SIZE, device="cuda").view(BATCH, SIZE)
        self.used: set[int] = set()
        self.graphs: list[tuple[Any, Tensor]] = []
        self.held: list[Any] = []
        self.seen: list[Tensor] = []

    def note(self, *tensors: Tensor | None) -> None:
        self.seen += [tensor.detach().clone() for tensor in tensors if tensor is not None]

    def layer(self, at: int) -> nn.Linear:
        layer: Any = self.layers[at]
        self.used.add(id(layer.weight))  # which layers may share
        return layer

    def some_layers(self) -> list[int]:
        """All in order, most in order, or some in any order."""
        kind = self.draw.random()
        if kind < 0.5:
            return list(range(len(self.layers)))
        if kind < 0.8:
            return [at for at in range(len(self.layers)) if self.draw.random() < 0.7]
        return self.draw.choices(range(len(self.layers)), k=self.draw.randint(1, 6))

    @contextlib.contextmanager
    def open(self, **options: Any) -> Iterator[None]:
        self.used.clear()
        with self.region(**options):
            yield
        self.used.clear()

    def options(self) -> dict[str, Any]:
        dtype = self.draw.choice((torch.bfloat16, torch.bfloat16, torch.float16))
        return {"dtype": dtype, "choice": self.draw.random()}

    def forward(self, hidden: Tensor, layers: list[int], writes: bool = False) -> Tensor:
        for at in layers:
            if writes and self.draw.random() < 0.3:
                write_to_unused(self, at)
            use = self.draw.randrange(6)
            weight = self.layer(at).weight
            if use == 0:
                hidden = hidden @ weight[: SIZE // 2].t() @ weight[: SIZE // 2]
            elif use == 1:
                hidden = hidden @ weight.t()
            else:
                hidden = self.layer(at)(hidden)
            hidden = torch.tanh(hidden)
        return hidden


def write_to_unused(run: Trained, at: int) -> None:
    """In a region, to a weight that it has not used: as a layer does that masks or clips its weight."""
    kind = run.draw.randrange(6)
    weight: Any = run.layers[at].weight
    if id(weight) in run.used or (run.graphs and kind == 2):
        return
    with torch.no_grad():
        if kind == 0:
            weight.mul_(0.75)
        elif kind == 1:
            weight.data *= 0.75
        elif kind == 2:
            weight.data = weight * 0.75
        elif kind == 3:
            weight.data.clamp_(-0.2, 0.2)
        elif kind == 4:
            weight.detach().mul_(0.75)
        else:
            nn.init.constant_(weight, 0.03)


def loss_of(hidden: Tensor) -> Tensor:
    return hidden.float().square().mean()


# --- actions


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
    """In one dtype: the casts of stock's cache do not tell theirs."""
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
    """Each weight is stepped when its gradient is there."""
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


# --- graphs


def capture(run: Trained) -> None:
    """An inference, a training, or writes to weights."""
    kind, options, layers = run.draw.randrange(4), run.options(), run.some_layers()
    warm, uses = run.draw.randint(0, 2), run.draw.random()

    def infer() -> Tensor:
        with torch.no_grad(), run.open(**options):
            return loss_of(run.forward(run.x, layers))

    def learn() -> Tensor:
        with run.open(**options):
            loss = loss_of(run.forward(run.x, layers))
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    def change() -> Tensor:
        with torch.no_grad():
            for at in layers:
                if uses < 0.5:
                    run.layers[at].weight.mul_(0.95)
                else:
                    run.layers[at].weight.data.mul_(0.95)
        return run.x

    def both() -> Tensor:
        loss = infer()
        change()
        return loss + infer()

    action = (infer, learn, change, both)[kind]
    state = run.draw.getstate()
    for _ in range(warm):
        action()
        run.draw.setstate(state)
    for p in run.layers.parameters():
        p.grad = None if p.grad is None else p.grad.clone()
    graph = run.graphs.pop()[0] if run.graphs and run.draw.random() < 0.2 else torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = action()
    run.graphs.append((graph, result))
    for p in run.layers.parameters():  # so that nothing outside refers to the graph's memory
        p.grad = None
    # Graphs read the memory of the weights as they are now.
    run.held.append([p.data for p in run.layers.parameters()] if run.draw.random() < 0.3 else None)


def replay(run: Trained) -> None:
    for graph, result in run.graphs:
        for _ in range(run.draw.randint(0, 2)):
            if run.draw.random() < 0.3:
                with torch.cuda.stream(torch.cuda.Stream()):
                    graph.replay()
            else:
                graph.replay()
            run.note(result)
    run.note(*run.layers.parameters())


def replay_inside(run: Trained) -> None:
    """In a region, before it uses weights that the graph may write to."""
    with run.open(**run.options()):
        if run.draw.random() < 0.5:
            run.note((run.x @ torch.eye(SIZE, device="cuda")).float())
        for graph, result in run.graphs:
            graph.replay()
            run.note(result)
        run.note(run.forward(run.x, run.some_layers()))


def drop_graph(run: Trained) -> None:
    if run.graphs:
        graph, _ = run.graphs.pop(run.draw.randrange(len(run.graphs)))
        if run.draw.random() < 0.5:
            graph.reset()
        del graph
        gc.collect(0)


Action = Callable[[Trained], None]
ACTIONS: dict[Action, int] = {
    train: 6,
    step: 6,
    evaluate: 3,
    train_nested: 2,
    train_in_blocks: 2,
    train_checkpointed: 2,
    train_twice_through: 1,
    train_with_hooks: 1,
    train_observed: 1,
    transform: 1,
    another_optimizer: 1,
    step_in_backward: 1,
    write: 3,
    swap: 1,
    load: 1,
    hold: 1,
    freeze: 1,
    tie: 1,
    clear: 1,
    clear_inside: 1,
    fail: 1,
    suspend: 1,
    in_a_thread: 1,
    on_a_stream: 1,
    capture: 2,
    replay: 3,
    replay_inside: 1,
    drop_graph: 1,
}


def program(seed: int, graphs: bool = True) -> list[Action]:
    """The actions of a program."""
    draw = random.Random(seed)
    of = {
        action: weight
        for action, weight in ACTIONS.items()
        if graphs or action not in (capture, replay, replay_inside, drop_graph)
    }
    some = draw.sample(list(of), k=draw.randint(3, 10))  # so that some programs repeat a few
    return draw.choices([train, step, *some], weights=[6, 6, *(of[action] for action in some)], k=draw.randint(4, 14))


def outcome(seed: int, mode: str | None, graphs: bool = True) -> tuple[list[str], list[Tensor]]:
    """Runs a program, and returns its actions and all that they compute.

    Args:
        seed: Of the program.
        mode: The cache mode, "mixed" for one that each region draws, or None for stock.
        graphs: Whether the program may capture CUDA graphs.
    """

    def region(dtype: torch.dtype, choice: float, enabled: bool = True) -> Any:
        if mode is None:
            return tp.stock_autocast("cuda", dtype=dtype, enabled=enabled)
        cache = MODES[int(choice * 3)] if mode == "mixed" else mode
        return tp.my_autocast("cuda", dtype=dtype, enabled=enabled, cache=cache)

    run = Trained(random.Random(seed), region)
    actions = program(seed, graphs)
    for action in actions:
        if not any(p.requires_grad for p in run.layers.parameters()):
            run.layers.requires_grad_(True)
        try:
            action(run)
        except RuntimeError as error:
            run.note(torch.tensor(hash(str(error).split("\n")[0]) % 1000))
            run.held.append(str(error))
    run.note(*run.layers.parameters())
    return [action.__name__ for action in actions], run.seen
