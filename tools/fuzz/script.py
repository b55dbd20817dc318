"""Writes a program as Python."""

from __future__ import annotations

import inspect
import re
from typing import Any

from fuzz import calls
from fuzz.changes import OPTIMIZERS
from fuzz.ops import LAYERS
from fuzz.rules import State
from fuzz.tree import Program, lines

__all__ = ["function_of", "script_of"]

_IMPORTS = {
    "contextlib": "import contextlib",
    "copy": "import copy",
    "gc": "import gc",
    "re": "import re",
    "threading": "import threading",
    "Callable": "from collections.abc import Callable",
    "Iterator": "from collections.abc import Iterator",
    "Any": "from typing import Any",
}
_TORCH_IMPORTS = {
    "Tensor": "from torch import Tensor",
    "nn": "from torch import nn",
    "F": "from torch.nn import functional as F",
    "TorchFunctionMode": "from torch.overrides import TorchFunctionMode",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
}


def function_of(program: Program) -> str:
    """The source of the function `program`. Raises `Unfit` if the program is not correct under stock."""
    state = State(program.device, program.mode, program.layers)
    body = lines(program.body, state)
    cuda = program.device == "cuda"
    layers = ", ".join(LAYERS[layer][0] for layer in program.layers)
    head = [
        f"torch.{'' if cuda else 'default_generator.'}manual_seed(7)",
        f"m = nn.ModuleList([{layers}]){'.cuda()' if cuda else ''}",
        f"optimizer = {OPTIMIZERS[program.optimizer]}",
        f"x = torch.linspace(-2, 2, 32).view(4, 8){'.cuda()' if cuda else ''}",
        "h, losses, held, graphs = x, [], [], []",
    ]
    tail = [
        "if any(loss.requires_grad for loss in losses):",
        "    sum(losses).backward()",
        "note(h, *losses, *(p.grad for p in m.parameters()), *m.parameters())",
    ]
    text = "\n".join(f"    {line}" for line in [*head, *body, *tail])
    return f"def program(autocast, note):\n{_without_unused(text)}\n"


def _without_unused(text: str) -> str:
    """Leaves out the variables and the optimizer that a program does not use."""
    names = [name for name in ("held", "graphs") if text.count(name) > 1]
    values = ["x", "[]", *("[]" for _ in names)]
    text = text.replace(
        "h, losses, held, graphs = x, [], [], []", f"h, losses{''.join(f', {n}' for n in names)} = {', '.join(values)}"
    )
    if not re.search(r"optimizer\.(step|zero_grad)", text):
        text = re.sub(r"\n +optimizer = .*", "", text, count=1)
    return text


def _used(text: str, known: dict[str, Any]) -> list[str]:
    return [name for name in known if re.search(rf"(?<![\w.\"'])\b{name}\b", text)]


_MAIN = """
def results(autocast):
    seen = []
    try:
        program(autocast, lambda *tensors: seen.extend(t if t is None else t.detach().cpu().clone() for t in tensors))
    except RuntimeError as error:
        seen.append(str(error))
    return seen


def same(one, other):
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or one == other
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


if __name__ == "__main__":
    torch.set_num_threads(1)
{advance}    stock, ours = results(Stock("{device}")), results(Ours("{device}"))
    assert len(stock) == len(ours), f"stock has {len(stock)} results, ours {len(ours)}"
    for number, (expected, got) in enumerate(zip(stock, ours)):
        assert same(got, expected), f"result {number}:\\nstock {expected}\\nours  {got}"
    print(f"{len(stock)} results are the same")
"""


def script_of(program: Program, title: str) -> str:
    """A script that runs a program under stock and under ours, and compares."""
    function = function_of(program)
    threads = "in_thread" in function
    main = _MAIN.replace("{device}", program.device).strip("\n")
    main = main.replace("{advance}", "    use_up_sequence_numbers()\n" if threads else "")
    custom = _used(function, {"Scaled": 0, "ScaledInHalf": 0})
    parts = {
        name: inspect.getsource(value)
        for name, value in vars(calls).items()
        if getattr(value, "__module__", None) == calls.__name__
    }
    chosen = ["Stock", "Ours", *(["custom_functions"] if custom else [])]
    chosen += ["use_up_sequence_numbers"] if threads else []
    for name in parts:  # what the program calls, and what that calls
        if name not in chosen and _used(function, {name: 0}):
            chosen.append(name)
    for name in parts:
        if name not in chosen and any(_used(parts[other], {name: 0}) for other in chosen):
            chosen.append(name)
    sources = [parts[name].rstrip() for name in parts if name in chosen]
    if custom:
        sources.append(f'Scaled, ScaledInHalf = custom_functions("{program.device}")')
    text = "\n\n\n".join([*sources, function.rstrip(), main])
    standard = [_IMPORTS[name] for name in _used(text, _IMPORTS)]
    third = [line for name, line in _TORCH_IMPORTS.items() if name in _used(text, _TORCH_IMPORTS)]
    stand_in = ["import cuda_stand_in", "", "cuda_stand_in.start()", ""] if program.device == "cuda" else []
    head = [
        f'"""{title}"""', "", "from __future__ import annotations", "", *standard, "", *stand_in,
        "import torch", *third, "", "import torch_promote as tp",
    ]  # fmt: skip
    return "\n".join(head) + "\n\n\n" + text + "\n"
