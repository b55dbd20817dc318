"""What a program that raised is told: the call that raised first, its tensors, and what cures it.

NOTE [ How a cure is found ]
`trace` has the record of the call. The call is made again, on tensors of the same dtypes and shapes with made-up
values: as the program made it, it has to raise the same error, and under an override, it has to pass. Only then is the
override said to be tried. A call that cannot be made again (a backward, a library's op, a sparse or a large tensor, a
device that is not here) gets the first override that its schema and its dtypes allow, and the text says that it was not
tried.

`run` observes no calls. When an error has ended the program, it reads the expression that raised, and the tensors in
it, from the traceback.
"""

from __future__ import annotations

import ast
import concurrent.futures.thread
import contextlib
import dis
import functools
import gc
import itertools
import linecache
import os
import re
import sys
import threading
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._library.autograd import make_autograd_impl
from torch.amp import GradScaler
from torch.optim import Optimizer

from torch_promote.errors import PolicyError, say
from torch_promote.observe.call import AUTOCAST_OFF, BY_SETTER, COMPILED, Call, TensorInfo
from torch_promote.observe.ops import facts_of, find_overload
from torch_promote.observe.places import RunningModules, is_of_program, line_in_graph, role, shown_line
from torch_promote.observe.policy_sources import STOCK
from torch_promote.policy.named_policies import stock_policy
from torch_promote.policy.op_names import find_overloads
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy
from torch_promote.policy.overrides import selects
from torch_promote.reading.findings import promoted
from torch_promote.recording.program_state import TensorUses
from torch_promote.recording.recording import Failure
from torch_promote.reference.dtypes import LOWER_DTYPES, dtype_name
from torch_promote.regions.autocast import my_autocast
from torch_promote.regions.defaults import DEFAULT_POLICY, registered_policies
from torch_promote.regions.installation import installed
from torch_promote.report.base import module_name, short_line, some_of

_OF_CHECKPOINT = "original forward and recomputation|different metadata than during|during recomputation than during"
_NOT_SAVED = r"_to_copy\.default .*encountered during backward,? but not found in storage"
#: Errors whose text names the cause, and what to do. None of them depends on a cast policy.
_BY_TEXT = {
    "support automatic differentiation": "Calls with out= have no gradient. Assign the result in place of out=, or run "
    "the call under torch.no_grad().",
    r"Attempting to unscale FP16 gradients": "GradScaler needs parameters in float32.",
    r"unscale_\(\) has already been called": (
        "Call scaler.unscale_(optimizer) once before each scaler.step(optimizer), and scaler.update() after it. With "
        "accumulated gradients, call it only where the optimizer steps."
    ),
    r"unscale_\(\) is being called after step\(\)": (
        "The order is scaler.unscale_(optimizer), clip, scaler.step(optimizer), scaler.update()."
    ),
    r"step\(\) has already been called since the last": "Call scaler.update() after each scaler.step(optimizer).",
    r"Attempted \w+ but _scale is None": (
        "scaler.scale(loss).backward() has to come before scaler.unscale_(optimizer) and scaler.step(optimizer)."
    ),
    r"Closure use is not currently supported if GradScaler": (
        "GradScaler.step takes no closure, which LBFGS needs. Train in bfloat16 or float32, without a scaler."
    ),
    r"source state dict is empty": (
        "The checkpoint is of a run whose scaler was disabled. Load it under `if state:`, or start with a new scaler."
    ),
    r"cannot be converted to type .* without overflow": (
        "The number does not fit into the dtype of the tensor. In a mask, write torch.finfo(x.dtype).min in its place."
    ),
    r"probability tensor contains either|returned nan values in its|is non-finite, so it cannot be clipped|contained "
    r"non-finite values|to satisfy the constraint|cannot convert float (NaN|inf)|is not finite": (
        "If a value is inf or NaN, `torch-promote find-nan` names the call that made it."
    ),
    r"No inf checks were recorded for this optimizer": "No parameter of the optimizer has a gradient.",
    r"No inf checks were recorded prior to update": (
        "No gradient was unscaled since the last update. Call scaler.step(optimizer), in place of optimizer.step(), "
        "before scaler.update()."
    ),
    r"Got unsupported ScalarType BFloat16": "NumPy has no bfloat16. Write x.float().numpy().",
    r"attempting to assign a gradient with dtype|assigned grad has data of a different type": (
        "A gradient has the dtype of its parameter. Write p.grad = grad.to(p.dtype)."
    ),
    _NOT_SAVED: (
        "A selective checkpoint saves the casts that its forward makes. If autocast's cache had this one, open the "
        "region with torch.autocast(..., cache_enabled=False), or run under `torch-promote run --cache none`."
    ),
    _OF_CHECKPOINT: "The recomputation of a checkpoint saved other tensors than the forward.",
    r"(result type \w+|input types) can't be cast to the desired output type (Long|Int|Short|Char|Byte|Bool)": (
        "The op writes floating numbers to a tensor of integers. Make that tensor floating, or write x = x * y in "
        "place of x *= y."
    ),
    r"expected target dtype to be Long|expected scalar type Long but found": (
        "Indices of classes are integers: target.long()."
    ),
    r"following scalar types: Long, Int|\"bincount|tensors used as indices must be|only applicable to index tensor|"
    r"int32/int64 for index": (
        "Indices are integers: indices.long(). A conversion of the whole batch, such as batch.to(dtype), has to leave "
        "them out."
    ),
    r"Found dtype (Long|Int|Short|Char|Byte|Bool) but expected": "The target of this loss is floating: target.float().",
    r"not implemented for '(Long|Int|Short|Char|Byte)'|could not infer output dtype": (
        "The op takes floating numbers: x.float()."
    ),
    r"expected condition to be a boolean tensor|got attn_mask\.dtype: (long|int|short|char|signed|unsigned)": (
        "A condition or a mask is a tensor of bools: mask.bool()."
    ),
    r"not implemented for 'Float8|not supported for Float8": (
        "PyTorch stores numbers in float8, and this op does not compute in it: x.to(torch.bfloat16) first."
    ),
    r"_amp_foreach_non_finite_check_and_unscale": (
        "GradScaler does not take gradients in bfloat16, which need no scale: GradScaler(enabled=False), or keep the "
        "weights in float32."
    ),
    r"Expected `device_type` of type `str`": (
        'torch.autocast takes the type of a device, such as "cuda": torch.autocast(device.type).'
    ),
    r"RNN input dtype .* does not match weight dtype": (
        "Autocast is off there, and the input has another dtype than the weights. Pass input.to(weight.dtype), or run "
        "the module in an autocast region."
    ),
    r"Only Tensors of floating point and complex dtype can require gradients": (
        "Integers have no gradient: make the tensor floating, or a buffer (register_buffer)."
    ),
}
_NEW_GRADIENTS = (
    "A backward of a scaled loss has made new gradients since the first scaler.unscale_(optimizer), and they are still "
    "scaled. Keep both calls, and call scaler.update() before that backward."
)
_KEEP_FLOAT32 = (
    " Keep the model in float32, and let autocast cast: no model.half(), and no dtype=torch.float16 where it is loaded."
)
_FROZEN = (
    " Parameters that are frozen may stay in float16: `for p in model.parameters(): if p.requires_grad: p.data = "
    "p.data.float()`."
)
#: Errors of kernels and checks that need a wider dtype, so that float32 comes first among the overrides.
_NEEDS_FLOAT32 = re.compile(
    r"not implemented for '(Half|BFloat16)'|Low precision dtypes|either float or double|Unsupported dtype|primitive "
    r"descriptor|other than float and double|of float, double|Half, Float or Double|half, float and double|is banned|"
    r"unsafe to autocast|support tensors of type"
)
_MAKES_COMPLEX = re.compile("complex|::stft|fft_(?!ir|hf)")
#: The file with the autograd.Function of ops that have torch.library.register_autograd, and functions of PyTorch's.
_OF_LIBRARY = make_autograd_impl.__code__.co_filename
_BETWEEN_FUNCTIONS = "CheckpointFunction.", "make_autograd_impl.", "supports_tensorlist."
#: The backward of an autograd.Function that custom_bwd decorates.
_DECORATED = "custom_bwd.<locals>."
_CALLS_OF_OPS = torch._ops.OpOverload.__call__.__code__, torch._ops.OpOverloadPacket.__call__.__code__
#: The most elements of the tensors of a call that is made again.
_MOST_ELEMENTS = 1 << 24
#: The ops of operators, by the class of the syntax tree.
_OPERATORS = {"Add": "add", "Sub": "sub", "Mult": "mul", "Div": "div", "MatMult": "matmul", "Pow": "pow"}


