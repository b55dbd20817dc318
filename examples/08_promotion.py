"""Promotion rules: the same code under several rules, the strict rule, and the lint for silent promotion.

Run: python examples/08_promotion.py
"""

import torch

import torch_promote as tp

ints = torch.arange(3, dtype=torch.int32)
half, brain = torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.bfloat16)

# --- one expression, several rules
for rule in ("torch", "jax", "numpy"):
    with tp.promotion(rule):
        dtypes = (half + brain).dtype, (ints * 0.5).dtype, (ints / ints).dtype, (half * torch.tensor(1e6)).dtype
    print(f"{rule:<8}", *(str(dtype).removeprefix("torch.") for dtype in dtypes))

# --- gradients come back in the operands' dtypes
weight = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
with tp.promotion("jax"):
    (half * weight).sum().backward()
print("gradient", weight.grad.dtype)

# --- the strict rule: no implicit promotion
with tp.promotion("strict"):
    try:
        half * brain
    except tp.errors.PromotionRuleError as error:
        print("strict  ", error)

# --- matrix products, which PyTorch does not promote
with tp.promotion("jax", matmul=True):
    print("matmul  ", (torch.ones(2, 3, dtype=torch.float16) @ torch.ones(3, 2, dtype=torch.bfloat16)).dtype)


# --- where does PyTorch promote silently?
@tp.promotion("torch", on_promotion=lambda event: print("lint    ", f"line {event.lineno}: {event.op}: {event.kind}"))
def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scaled = logits * torch.tensor(1e6)  # inf: a 0-dim float32 does not widen float16
    counted = labels * brain  # 257 is 256 in bfloat16
    small = labels.to(torch.uint8) < 256  # 256 is 0 in uint8, or an error, depending on the PyTorch release
    return scaled.sum().float() + counted.sum().float() + small.sum().float()


for _ in range(2):  # each line is reported once
    loss(half, torch.full((3,), 257, dtype=torch.int32))

# --- your own rule: bfloat16 wins over float16, everything else as in PyTorch
mine = tp.make_rule("brain first", {(torch.float16, torch.bfloat16): torch.bfloat16}, over="torch")
with tp.promotion(mine):
    print("mine    ", (half + brain).dtype)
