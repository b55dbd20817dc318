"""A custom op with a cast policy, which follows the region's dtype and can be changed and removed.

Run: python examples/07_custom_op.py
"""

import torch

import torch_promote as tp

torch.manual_seed(0)


@torch.library.custom_op("examples::blend", mutates_args=())
def blend(a: torch.Tensor, b: torch.Tensor, weight: float) -> torch.Tensor:
    """Like many kernels, it requires inputs of one dtype."""
    if a.dtype != b.dtype:
        raise TypeError(f"blend requires inputs of one dtype, got {a.dtype} and {b.dtype}")
    return a * weight + b * (1 - weight)


def keep_weight(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: torch.Tensor) -> None:
    ctx.weight = inputs[2]


blend.register_fake(lambda a, b, weight: torch.empty_like(a))
blend.register_autograd(
    lambda ctx, grad: (grad * ctx.weight, grad * (1 - ctx.weight), None),
    setup_context=keep_weight,
)

x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)

with tp.my_autocast("cpu"):
    try:
        blend(x @ weight, x, 0.5)
    except TypeError as error:
        print("without a policy   ", error)

for policy in ("promote", "lower", torch.float64):
    with tp.register_policy("examples::blend", policy), tp.my_autocast("cpu"):
        result = blend(x @ weight, x, 0.5)
    result.sum().backward()
    print(f"{policy!s:<20}{result.dtype}, the weight's gradient {weight.grad.dtype}")
    weight.grad = None

with tp.my_autocast("cpu", dtype=torch.float16, overrides={"examples::blend": "lower"}):
    print("for one region      ", blend(x @ weight, x, 0.5).dtype, sep="")


@torch.compile(backend="aot_eager", fullgraph=True)
def compiled(x: torch.Tensor) -> torch.Tensor:
    return blend(x @ weight, x, 0.5)


with tp.my_autocast("cpu", overrides={"examples::blend": "promote"}):
    print("compiled            ", compiled(x).dtype, sep="")