@dataclass(frozen=True, slots=True)
class Cure:
    """What cures an error."""

    text: str  # what to do, in sentences; "" if nothing is known
    overrides: Mapping[str, str]  # the override that cures it, for `my_autocast` or `--override`; empty if none does
    tried: bool = False  # whether the call was made again under the override, and passed


def failure_of(
    error: BaseException | None, raised: Iterable[tuple[Call, Call]], uses: TensorUses | None = None
) -> Failure | None:
    """Returns what an error says that ends a block, if it is, or wraps, that of the last call, or is about dtypes."""
    last, ended = next((call for call, _ in reversed(list(raised))), None), error
    while error is not None:
        steps = list(traceback.walk_tb(error.__traceback__))
        frames = [frame for frame, _ in steps]
        lines = {_line(step) for step in steps}
        in_backward = any(frame.f_code.co_name == "_engine_run_backward" for frame in frames)
        found = last is not None and (
            (last.phase == "backward" and in_backward) or any(last.line and line.endswith(last.line) for line in lines)
        )
        text = _of_script(f"{type(error).__name__}: {error}")
        told = "" if found else _cure_in(frames, text, uses) or cure_of_compiled(text, _never_acts(frames))
        if not (found or told) and (_is_in_thread(frames) or _HANDED_ON.search(text)):  # which a trace does not observe
            told = _of_error(error)
        if found and last is not None and _is_in_step(frames[_of_program(frames) + 1 :]):
            told = _of_a_step(last.inputs)
        if found or told:
            return Failure(text[:2000], _custom_function(frames), found, told, _called_at(steps))
        error = error.__cause__ or error.__context__
    told = _of_python(ended)
    return Failure(f"{type(ended).__name__}: {ended}"[:2000], "", False, told) if told else None


_IN_PYTHON = "raised in Python at "
_NAMES_DTYPES = re.compile(r"\btorch\.(b?float|complex|half|double)\d*")


def _of_python(error: BaseException | None) -> str:
    """Says where Python code raised an error whose text names floating dtypes; "" for any other."""
    if error is None or not _NAMES_DTYPES.search(str(error)) or not (trace := _trace_of(error)):
        return ""
    steps = list(traceback.walk_tb(trace[0]))
    frames = [frame for frame, _ in steps]
    by_op = any(one.f_code in _CALLS_OF_OPS or one.f_code.co_name == "__torch_dispatch__" for one in frames)
    if by_op or _is_in_thread(frames) or not _is_raise(trace[-1]):
        return ""
    line = _line(steps[-1])
    return f"The {type(error).__name__} was {_IN_PYTHON}{short_line(line)}{_called_at(steps, line)}; no op raised it."


def _trace_of(error: BaseException) -> list[types.TracebackType]:
    steps = [error.__traceback__]
    while steps[-1] is not None:
        steps.append(steps[-1].tb_next)
    return [one for one in steps if one is not None]


def _is_raise(step: types.TracebackType) -> bool:
    """Whether a step of a traceback is at `raise` or `assert`, and not at a call."""
    return dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]] == "RAISE_VARARGS"


def _line(step: tuple[types.FrameType, int]) -> str:
    """The line of a step of a traceback; in the graph of a compiled function, that for which it stands."""
    frame, number = step
    return line_in_graph(frame, number) or f"{frame.f_code.co_filename}:{number}"


_IN_SCRIPT = " (in TorchScript"
#: The lines in a traceback of TorchScript: of a graph that was traced, the innermost first; of a script, the last.
_LINES_OF_SCRIPT = re.compile(r'(?m)^(?:  File "(.+?)", line (\d+)|(\S.*?)\((\d+)\): )')


def _of_script(text: str) -> str:
    """The text of an error; of one with a traceback of TorchScript, its last line and the line of the program."""
    if "failed in the TorchScript interpreter" not in text:
        return text
    lines = _LINES_OF_SCRIPT.findall(text)
    lines = [
        (scripted or traced, a or b) for scripted, a, traced, b in (lines if lines[:1] and lines[0][2] else lines[::-1])
    ]
    own = [f", {short_line(file)}:{line}" for file, line in lines if "-packages" not in file]
    return f"{text.rstrip().splitlines()[-1]}{_IN_SCRIPT}{own[0] if own else ''})"


#: What runs the function of a thread.
_THREADS = threading.Thread.run.__code__, concurrent.futures.thread._WorkItem.run.__code__
_IN_THREAD = (
    "It ran in a thread of its own: a region that another thread has opened does not act there. Open torch.autocast in "
    "that thread. "
)
#: What torch's ExceptionWrapper says of an error that a thread or a process hands on.
_HANDED_ON = re.compile(r"Caught \w+ (in .+)\.\nOriginal Traceback")


def _of_program(frames: Sequence[types.FrameType]) -> int:
    """The place of the innermost frame of the program; the last place without one."""
    python = os.path.dirname(threading.__file__)
    files = [one.f_code.co_filename if is_of_program(one) else python for one in frames]
    return max((at for at, file in enumerate(files) if not file.startswith(python) or "-packages" in file), default=-1)


def _is_in_thread(frames: Iterable[types.FrameType]) -> bool:
    """Whether another thread than this one ran one of the frames; it may have handed its error on."""
    here = _thread_of(sys._getframe())
    return any(_thread_of(frame) not in (None, here) for frame in frames)


def _thread_of(frame: types.FrameType | None) -> types.FrameType | None:
    """The frame that runs the function of a frame's thread; None in the main thread."""
    while frame is not None and frame.f_code not in _THREADS:
        frame = frame.f_back
    return frame


def _is_in_step(frames: Iterable[types.FrameType]) -> bool:
    """Whether one of the frames is a step of an optimizer."""
    return any(one.f_code.co_name == "step" and isinstance(one.f_locals.get("self"), Optimizer) for one in frames)


def _never_acts(frames: Sequence[types.FrameType]) -> bool:
    """Whether no override acts: in a step of an optimizer, and in a function that a disabled region decorates."""
    regions = [one.f_locals["autocast_instance"] for one in frames if one.f_code.co_name == "decorate_autocast"]
    return _is_in_step(frames) or (bool(regions) and not regions[-1]._enabled)


