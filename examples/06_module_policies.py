"""Module policies: set them by name, pattern or class, show them, checkpoint and copy the model, and remove them.

Run: python examples/06_module_policies.py
"""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_promote as tp


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.lm_head = nn.ModuleList([Block(), Block()]), nn.Linear(16, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # recomputed in the backward, under the same policies
        return self.lm_head(x)


model, x = Model(), torch.randn(4, 16)


def train(title: str, model: nn.Module) -> None:
    dtypes: dict[str, set[str]] = {}
    hooks = [
        module.register_forward_hook(
            lambda module, inputs, output, name=name: dtypes.setdefault(name, set()).add(str(output.dtype)[6:])
        )
        for name, module in model.named_modules()
        if name in ("blocks.0.mlp.0", "blocks.1.mlp.0", "lm_head")
    ]
    with tp.my_autocast("cpu"):
        loss = model(x).square().mean()
    loss.backward()
    for hook in hooks:
        hook.remove()
    print(f"{title:22}", "  ".join(f"{name} {'/'.join(sorted(dtypes[name]))}" for name in dtypes))


train("no policies", model)

tp.set_module_policy(
    model,
    {
        "lm_head": "fp32",  # inputs cast to float32, autocast off inside
        "blocks.1.mlp": {"linear": "float16"},  # like a nested region with these overrides
        nn.LayerNorm: {"layer_norm": "fp32"},
    },
)
train("three policies", model)
train("a copy has them", copy.deepcopy(model))
print(tp.module_policies(model))

tp.remove_module_policy(model)
train("taken off again", model)

try:
    tp.set_module_policy(model, {"lm_haed": "fp32"})
except tp.PolicyError as error:
    print("\nPolicyError:", error)
