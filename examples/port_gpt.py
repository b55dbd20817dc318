"""Ports the demo's GPT, plants a bug in the port, and lets torch_promote find it by the values that both compute.

    python examples/port_gpt.py                # one of eight bugs, drawn by the time
    python examples/port_gpt.py --seed 3
    python examples/port_gpt.py --bug none     # a right port
    python examples/port_gpt.py --seed 3 --html match.html

The port has other names, one product for query, key and value, and a layer norm of its own. Nothing tells the
comparison which of its modules is which.

Exit status: 0 if the outputs match, 1 if they differ, 2 for an invalid command line.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)

import torch_promote as tp
from gpt.data import SYMBOLS
from gpt.model import GPT, Config
from torch_promote.types import Match

CONFIG = Config(symbols=len(SYMBOLS))
#: The bugs, and what is wrong.
BUGS = {
    "eps": "the first norm of block 1 adds another eps to the variance",
    "activation": "block 1 approximates GELU",
    "scale": "attention of block 1 divides by the width of a head instead of its root",
    "mask": "a position of block 1 sees the next one",
    "residual": "block 1 adds attention to what the norm returned",
    "transposed": "the output weight of attention in block 1 is transposed",
    "swapped": "keys and values of block 1 are swapped",
    "island": "the perceptron of block 1 ends in bfloat16",
}


class Layer(nn.Module):
    """A block of the port, with a bug or none."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        width = CONFIG.width
        self.bug = bug
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scales, self.shifts = nn.Parameter(torch.ones(2, width)), nn.Parameter(torch.zeros(2, width))

    def norm(self, x: Tensor, at: int) -> Tensor:
        variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        eps = 1e-4 if self.bug == "eps" and at == 0 else 1e-5
        x = (x - mean) * torch.rsqrt(variance + eps)  #: eps
        return x * self.scales[at] + self.shifts[at]  #: eps

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x, 0)
        q, k, v = (one.unflatten(-1, (CONFIG.heads, -1)).transpose(1, 2) for one in self.qkv(h).chunk(3, -1))
        k, v = (v, k) if self.bug == "swapped" else (k, v)
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(int(self.bug == "mask"))
        scale = CONFIG.heads / CONFIG.width if self.bug == "scale" else None
        a = F.scaled_dot_product_attention(q, k, v, seen, scale=scale)  #: scale, mask, swapped
        a = self.mix(a.transpose(1, 2).flatten(2))  #: transposed
        x = (h if self.bug == "residual" else x) + a  #: residual, transposed
        h = self.up(self.norm(x, 1))
        h = F.gelu(h, approximate="tanh" if self.bug == "activation" else "none")  #: activation
        if self.bug == "island":
            return x + self.down.to(torch.bfloat16)(h.bfloat16())  #: island
        return x + self.down(h)


class Port(nn.Module):
    """The port of `GPT`."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(CONFIG.symbols, CONFIG.width), nn.Embedding(CONFIG.context, CONFIG.width)
        self.layers = nn.ModuleList(Layer(bug if i == 1 else "none") for i in range(CONFIG.layers))
        self.last, self.logits = nn.LayerNorm(CONFIG.width), nn.Linear(CONFIG.width, CONFIG.symbols, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.last(x))


#: Names of the reference, and what the port calls them. It joins weights that get one name.
NAMES = (
    "blocks=layers attention.query=qkv attention.key=qkv attention.value=qkv attention.out=mix mlp.0=up mlp.2=down "
    "attention_norm.weight=scales mlp_norm.weight=scales attention_norm.bias=shifts mlp_norm.bias=shifts "
    "symbol=table position=places norm=last head=logits"
)


def ported(reference: GPT, bug: str) -> Port:
    """Returns a port with the weights of the reference."""
    port, parts = Port(bug), dict[str, list[Tensor]]()
    for name, value in reference.state_dict().items():
        for pair in NAMES.split():
            name = name.replace(*pair.split("="))
        parts.setdefault(name, []).append(value)
    found = {name: torch.cat(parts[name]).view_as(weight) for name, weight in port.state_dict().items()}
    if bug == "transposed":
        found["layers.1.mix.weight"] = found["layers.1.mix.weight"].t()
    port.load_state_dict(found)
    return port


def compare(bug: str) -> Match:
    """Records a forward and backward of both, and pairs them by value."""
    torch.manual_seed(0)
    reference = GPT(CONFIG)
    ids = torch.randint(0, CONFIG.symbols, (4, CONFIG.context))
    reports = []
    for model in (reference, ported(reference, bug)):
        with tp.trace(values=True) as report:
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        reports.append(report)
    return tp.diff(reports[0], reports[1], match=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the demo, and returns its exit status."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="port_gpt.py", description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="draws the bug")
    parser.add_argument("--bug", choices=[*BUGS, "none"], help="the bug to plant, instead of one by the seed")
    parser.add_argument("--html", metavar="F.html", help="write the page")
    options = parser.parse_args(argv)
    seed = options.seed if options.seed is not None else time.time_ns() % 1000
    bug = options.bug or random.Random(seed).choice(list(BUGS))
    found = compare(bug)
    print(found)
    print(f"\nPlanted: {BUGS.get(bug, 'nothing')}." + ("" if options.bug else f" (--seed {seed})"))
    if options.html:
        found.save(options.html)
    return int(not found.outputs_match)


if __name__ == "__main__":
    sys.exit(main())
