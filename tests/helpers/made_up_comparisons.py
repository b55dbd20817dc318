"""Comparisons of made-up sites, whose numbers are the same every time."""

from __future__ import annotations

import math
from typing import Any

from torch_promote.numerics.comparing.comparison import Comparison, GradientError, Metric
from torch_promote.numerics.comparing.site import Site
from torch_promote.policy.policy import Policy

__all__ = ["comparison_of", "gpt_comparison", "made_up_site", "small_comparison"]


def made_up_site(op: str = "aten::linear", module: str = "", **others: Any) -> Site:
    """A site, by default in float16 with a small error."""
    known: dict[str, Any] = {
        "overload": "",
        "calls": 1,
        "line": "/code/model.py:12",
        "dtypes": "float16",
        "policy": "lower_precision_fp",
        "local": 3e-4,
        "local_ulp": 0.5,
        "local_sqnr": 70.4,
        "accumulated": 8e-4,
        "accumulated_ulp": 3.0,
        "accumulated_sqnr": 61.9,
        "impact": 1e-5,
        "signed_impact": -4e-6,
        "bytes": 4096,
        **others,
    }
    return Site(op, module=module, **known)


def comparison_of(*sites: Site, **others: Any) -> Comparison:
    """A comparison with these sites, of stock's policy with float32."""
    known: dict[str, Any] = {
        "reference": Policy.named("off"),
        "candidate": Policy.stock(),
        "metrics": [Metric("loss", 2.3441, 2.3469, 1.19e-3)],
        "runs": 3,
        "backwards": 2,
        "torch_version": "2.13.0",
        **others,
    }
    return Comparison(sites=list(sites), **known)


def small_comparison(**others: Any) -> Comparison:
    """A softmax with a large impact, a product with a small one, and an op outside of modules with an unknown one."""
    softmax = made_up_site(
        "aten::softmax",
        "blocks.0.attn",
        overload="int",
        calls=2,
        line="/code/model.py:31",
        local=0.02,
        local_ulp=41.0,
        local_sqnr=34.0,
        accumulated=0.021,
        impact=2.5e-3,
        signed_impact=1.9e-3,
    )
    product = made_up_site("aten::linear", "blocks.0.attn.q")
    loss = made_up_site(
        "aten::mse_loss",
        dtypes="float16, float32",
        policy="",
        line="",
        local=0.0,
        local_ulp=0.0,
        local_sqnr=math.inf,
        accumulated=None,
        accumulated_ulp=None,
        accumulated_sqnr=None,
        impact=None,
        signed_impact=None,
    )
    known: dict[str, Any] = {
        "gradients": [GradientError("blocks.0.attn.q.weight", 0.03, 1.5), GradientError("head.bias", math.inf, 0.0)],
        "modules": ["", "blocks", "blocks.0", "blocks.0.attn", "blocks.0.attn.q", "head"],
        "not_aligned": ["aten::copy_ in head: the candidate made 1 call more."],
        "not_seen": ["A compiled graph ran 2 times. The calls in it were not seen."],
        "notes": ["The step draws random numbers."],
        **others,
    }
    return comparison_of(softmax, product, loss, **known)


def gpt_comparison(blocks: int = 60) -> Comparison:
    """A large comparison: twelve sites in each block of a transformer."""
    ops = {
        "ln_1": ("aten::layer_norm",),
        "attn.qkv": ("aten::linear",),
        "attn": ("aten::matmul", "aten::softmax", "aten::div", "aten::masked_fill"),
        "attn.proj": ("aten::linear",),
        "ln_2": ("aten::layer_norm",),
        "mlp.up": ("aten::linear",),
        "mlp": ("aten::gelu",),
        "mlp.down": ("aten::linear",),
        "": ("aten::add",),
    }
    sites, modules = [], [""]
    for block in range(blocks):
        for place, (name, called) in enumerate(ops.items()):
            path = f"transformer.h.{block}.{name}".rstrip(".")
            modules.append(path)
            for number, op in enumerate(called):
                size = 10.0 ** -(1 + (block * 7 + place * 5 + number * 3) % 23 / 4)
                sites.append(
                    made_up_site(
                        op,
                        path,
                        line=f"/a/long/path/to/some/project/model.py:{20 + place * 4 + number}",
                        local=size,
                        accumulated=size * (1 + block / 10),
                        impact=size * size,
                        nonfinite=3 if (block, op) == (2, "aten::softmax") else 0,
                    )
                )
    sites.sort(key=lambda site: -(site.impact or 0.0))
    return comparison_of(*sites, modules=modules)
