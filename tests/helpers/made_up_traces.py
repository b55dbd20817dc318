"""Reports of made-up calls, whose times and numbers are the same every time."""

from __future__ import annotations

from typing import Any

import torch

from torch_promote.observe.call import Call, Cast, TensorInfo, Unseen
from torch_promote.policy.op_table import CastPolicy
from torch_promote.reading.trace_report import TraceReport
from torch_promote.recording.values import Values

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
START = 1_790_857_026_000_000_000 + 5_000_000_000


def info(name: str, dtype: torch.dtype = F32, *shape: int) -> TensorInfo:
    return TensorInfo(name, dtype, shape or (2, 3), "cpu")


def cast(argument: str, tensor: int = 1, earlier: int = 0, **others: Any) -> Cast:
    """A cast, by default from float32 to bfloat16."""
    known: dict[str, Any] = {"from_dtype": F32, "to_dtype": BF16, "bytes": 1024, "kind": "activation", **others}
    return Cast(argument, tensor=tensor, earlier=earlier, **known)


def made_up_call(op: str = "aten::add", overload: str = "Tensor", **others: Any) -> Call:
    """A call, by default on a float32 tensor in a forward, without casts."""
    known: dict[str, Any] = {
        "module": "",
        "phase": "forward",
        "line": "/code/train.py:7",
        "casts": (),
        "policy": None,
        "policy_source": "",
        "inputs": (info("self"),),
        "outputs": (info("0"),),
        "composite": False,
        "thread": 11,
        "start": START,
        "duration": 1_000,
        **others,
    }
    return Call(op, overload, **{"ran_with": known["inputs"], **known})


def linear(module: str, start: int, tensor: int, earlier: int = 0, **others: Any) -> Call:
    """A call of linear under autocast: it casts its input, and its weight unless that was cast before."""
    inputs = (info("input", F32, 4, 128), info("weight", F32, 128, 128))
    return made_up_call(
        "aten::linear",
        "",
        module=module,
        line="/code/model.py:12",
        inputs=inputs,
        ran_with=tuple(info(one.name, BF16, *one.shape) for one in inputs),
        outputs=(info("0", BF16, 4, 128),),
        casts=(
            cast("input", tensor, earlier, avoidable="all" if earlier else ""),
            cast("weight", 100 + start, bytes=32_768, kind="weight", reused=others.pop("reused", False)),
        ),
        policy=CastPolicy.lower_precision_fp,
        policy_source="PyTorch's table",
        composite=True,
        autocast=(("cpu", BF16),),
        start=START + start,
        duration=100_000,
        cast_time=10_000,
        **others,
    )


def report_of(*calls: Call, max_calls: int = 1000) -> TraceReport:
    """A report that holds these calls."""
    report = TraceReport(max_calls)
    report.torch_version = "2.13.0"
    for call in calls:
        report.add(call)
    return report


def small_report(*, values: bool = False) -> TraceReport:
    """A step with two projections of one tensor, a norm in float32, a loss that casts up, and a backward."""
    measured = (
        Values(
            count=100,
            amax=70_000.0,
            min_nonzero=1e-9,
            zeros=0.1,
            under_float16=0.25,
            over_float16=0.05,
            exponents=((-30, 25), (-20, 20), (0, 40), (16, 5)),
        ),
    )
    norm = made_up_call(
        "aten::layer_norm",
        "",
        module="blocks.0.norm",
        policy=CastPolicy.fp32,
        policy_source="region at /code/train.py:3",
        autocast=(("cpu", BF16),),
        start=START,
        duration=200_000,
    )
    loss = made_up_call(
        "aten::mse_loss",
        "",
        inputs=(info("self", BF16, 4), info("target", BF16, 4)),
        ran_with=(info("self", F32, 4), info("target", F32, 4)),
        casts=tuple(cast(name, from_dtype=BF16, to_dtype=F32, bytes=16) for name in ("self", "target")),
        policy=CastPolicy.fp32,
        policy_source="PyTorch's table",
        autocast=(("cpu", BF16),),
        start=START + 900_000,
        duration=50_000,
        cast_time=5_000,
    )
    mm = made_up_call(
        "aten::mm",
        "",
        module="blocks.0.query",
        phase="backward",
        line="/code/model.py:12",
        inputs=(info("self", BF16), info("mat2", BF16)),
        outputs=(info("0", BF16),),
        start=START + 2_000_000,
        duration=150_000,
    )
    made = linear("blocks.0.query", 300_000, 1)
    report = report_of(norm, made, linear("blocks.0.key", 500_000, 1, 1, reused=True), loss, mm)
    if values:
        report.values[4] = measured
    report.steps = 1
    report.not_seen.append(Unseen("compiled", 2, "A compiled graph ran 2 times. The calls in it were not seen."))
    return report
