"""The actions of random trainings on CUDA graphs. random_trainings draws from these."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from helpers.random_training_state import SIZE, Trained, loss_of


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