def _called_at(steps: Sequence[tuple[types.FrameType, int]], inner: str = "") -> str:
    """Where the program's own code calls the code of a line, by default the innermost that is not PyTorch's; or ""."""
    python = os.path.dirname(threading.__file__)
    lines = [f"{frame.f_code.co_filename}:{number}" for frame, number in steps if is_of_program(frame)]
    own = [one for one in lines if "-packages" not in one and not one.startswith(python)]
    return f", called at {short_line(own[-1])}" if own and own[-1] != (inner or lines[-1]) else ""


def _cure_in(frames: Sequence[types.FrameType], text: str, uses: TensorUses | None = None) -> str:
    """What cures an error whose text says the cause, with what is known of the parameters if a GradScaler raised it."""
    known = cure_by_text(text)
    of_scaler = (one.f_locals for one in frames if isinstance(one.f_locals.get("self"), GradScaler))
    optimizer = next((one["optimizer"] for one in of_scaler if isinstance(one.get("optimizer"), Optimizer)), None)
    if optimizer is None:
        return known
    local = [one for frame in frames for one in frame.f_locals.values() if isinstance(one, nn.Module)]
    names: dict[torch.Tensor, str] = {one: name for of in local for name, one in nn.Module.named_parameters(of)}
    for module, path in () if uses is None else uses.modules.named():
        names |= {one: f"{path}.{name}".lstrip(".") for name, one in module._parameters.items() if one is not None}
    if "unscale_() has already been called" in text and uses is not None:
        held = uses.scaled.of_optimizer(optimizer)
        return _NEW_GRADIENTS if "scaled gradient" in held and "partly scaled gradient" not in held else known
    if "Attempting to unscale FP16 gradients" in text:
        return f"{known} {_in_half(optimizer, names, uses)}"
    is_without = "No inf checks were recorded for" in text
    return f"{known} {_without_gradient(optimizer, names, uses)}" if is_without else known


def _in_half(optimizer: Optimizer, names: Mapping[torch.Tensor, str], uses: TensorUses | None) -> str:
    """Says which parameters of an optimizer are float16, and since when."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    since: dict[str, list[str]] = {}
    for one in (each for each in parameters if each.dtype is torch.float16):
        made, first = (None, None) if uses is None else (uses.conversion(one), uses.first_dtype(one))
        how = "" if first in (None, one.dtype) else f" (read first in {dtype_name(first)})"
        how = f" (converted from {dtype_name(made.inputs[0].dtype)} at {short_line(made.line)})" if made else how
        since.setdefault(how, []).append(names.get(one, f"one of shape {list(one.shape)}"))
    those = "; ".join(f"{some_of(of)}{how}" for how, of in since.items())
    told = f"Of the optimizer's {len(parameters):,}, these are float16: {those}."
    told += " Leave these in float32 there, and convert a copy for a call." * any(since) + _KEEP_FLOAT32 * ("" in since)
    return told + _FROZEN * any(one.dtype is torch.float16 and not one.requires_grad for one in names)


def _without_gradient(optimizer: Optimizer, names: Mapping[torch.Tensor, str], uses: TensorUses | None) -> str:
    """Says why no parameter of an optimizer has a gradient, as far as it is known."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    held = {one for each in optimizers for group in getattr(each, "param_groups", ()) for one in group["params"]}
    left = [name for one, name in names.items() if one.grad is not None and one not in held]
    is_read = uses is not None and any(uses.first_dtype(one) is not None for one in parameters)
    told = f"No traced call that autograd recorded read the optimizer's {len(parameters):,} parameters. "
    told *= not is_read and uses is not None and uses.has_read
    if not any(one.requires_grad for one in parameters):
        return "None requires one."
    if left and not is_read:
        told += f"{len(left):,} others have gradients and are in no optimizer: {some_of(left)}."
        return f"{told} Build the optimizer after the model is final."
    if is_read and uses is not None and any(map(uses.scaled.of_optimizer, optimizers)):
        return "Another optimizer has some. Call scaler.step() for those alone that have a gradient in this step."
    told += "Call backward() before the step, and optimizer.zero_grad() after it"
    return f"{told}." if is_read else f"{told}; check that the optimizer has the parameters of this model."


def _custom_function(frames: Sequence[types.FrameType]) -> str:
    """The backward, or forward, of the innermost autograd.Function that the frames are in: "Scale.backward", or ""."""
    names = [
        one.f_locals["op"].name()
        for one in frames
        if (one.f_code.co_filename, one.f_code.co_name) == (_OF_LIBRARY, "backward") and "op" in one.f_locals
    ]
    names += [
        getattr(inner.f_code, "co_qualname", inner.f_code.co_name)
        for outer, inner in itertools.pairwise(frames)
        if outer.f_code.co_name == "apply"
        and outer.f_code.co_filename.endswith(os.path.join("autograd", "function.py"))
    ]
    return next((name for name in reversed(names) if not name.startswith(_BETWEEN_FUNCTIONS)), "")


def describe_raised(raised: tuple[Call, Call]) -> str:
    """Returns the call that raised, with its tensors and its place."""
    call, first = raised
    inside = f" (in it, {first.name} of {_tensors(first.ran_with)})" if first is not call else ""
    autocast = spell_autocast(call.autocast) or "off"
    policy = f", policy {call.policy_name} by {call.reason}" if call.policy_name else ""
    place = f"{call.phase}, module {module_name(call.module)}"
    place += f", {_spell_line(call.line, call.policy_source == COMPILED)}" if call.line else ""
    return f"{call.name} of {_tensors(call.inputs)}{inside}: {place}, autocast {autocast}{policy}"


def short_source(text: str) -> str:
    """Returns who has set a policy, or switched autocast off, without folders, and as the program spells it."""
    found = re.fullmatch(r"(.*?)(install, )?(region)( of custom_bwd| opened in the backward|) at (.*)", text)
    if found is None:
        return text
    before, by_install, region, by, line = found.groups("")
    if by_install and before.startswith((AUTOCAST_OFF, "no region")):
        by_install, region, by = ("", "", "custom_bwd") if "custom_bwd" in by else ("", "torch.autocast", by)
    return f"{before}{by_install}{region}{by} at {short_line(line)}"


def spell_autocast(autocast: Iterable[tuple[str, torch.dtype]]) -> str:
    """Returns the device types for which autocast is on, with their dtypes: "cpu bfloat16"."""
    return ", ".join(f"{device} {dtype_name(dtype)}" for device, dtype in autocast)


def _spell_line(line: str, is_compiled: bool) -> str:
    path, _, number = line.rpartition(":")
    named = re.search(r"\bdef (\w+)", linecache.getline(path, int(number or 0))) if is_compiled else None
    if named:  # the first line stands for all
        return f"line unknown, in the compiled function {named[1]} (from {short_line(line)})"
    return f"{short_line(line)}{', in a compiled function' * is_compiled}"


