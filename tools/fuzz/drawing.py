"""Draws programs, and writes them as Python."""

from __future__ import annotations

import random
import re

from fuzz.ops import LAYERS, OPS
from fuzz.rules import State, Unfit
from fuzz.statements import CACHE_MODES, OPTIMIZERS
from fuzz.tree import KINDS, Program, Statement, lines

#: What each program's regions have for a cache mode.
MODES = (*CACHE_MODES, "mixed")

#: In every program; of the others, each program has some, so that some programs repeat a few.
_ALWAYS = ("region", "loss", "backward", "step", "layer", "tanh")
_GRAPHS = ("capture", "replay", "drop_graph")


def draw_program(seed: int, number: int, device: str, mode: str | None = None) -> Program:
    """Draws program `number` of a seed."""
    draw = random.Random(f"{seed}/{number}")
    drawn = draw.choice(MODES)
    kinds = draw.choices(list(LAYERS), weights=[weight for _, weight in LAYERS.values()], k=draw.randint(1, 5))
    if not {"linear", "no_bias"} & set(kinds):
        kinds.append("linear")
    optimizer = draw.choice(list(OPTIMIZERS))
    share = draw.choice((0.1, 0.25, 0.5))
    some = [
        name
        for name, one in KINDS.items()
        if device in one.devices and name not in _GRAPHS
        if name in _ALWAYS or draw.random() < share * min(one.weight, 1)
    ]
    if device == "cuda" and draw.random() < 0.3:
        some += _GRAPHS
    state = State(device, mode or drawn, kinds)
    program = Program(device, mode or drawn, kinds, optimizer, [])
    _Drawing(draw, state, some).fill(program.body, draw.randint(4, 16), 0)
    return program


class _Drawing:
    """One program's kinds, by what they are."""

    def __init__(self, draw: random.Random, state: State, some: list[str]) -> None:
        self.draw, self.state = draw, state
        self.ops = [name for name in some if name in OPS]
        self.others = [name for name in some if name not in OPS]
        self.weights = {id(names): [KINDS[name].weight for name in names] for names in (self.ops, self.others)}
        self.left = 40

    def fill(self, body: list[Statement], length: int, depth: int) -> None:
        """Draws the statements of a body."""
        share = 0.35 if depth == 0 else 0.65 if depth == 1 else 0.8
        for _ in range(length):
            if self.left <= 0:
                return
            names = self.ops if self.draw.random() < share else self.others
            self.statement(body, names, depth)

    def statement(self, body: list[Statement], names: list[str], depth: int) -> None:
        """Draws a statement that fits; none if a few do not."""
        draw, state = self.draw, self.state
        for _ in range(6):
            (name,) = draw.choices(names, weights=self.weights[id(names)])
            one = KINDS[name]
            if one.has_body and depth >= 4:
                continue
            frames = len(state.frames)
            try:
                values = one.draw(draw, state)
                one.open(values, state)
            except Unfit:
                del state.frames[frames:]
                continue
            self.left -= 1
            statement = Statement(name, values)
            body.append(statement)
            if one.has_body:
                self.fill(statement.body, draw.randint(1, 5), depth + 1)
                one.close(values, state)
            return


def function_of(program: Program) -> str:
    """The source of the function `program`. Raises `Unfit` if the program is not correct under stock."""
    state = State(program.device, program.mode, program.layers)
    body = lines(program.body, state)
    cuda = program.device == "cuda"
    layers = ", ".join(LAYERS[layer][0] for layer in program.layers)
    text = "\n".join(body)
    variables = {"h": "x", "losses": "[]", **{name: "[]" for name in ("held", "graphs") if name in text}}
    head = [
        f"torch.{'' if cuda else 'default_generator.'}manual_seed(7)",
        f"m = nn.ModuleList([{layers}]){'.cuda()' if cuda else ''}",
        *([f"optimizer = {OPTIMIZERS[program.optimizer]}"] if re.search(r"optimizer\.(step|zero_grad)", text) else []),
        f"x = torch.linspace(-2, 2, 32).view(4, 8){'.cuda()' if cuda else ''}",
        f"{', '.join(variables)} = {', '.join(variables.values())}",
    ]
    tail = [
        "if any(loss.requires_grad for loss in losses):",
        "    sum(losses).backward()",
        "note(h, *losses, *(p.grad for p in m.parameters()), *m.parameters())",
    ]
    indented = "\n".join(f"    {line}" for line in [*head, *body, *tail])
    return f"def program(autocast, note):\n{indented}\n"


def script_of(program: Program, title: str) -> str:
    """A file for `make fuzz ARGS="--program FILE"`: the function, with the names that it uses."""
    head = f'"""{title}"""\n\nfrom fuzz.running import namespace\n\nglobals().update(namespace("{program.device}"))\n'
    return f"{head}\n\n{function_of(program)}"
