"""Overrides of single ops in a region: by name, by overload, nested, and the error for a mistake.

Run: python examples/02_overrides.py
"""

import torch
from torch import nn

import torch_promote as tp

x, weight = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)


def show(title: str) -> None:
    linear, scores = nn.functional.linear(x, weight), torch.softmax(x, -1)
    print(f"{title:42} linear {linear.dtype!s:15} softmax {scores.dtype}")


with tp.my_autocast("cpu"):
    show("the stock policy")

with tp.my_autocast("cpu", overrides={"linear": "fp32", "softmax": "lower"}):
    show("linear kept in float32, softmax not")
    with tp.my_autocast("cpu", overrides={"softmax.int": torch.float16}):
        show("nested, softmax in float16")
    show("after the nested region")


@tp.my_autocast("cpu", overrides={torch.ops.aten.linear: tp.CastPolicy.fp32})
def decorated() -> None:
    show("a decorated function")


decorated()

try:
    tp.my_autocast("cpu", overrides={"sofmax": "fp32"})
except tp.PolicyError as error:
    print("\nPolicyError:", error)
try:
    tp.my_autocast("cpu", overrides={"mm": "fp32_set_opt_dtype"})
except tp.PolicyError as error:
    print("\nPolicyError:", error)