def _changed_dtypes(calls: Sequence[Call]) -> str:
    """Says which calls returned another dtype by a policy or an operand, with the override that would not."""
    found = dict[str, None]()
    for call in (one for one in reversed(calls) if one.own and one.outputs and one.phase != "optimizer"):
        floats, result = [one.dtype for one in call.inputs if one.dtype.is_floating_point], call.outputs[0].dtype
        other, by = "fp32" if call.policy is CastPolicy.lower_precision_fp else "lower", ""
        acts = call.policy_source != BY_SETTER
        for _, wide, _ in promoted([call], of_any_size=True):
            by = f"promoted to float32 by {wide.label}"
        is_new = result not in floats or (call.policy is CastPolicy.promote and len(set(floats)) > 1)
        if call.policy is not None and floats and result.is_floating_point and is_new:
            before = ", ".join(dict.fromkeys(map(dtype_name, floats)))
            by = f"returned {dtype_name(result)} for {before} by {short_source(call.policy_source)}"
            acts = call.policy_source == STOCK and selects(call.op.removeprefix("aten::"), other, call.name)
        name = call.op.removeprefix("aten::")
        place = f"{name} in {module_name(call.module)}, {short_line(call.line)}"
        found |= {f"{place}, {by}{f', {name}={other}' * acts}": None} if by else {}
        if len(found) == 3:
            break
    before = "The last calls before it in which autocast or a promotion changed a dtype, the last first:"
    return f"{before} {'; '.join(found)}." if found else ""


def of_calls_before(failure: Failure, calls: Sequence[Call]) -> str:
    """Says which calls changed dtypes before an error of Python code, or which call of a recomputation differs."""
    if _IN_PYTHON in failure.told:
        return _changed_dtypes(calls)
    own = [call for call in calls if call.own and call.op != "aten::detach"][::-1]  # which the checkpoint calls, too
    again = list(itertools.takewhile(lambda call: call.phase == "recompute", own))
    forward = list(itertools.takewhile(lambda call: call.phase != "optimizer", own[len(again) :]))
    for call in reversed(again) if re.search(_OF_CHECKPOINT, failure.text) else ():
        same = [  # a function that the checkpoint calls itself has no module and line in the recomputation
            one
            for one in forward
            if (one.phase, one.name) == ("forward", call.name)
            and call.module in ("", one.module)
            and call.line in ("", one.line)
        ]
        end = None if call.outputs else -1  # of the last, which the checkpoint stopped, the results are unknown
        ran, *before = (" -> ".join(one.dtypes.split(" -> ")[:end]) for one in (call, *same))
        if ran not in before:
            at = (same or [call])[0]
            where = ", ".join(filter(None, (module_name(at.module), short_line(at.line))))
            both = (
                f"{before[0]} in the forward and {ran} in the recomputation" if same else "in the recomputation alone"
            )
            off, in_it, other = (call, "recomputation", "forward") if at.autocast else (at, "forward", "recomputation")
            source = short_source(off.policy_source).removeprefix(AUTOCAST_OFF)
            region = f" Autocast was off in the {in_it}{source and f', by {source}'}, and on in the {other}."
            region *= bool(at.autocast) != bool(call.autocast)
            return f"The first call that differs: {call.name} in {where}, ran {both}.{region}"
    return ""


def _tensors(infos: Sequence[TensorInfo]) -> str:
    return some_of((f"{one.label if _is_float(one.dtype) else one.name} {one.dtype_and_shape}" for one in infos), 6)


def cure_by_text(text: str) -> str:
    """Returns what cures an error whose text says the cause; "" for any other."""
    return next((cure for pattern, cure in _BY_TEXT.items() if re.search(pattern, text)), "")


def cure_of(raised: tuple[Call, Call], failure: Failure | None, calls: Iterable[Call]) -> Cure:
    """Returns what cures the error of a call, one of these; see NOTE [ How a cure is found ]."""
    call, first = raised
    forwards = (
        one
        for one in (calls if call.phase == "backward" else ())
        if one.own and one.autocast and (one.phase, one.module, one.line) == ("forward", call.module, call.line)
    )
    if failure is not None and re.search(_NOT_SAVED, failure.text):
        return Cure(f"{cure_by_text(failure.text)}{_reused_in_forward(call, calls)}", {})
    forward = next((one for one in forwards if one.op.partition("::")[2] in first.op), None)
    makers = _makers(call, list(calls)) if any(one.owner for one in call.inputs) else {}
    lower = {name: made[0].ran_with for name, made in makers.items() if made}
    computed = frozenset(name for name, ran in lower.items() if any(one.dtype in LOWER_DTYPES for one in ran))
    cure = _cure(raised, failure, forward, computed)
    cast = cure.text.partition("In the code")[2].partition(" Or ")[0]
    if computed and not (cure.tried or _TRIED in cast):
        cure = _cure(raised, failure, forward, frozenset())
    if not cure.text or cure.overrides or len({one.dtype for one in _floats(call.inputs)}) < 2:
        return cure
    return replace(cure, text=f"{cure.text}{made_by(call, list(calls))}")


def _reused_in_forward(call: Call, calls: Iterable[Call]) -> str:
    """Says which casts of a call the forward took from the cache; "" for none."""
    same = (one for one in calls if (one.phase, one.name, one.module) == ("forward", call.name, call.module))
    reused = dict.fromkeys(cast.argument for one in same for cast in one.casts if cast.reused)
    return f" The forward of this call took these casts from the cache: {some_of(reused)}." if reused else ""


def made_by(call: Call, calls: Sequence[Call]) -> str:
    """Returns which calls of the program before a call returned tensors like its own, the last first; "" for none."""
    found = []
    for name, calls_of in _makers(call, calls).items():
        made = dict.fromkeys(f"{one.name} ({one.dtypes}) at {short_line(one.line)}" for one in calls_of)
        found += [f"{name}: {', '.join(made)}"] if 0 < len(made) < 4 else []  # more of them tell nothing
    return f" The calls before it that returned such tensors, the last first: {'; '.join(found)}." if found else ""


def _makers(call: Call, calls: Sequence[Call]) -> dict[str, list[Call]]:
    """The calls before a call that returned tensors like its own, the last first, by the names of these."""
    before = [one for one in calls[: calls.index(call)] if one.own and one.outputs] if call in calls else []
    found = dict[str, list[Call]]()
    for info in _floats(call.inputs):
        wanted, made = {(info.dtype, info.shape)}, found.setdefault(info.name, [])
        for one in reversed(before if not (info.owner or re.search("weight|bias|params", info.name)) else ()):
            if not wanted.isdisjoint((out.dtype, out.shape) for out in one.outputs):
                if one.inputs and (facts_of(one.name).is_view or facts_of(one.name).is_detach):
                    wanted.add((one.inputs[0].dtype, one.inputs[0].shape))
                else:
                    made.append(one)
    return found


@functools.lru_cache(maxsize=64)
def _cure(raised: tuple[Call, Call], failure: Failure | None, forward: Call | None, computed: frozenset[str]) -> Cure:
    """The same; `forward` is the call that the backward is of, `computed` the arguments that calls before it made."""
    (call, first), text = raised, "" if failure is None else failure.text
    known = cure_by_text(text)
    if known:
        return Cure(known, {})
    in_function = "" if failure is None else failure.function
    if call.phase == "backward" and not call.autocast and not in_function.startswith(_DECORATED):
        return Cure(_of_a_backward(first.inputs, in_function, first.name, forward), {})
    floats = {one.dtype for one in call.inputs if _is_float(one.dtype)}
    if not floats:
        return Cure("", {})
    if call.phase == "optimizer" and (failure is None or failure.told):  # a traceback tells whether PyTorch made it
        return Cure("" if failure is None else failure.told, {})
    if len(floats) > 1 and call.autocast and not (call.op.startswith("aten::") or call.policy_name):
        return Cure(f"Autocast has no policy for it. {_of_library(call.name, floats)}", {})
    devices = {one.device.partition(":")[0] for one in call.inputs}
    on = [dtype for device, dtype in call.autocast if device in devices]
    if not on or call.policy_source in (COMPILED, BY_SETTER):
        source = call.policy_source or first.policy_source
        return _with_autocast_off(replace(call, policy_source=source), text, computed)
    again = _outcome(call, _in_force(call))
    repeats = bool(again) and (not text or _alike(str(again), text))
    for key, policy in _candidates(raised, text) if repeats or not _keeps(floats) else ():
        if not repeats:
            if not (is_about_dtypes(text) if text else len(floats) > 1):
                break
            return Cure(_override(key, policy, tried=False), {key: policy})
        if _outcome(call, {**_in_force(call), key: policy}) == "":
            return Cure(_override(key, policy, tried=True), {key: policy}, tried=True)
    if torch.float64 in floats and len(floats) > 1:
        doubles = ", ".join(one.name for one in call.inputs if one.dtype is torch.float64)
        return Cure(f"Autocast casts no float64. Make {doubles} float32 in the code, with .float() {_NOT_TRIED}.", {})
    by_hand, cast = _by_hand(call, _AT_LINE, computed)
    if repeats and _outcome(replace(call, inputs=cast), _in_force(call)) != "":
        return Cure("No cast policy cures it." if is_about_dtypes(text) else "", {})
    if not repeats and not is_about_dtypes(text):
        return Cure("", {})
    by_hand = "" if _IN_SCRIPT in text else by_hand.replace(_NOT_TRIED, _TRIED) if repeats else by_hand
    module = ""
    if call.module and not call.module[0].isupper() and len(floats) == 1 and not call.composite:
        module = (
            f' Or run the module in float32: tp.set_module_policy(model, {{"{call.module}": "fp32"}}) {_NOT_TRIED}.'
        )
    return Cure(f"No cast policy cures it. {by_hand}{module}".rstrip(), {})


def _of_library(name: str, floats: Iterable[torch.dtype]) -> str:
    got = " and ".join(sorted(map(dtype_name, floats)))
    return (
        f"{name} got {got}. If it takes one dtype, give it a policy where it is defined: "
        f'tp.register_policy("{name}", "promote"), or "lower" or "fp32" {_NOT_TRIED}.'
    )


def _alike(mine: str, theirs: str) -> bool:
    """Whether two texts are those of one error; a short text may be a part of the other."""
    return mine.partition("\n")[0][:80] in theirs


def _keeps(dtypes: Iterable[torch.dtype]) -> bool:
    """Whether autocast keeps one of several dtypes as it is."""
    found = set(dtypes)
    return len(found) > 1 and any(one is torch.float64 or one.is_complex for one in found)


def _of_a_backward(infos: Sequence[TensorInfo], function: str, name: str = "", forward: Call | None = None) -> str:
    if "::" in function:
        device = next((f'"{one.device.partition(":")[0]}"' for one in infos), "device_type")
        lower = next((one.dtype for one in infos if one.dtype in LOWER_DTYPES), "dtype")
        return (
            f"The backward of the op {function} (register_autograd) runs with autocast off. If its forward ran with "
            f'autocast on, torch.library.register_autocast("{function}", {device}, {lower}) casts its inputs to one '
            "dtype (not tried). Or cast in that backward."
        )
    if function:
        device = next((one.device.partition(":")[0] for one in infos), "...")
        return (
            f"The backward of the autograd.Function {function.rpartition('.')[0] or function} runs with autocast off. "
            f'If its forward ran with autocast on, decorate it with torch.amp.custom_fwd(device_type="{device}"), and '
            f'the backward with torch.amp.custom_bwd(device_type="{device}") {_NOT_TRIED}.'
        )
    dtypes = sorted({dtype_name(one.dtype) for one in infos if _is_float(one.dtype)})
    if len(dtypes) < 2:
        return ""
    how = ": a loss takes target.to(prediction.dtype)." if "loss" in name else ", or run the op in float32."
    if forward is not None and "loss" not in name:
        key = forward.op.removeprefix("aten::")
        if selects(key, "fp32", forward.name):
            how = f", or run it in float32: {_override(key, 'fp32', tried=False)}"
    return f"The call of the backward got several dtypes ({', '.join(dtypes)}). Cast in the forward{how}"


def _of_a_step(infos: Iterable[TensorInfo]) -> str:
    mixed = ", ".join(f"{one.name} {dtype_name(one.dtype)}" for one in _floats(infos))
    return (
        f"A step of the optimizer got several dtypes ({mixed}). A parameter, its gradient and its states need one: "
        "make the optimizer after the model has its dtype, and load its state with load_state_dict, which casts."
    )


def _with_autocast_off(call: Call, text: str, computed: frozenset[str]) -> Cure:
    if not _outcome(call, {}) and not is_about_dtypes(text):
        return Cure("", {})
    compiled = call.policy_source == COMPILED
    by_hand, cast = _by_hand(call, _OF_COMPILED if compiled else _AT_LINE, computed)
    again = _outcome(call, {})
    if again and _alike(again, text or again):
        outcome = _outcome(replace(call, inputs=cast), {})
        by_hand = by_hand.replace(_NOT_TRIED, _TRIED) if outcome == "" else by_hand
        by_hand *= not is_about_dtypes(outcome or "")  # another error may be one of the made-up values
    by_hand *= _IN_SCRIPT not in text  # whose ops have no line
    source = short_source(call.policy_source)
    by = f", by {source.removeprefix(AUTOCAST_OFF)}" * source.startswith(AUTOCAST_OFF)
    by = f" ({source})" if source.startswith("no region") else by
    off = _IN_GRAPH if compiled else f"Autocast is off there{by}, so no override acts. "
    device = next((one.device.partition(":")[0] for one in call.inputs), "cpu")
    if call.policy_source == BY_SETTER:
        off = f"Autocast is on by {BY_SETTER}, so no override acts. "
        if device not in dict(call.autocast):
            off += f"It is on for {' and '.join(dict(call.autocast))}, and the tensors are on {device}: "
            off += f'torch.set_autocast_enabled("{device}", True) {_NOT_TRIED}. '
    lower = next((one.dtype for one in call.inputs if one.dtype in LOWER_DTYPES), torch.bfloat16)
    in_region = ""
    if not source.startswith(AUTOCAST_OFF) and _outcome(call, {}, ((device, lower),)) == "" and _outcome(call, {}):
        in_region = (
            f"{' Or open' if by_hand else 'Open'} a region around it and the ops that take its result {_TRIED}: "
            f'torch.autocast("{device}", {lower}).'
        )
    if not (by_hand or in_region):
        return Cure("", {})
    return Cure(f"{off}{by_hand}{in_region}{f' {_UNCOMPILED}' * compiled}", {})


_NOT_TRIED, _TRIED = "(not tried)", "(tried for the call alone)"
#: Where to cast, if the program's line makes the call, calls a function of PyTorch's, or calls a graph.
_AT_LINE, _CALLING, _OF_COMPILED = ", at that line", " that calls it", " of that function"
_MODULE_CALLS = nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__
_IN_GRAPH = "An override acts only where the function is compiled. "
_UNCOMPILED = "With TORCH_COMPILE_DISABLE=1, `torch-promote trace` names the call and its line, and tries what it can."


def _by_hand(call: Call, place: str, computed: Iterable[str] = ()) -> tuple[str, tuple[TensorInfo, ...]]:
    """Returns what to write in the code, not tried, and the tensors then; "" and the same ones if there is nothing."""
    infos = _floats(call.inputs)
    dtypes = list(dict.fromkeys(one.dtype for one in infos))
    if len(dtypes) < 2:
        if not set(dtypes) & {torch.bfloat16, torch.float16}:
            return "", call.inputs
        target = torch.float32
    else:
        # A weight and a tensor that is written keep their dtypes; of others, float64 is rarely meant.
        is_kept = re.compile(r"(^|[._])(out$|mat2$|weight)").search
        kept = [one.dtype for one in infos if is_kept(one.name) or (one is infos[0] and call.op.endswith("_"))]
        wide = functools.reduce(torch.promote_types, [one for one in dtypes if one is not torch.float64])
        (most, count), (_, rest) = Counter(one.dtype for one in infos).most_common(2)
        target = most if count > rest and not most.is_complex else wide  # such as a mask, or a state
        target = kept[0] if kept and not wide.is_complex else target
        free = [one for one in infos if not one.owner]
        made = {one.dtype for one in free}
        if len(made) == 1 and made <= {*LOWER_DTYPES} and {one.name for one in free} <= {*computed}:
            (target,) = made  # of activations, which a buffer of float32 meets
    cast = tuple(replace(one, dtype=target) if one in infos else one for one in call.inputs)
    hidden = "out" * (place == _OF_COMPILED)  # a tensor of the graph
    changed = ", ".join(one.label for one in infos if one.dtype is not target and one.name != hidden)
    back = f", and its result back with .to({dtypes[0]}), if the next op needs it" if len(dtypes) == 1 else ""
    if back and _MAKES_COMPLEX.search(call.op):
        back = (
            ", and what its complex64 result meets with .to(torch.complex64). Cast the real tensor that comes of these "
            f"back with .to({dtypes[0]}), if the next op needs it"
        )
    others = [one for one in infos if one.dtype is target]
    writes = call.op.endswith("_") or any(one.name.endswith("out") for one in others)
    if len(dtypes) == 2 and len(others) < 3 and not (writes or target.is_complex or torch.float64 in dtypes):
        (other,) = {*dtypes} - {target}
        back = f". Or cast {', '.join(one.label for one in others)} with .to({other}), if the ops after it need that"
    return f"In the code{place}: cast {changed} with .to({target}) {_NOT_TRIED}{back}.", cast


def _floats(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
    """The tensors that casts are made of: not an optimizer's counters of steps, which stay exact in float32 alone."""
    return [one for one in infos if _is_float(one.dtype) and (one.shape or "step" not in one.name)]


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


# Overrides, and the call made again


def _candidates(raised: tuple[Call, Call], text: str, all_known: bool = True) -> Iterator[tuple[str, str]]:
    """Yields overrides that are legal for the call, the likeliest first."""
    floats = {one.dtype for one in raised[0].inputs if one.dtype.is_floating_point}
    alone = len(floats) == 1 and (all_known or not text)
    wider = ("fp32", "promote") if alone or _NEEDS_FLOAT32.search(text) else ("promote", "fp32")
    changes_none = alone and torch.float32 in floats
    for policy in ("lower",) if changes_none else ("match_self", *wider, "lower"):
        for call in dict.fromkeys(raised):
            for name in (call.op, f"{call.op}.{call.overload or 'default'}"):
                key = name.removeprefix("aten::")
                if selects(key, policy, call.name):
                    yield key, policy
                    break


def _override(key: str, policy: str, tried: bool) -> str:
    how = "tried: the call passes" if tried else "not tried"
    return f'--override {key}={policy}, in code my_autocast(overrides={{"{key}": "{policy}"}}) ({how}).'


def _in_force(call: Call) -> dict[str, str]:
    """The override under which the call raised, if there was one."""
    set_by, own = call.policy_source, ("region ", "install,", "register_policy")
    if not set_by.startswith(own) and not set_by.endswith(DEFAULT_POLICY):
        return {}
    return {call.name.removeprefix("aten::"): call.policy_name} if call.policy_name else {}


def _outcome(
    call: Call, overrides: Mapping[str, str], autocast: tuple[tuple[str, torch.dtype], ...] | None = None
) -> str | None:
    """Makes a call again in a thread of its own. Returns the text of its error, "" if it passes, None if it cannot."""
    found: list[str | None] = [None]

    def make() -> None:
        try:
            op, args = _rebuilt(call)
        except (LookupError, TypeError, ValueError, RuntimeError, AssertionError, AttributeError):
            return
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng([]))
            for device, dtype in call.autocast if autocast is None else autocast:  # of which one may not be here
                stack.enter_context(my_autocast(device, dtype, overrides=overrides))
            try:
                op(*args)
                found[0] = ""
            except Exception as error:
                found[0] = str(error) or type(error).__name__

    with contextlib.suppress(Exception):
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    return found[0]


def _rebuilt(call: Call) -> tuple[Any, list[Any]]:
    """Returns the op of a call, and arguments as it had. Raises if it cannot be made again."""
    namespace, _, name = call.op.partition("::")
    if namespace != "aten":
        raise ValueError("a library's op may do more than compute, such as talk to other processes")
    op = getattr(getattr(getattr(torch.ops, namespace), name), call.overload or "default")
    if any(one.strides == () for one in call.inputs):
        raise ValueError("the sizes of a nested tensor are unknown")
    if sum(functools.reduce(lambda a, b: a * b, one.shape, 1) for one in call.inputs) > _MOST_ELEMENTS:
        raise ValueError("it is too large")
    chosen = next((one.shape[0] for one in call.inputs if one.name == "values" and one.shape), 0)
    tensors = {one.name: _tensor(one, chosen) for one in call.inputs}
    values, args = dict(call.arguments), list[Any]()
    for argument in op._schema.arguments:
        listed = [name for name in tensors if name.startswith(f"{argument.name}[")]
        if argument.name in tensors:
            args.append(tensors[argument.name])
        elif listed:
            places = {int(name[len(argument.name) + 1 : -1]): tensors[name] for name in listed}
            args.append([places.get(place) for place in range(max(places) + 1)])
        elif argument.name in values:
            args.append(_value(values[argument.name], str(argument.real_type)))
        else:
            args.append(argument.default_value if argument.has_default_value() else None)
    if not op._schema.arguments or not tensors:
        raise ValueError("it has no tensors")
    # What comes after a `*` of the schema is passed by name.
    split = sum(not argument.kwarg_only for argument in op._schema.arguments)
    named = {
        argument.name: value for argument, value in zip(op._schema.arguments, args, strict=True) if argument.kwarg_only
    }
    return functools.partial(op, **named), args[:split]


def _tensor(info: TensorInfo, chosen: int) -> torch.Tensor:
    """A tensor of ones, zeros or the identity, so that decompositions exist; a mask has `chosen` true elements."""
    shape = info.shape
    if info.dtype is torch.bool:
        mask = torch.zeros(shape, dtype=torch.bool, device=info.device)
        mask.view(-1)[:chosen] = True
        return mask
    if not (info.dtype.is_floating_point or info.dtype.is_complex):
        return torch.zeros(shape, dtype=info.dtype, device=info.device)
    tensor = torch.ones(shape, device=info.device)
    if len(shape) > 1 and shape[-1] == shape[-2]:
        tensor = torch.eye(shape[-1], device=info.device).expand(shape).contiguous()
    return tensor.to(info.dtype)


def _value(value: Any, kind: str) -> Any:
    """An argument as it was, from the one that `Call.arguments` has."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, tuple) else value
    if "digest" in value:
        raise ValueError("its text was shortened")
    if "ScalarType" in kind:
        return getattr(torch, value)
    if "Device" in kind:
        return torch.device(value)
    if "Layout" in kind or "MemoryFormat" in kind:
        return getattr(torch, value.removeprefix("torch."))
    return value if "str" in kind else float(value)


# The error of a program that nothing observes


def say_at_exit() -> None:
    """At the end of a program that an error has ended: says what raised, and what cures it, if that is known."""
    error = ended = getattr(sys, "last_value", None)
    text = ""
    while error is not None and not text:
        with contextlib.suppress(Exception):  # a tool never breaks the program that it watches
            text = _of_error(error)
        error = error.__cause__ or error.__context__
    with contextlib.suppress(Exception):
        if not text and (text := _of_python(ended)):
            text += " `torch-promote trace` names the last calls before it that changed a dtype."
    if text:
        say(f"torch-promote: {text}")


def _of_error(error: BaseException) -> str:
    steps, trace = list(traceback.walk_tb(error.__traceback__)), _trace_of(error)
    if not steps:
        return ""
    # A custom op's kernel may be in Python.
    at = next((at for at, (frame, _) in enumerate(steps) if frame.f_code in _CALLS_OF_OPS), None)
    steps = steps[:at] or steps
    text = f"{type(error).__name__}: {error}"
    frames = [one for one, _ in steps]
    idle = _never_acts(frames)
    if told := cure_of_compiled(text, idle):
        return told
    own = _of_program(frames)
    frame, below = frames[own], frames[own + 1 :] if own >= 0 else []
    compiled = any(role(one.f_code).is_compiled for one in below)
    in_backward = any(one.f_code.co_name == "_engine_run_backward" for one in frames)
    in_graph = next(filter(None, (line_in_graph(*one) for one in reversed(steps[own + 1 :]))), "")
    line = shown_line(in_graph or _line(steps[own]))
    modules = RunningModules()
    path = modules.path_at(frame if compiled else steps[-1][0])
    where = f"{_spell_line(line, compiled)}{_called_at(steps)}, module {module_name(path)}"
    in_thread, handed_on = _is_in_thread(frames), _HANDED_ON.search(text)
    known = _cure_in(frames, text)
    if re.search(_OF_CHECKPOINT, text) and not in_thread:
        known += " `torch-promote trace` names the first call that differs."
    if known or not is_about_dtypes(text.rstrip().rpartition("\n")[2] if handed_on else text):
        return known and f"{where}: {known}"
    if handed_on:
        return f"{where}: It ran {handed_on[1]}. A region acts in the thread that opens it: open torch.autocast there."
    ask = _UNCOMPILED if compiled else "`torch-promote trace` names the call, with its dtypes, and tries what it can."
    ask = "" if in_thread else ask
    function = _custom_function(frames)
    if in_backward and not compiled and not function.startswith(_DECORATED):
        return f"{where}, backward: {_of_a_backward((), function) or ask or _IN_THREAD}"
    step = trace[-1 if at is None else at]
    call = None if _is_raise(step) else _written_call(step, modules, path, short_line(line))
    if call is None:  # such as an error that a program raises itself
        return ""
    shown_dtypes = {one.dtype for one in call.inputs if _is_float(one.dtype)}
    if _is_of_two(text) and len(call.inputs) > 1 and len(shown_dtypes) < 2:
        # Such as weights that functional_call has put back, or the tangents of a forward-mode derivative.
        return f"{call.op}, at {where}. The tensors that the traceback shows have one dtype. {ask}".rstrip()
    shown = f"{call.op} of {_tensors(call.inputs)}" if call.inputs else call.op
    code = _OF_COMPILED if compiled else _CALLING if below and not line_in_graph(*steps[-1]) else _AT_LINE
    if code is _CALLING:  # whose names these are
        # If code of PyTorch's calls that, no tensor of the program stands there.
        code *= all(is_of_program(one) or one.f_code in _MODULE_CALLS for one in below[:-1])
        where = f"{short_line(f'{frames[-1].f_code.co_filename}:{steps[-1][1]}')}, called at {where}"
    advice = _of_a_step(call.inputs) if _is_in_step(below) else f"{_advice(call, text, code, in_thread, idle)}{ask}"
    return f"{shown}, at {where}. {advice}".rstrip()


def _advice(call: Call, text: str, place: str = _AT_LINE, in_thread: bool = False, idle: bool = False) -> str:
    """What cures the error of a call of which a traceback alone is known."""
    by_hand, dtypes = _by_hand(call, place)[0], {one.dtype for one in call.inputs if _is_float(one.dtype)}
    if (len(dtypes) < 2 and not _NEEDS_FLOAT32.search(text)) or not place:  # or does not show the other tensor
        by_hand = ""
    by_hand += " " * bool(by_hand)
    if in_thread or place == _OF_COMPILED:
        return f"{_IN_THREAD}{by_hand.replace('In', 'Or in', 1)}" if in_thread else f"{_IN_GRAPH}{by_hand}"
    all_known = len(call.inputs) >= len(_tensor_arguments(call.name))
    key, policy = next(_candidates((call, call), text, all_known), ("", ""))
    device = next((one.device.partition(":")[0] for one in call.inputs), "cpu")
    stock = stock_policy(call.name, device) if device in DEVICE_TYPES else None
    if _keeps(one.dtype for one in call.inputs if _is_float(one.dtype)) or not key or idle:
        return by_hand
    if len(dtypes) > 1 and not call.op.startswith("aten::") and (call.name, device) not in registered_policies():
        return f"{_of_library(call.name, dtypes)} {by_hand}"
    lower = stock is CastPolicy.lower_precision_fp and _NEEDS_FLOAT32.search(text)
    if stock not in (None, CastPolicy.fallthrough, CastPolicy.banned) and not lower:
        return f"Autocast casts for this op, so it is off at that line, and no override acts. {by_hand}"
    handle = installed()
    if handle is not None and handle.overrides.get(key) == policy:
        return (
            f"The override {key}={policy} is in force and did not act: autocast is off at that line, or another op "
            f"makes the call. {by_hand}"
        )
    return f"Where autocast is on: {_override(key, policy, tried=False)} {by_hand}"


#: Texts that may be of an error of dtypes.
_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|not implemented for '|same type|types other than|Low precision|type promot|Unsupported dtype|"
    r"did not match|should be the same|must be the same|primitive descriptor|is banned|unsafe to autocast|c10::|"
    r"tensors but got|Type promoting",
    re.IGNORECASE,
)


def _is_of_two(text: str) -> bool:
    """Whether the text of an error is of two dtypes that differ, and not of one that an op lacks."""
    return is_about_dtypes(text) and not _NEEDS_FLOAT32.search(text)


def is_about_dtypes(text: str) -> bool:
    """Whether the text of an error may be of dtypes."""
    return any(one.search(text) for one in (_ABOUT_DTYPES, _NEEDS_FLOAT32, _NAMES_DTYPES))


def _written_call(step: types.TracebackType, modules: RunningModules, module: str, line: str) -> Call | None:
    """The call that a line of a traceback made, with the tensors whose names stand in it; None if it is no op's."""
    frame = step.tb_frame
    if frame.f_code in _CALLS_OF_OPS:  # such as that of a graph
        op, args, named = (frame.f_locals[name] for name in ("self", "args", "kwargs"))
        op = op if isinstance(op, torch._ops.OpOverload) else getattr(op, op.overloads()[0])
        given = zip((one.name for one in op._schema.arguments), args, strict=False)
        return _call(op.name(), _infos([*given, *named.items()], modules), module, line)
    positions = list(frame.f_code.co_positions())[step.tb_lasti // 2]
    first, last, begin, end = positions
    if first is None or last is None or begin is None or end is None:
        return None
    lines = [text.encode() for text in linecache.getlines(frame.f_code.co_filename)[first - 1 : last]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    written = b"".join(lines).decode()
    node: ast.AST
    try:
        node = ast.parse(f"({written})", mode="eval").body
    except SyntaxError:  # x += y
        node = ast.parse(written.strip()).body[0]
    op, operands = _Names(frame, first, modules).read(node)
    if not op:
        return None
    to_out = isinstance(node, ast.Call) and any(keyword.arg == "out" for keyword in node.keywords)
    overloads = [name for name in find_overloads(op) if name.endswith("out") == to_out]
    return _call(overloads[0], operands, module, line)


def _infos(named: Iterable[tuple[str, Any]], modules: RunningModules) -> tuple[TensorInfo, ...]:
    """The tensors among named values, and in their lists."""
    lists = ((name, value if isinstance(value, list | tuple) else None, value) for name, value in named)
    found = [
        (name if values is None else f"{name}[{place}]", tensor)
        for name, values, value in lists
        for place, tensor in enumerate([value] if values is None else values)
        if isinstance(tensor, torch.Tensor) and not tensor.is_nested
    ]
    return tuple(
        TensorInfo(name, one.dtype, tuple(one.shape), str(one.device), owner=modules.spell_owner(one))
        for name, one in found
    )


def _call(name: str, infos: tuple[TensorInfo, ...], module: str, line: str) -> Call:
    op, _, overload = name.partition(".")
    thread = threading.get_native_id()
    return Call(op, overload, module, "forward", line, infos, infos, (), (), None, "", False, thread, error=True)


#: What TorchDynamo says of a call that raises for the tensors of a trace: the call, its arguments, the error, the line.
_COMPILED = re.compile(
    r"fake tensors: call_\w+ (?:<[\w-]+ (?:method |function )?)?(\w+)[^(]*\((.*?)\): got (\w+\(.*?)\n.*?from user code:"
    r'(?:.*File "([^"\n]*)", line (\d+))?',
    re.DOTALL,
)
_FAKE = re.compile(r"FakeTensor\(\.\.\., (?:device='(\w+)[^']*', )?size=\(([\d, ]*)\)(?:, dtype=torch\.(\w+))?")


def cure_of_compiled(text: str, idle: bool = False) -> str:
    """Returns what cures an error of dtypes that torch.compile found while it traced a program; "" for any other."""
    found = _COMPILED.search(text)
    if found is None or not is_about_dtypes(found[3]):
        return ""
    op = {"setitem": "index_put_"}.get(found[1], found[1])
    with contextlib.suppress(PolicyError):
        tensors = [
            (getattr(torch, dtype or "float32"), tuple(map(int, re.findall(r"\d+", size))), device or "cpu")
            for device, size, dtype in _FAKE.findall(found[2])
        ]
        overloads = [(name, _tensor_arguments(name)) for name in find_overloads(op) if not name.endswith("out")]
        name, names = next((one for one in overloads if len(one[1]) >= len(tensors)), overloads[0])
        infos = tuple(
            TensorInfo(*pair) for pair in ((one, *tensor) for one, tensor in zip(names, tensors, strict=False))
        )
        line = short_line(f"{found[4]}:{found[5]}") if found[4] else "line unknown"
        call = _call(name, infos, "", line)
        return (
            f"{call.op} of {_tensors(infos)}, at {line}, compiled: {found[3]}. "
            f"{_advice(call, found[3], idle=idle)}{_UNCOMPILED}"
        )
    return ""


def _tensor_arguments(name: str) -> list[str]:
    return [one.name for one in find_overload(name)._schema.arguments if "Tensor" in str(one.type)]


class _Names:
    """Reads the tensors that a piece of code names from a frame, without calling anything."""

    def __init__(self, frame: types.FrameType, line: int, modules: RunningModules) -> None:
        self._frame = frame
        self._line = line
        self._modules = modules

    def read(self, node: ast.AST) -> tuple[Any, tuple[TensorInfo, ...]]:
        """The op of a call, by its name or function, and its operands; "" if it is none."""
        if isinstance(node, ast.Call):
            function = node.func
            operands = [*node.args, *(keyword.value for keyword in node.keywords)]
            if isinstance(function, ast.Attribute):
                owner = self._value(function.value)
                if not isinstance(owner, types.ModuleType):
                    return function.attr, self._tensors([function.value, *operands])
                return getattr(owner, function.attr), self._tensors(operands)
            # A method whose object stands on another line looks like a function that does not exist.
            unknown = function.id if isinstance(function, ast.Name) else ""
            return self._value(function) or unknown, self._tensors(operands)
        if isinstance(node, ast.BinOp):
            return _OPERATORS.get(type(node.op).__name__, ""), self._tensors([node.left, node.right])
        if isinstance(node, ast.AugAssign):
            name = _OPERATORS.get(type(node.op).__name__, "")
            return name and f"{name}_", self._tensors([node.target, node.value])
        if isinstance(node, ast.Subscript):
            tensors = self._tensors([node.value, *self._stored(node)])
            return "index_put_" if tensors else "", tensors  # such as a dict
        return "", ()

    def _stored(self, node: ast.Subscript) -> list[ast.expr]:
        """What the statement of a subscript stores there."""
        code = self._frame.f_code
        whole = ast.parse("".join(linecache.getlines(code.co_filename)))
        found = (one for one in ast.walk(whole) if isinstance(one, ast.Assign) and one.lineno == self._line)
        return [one.value for one in found]

    def _tensors(self, nodes: Sequence[ast.expr]) -> tuple[TensorInfo, ...]:
        return _infos(((ast.unparse(node), self._value(node)) for node in nodes), self._modules)

    def _value(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._frame.f_locals.get(node.id, self._frame.f_globals.get(node.id))
        if isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            if isinstance(owner, nn.Module | types.ModuleType):
                return getattr(owner, node.attr, None)
            with contextlib.suppress(AttributeError):  # what an object does not have itself may be a property
                return object.__getattribute__(owner, "__dict__").get(node.attr)
        if isinstance(node, ast.Subscript):
            owner = self._value(node.value)
            if isinstance(owner, dict):
                key = self._value(node.slice)
                return dict.get(owner, key) if isinstance(key, str | int | torch.Tensor) else None
            with contextlib.suppress(ValueError, LookupError):
                return owner[_constant(node.slice)] if isinstance(owner, torch.Tensor | list | tuple) else None
        return None


def _constant(node: ast.AST) -> Any:
    """An index of numbers, slices, None and `...`. Raises for any other."""
    if isinstance(node, ast.Slice):
        return slice(*(one and ast.literal_eval(one) for one in (node.lower, node.upper, node.step)))
    if isinstance(node, ast.Tuple):
        return tuple(map(_constant, node.elts))
    return ast.literal_eval(node)
