"""What a program that raised is told: the call that raised first, its tensors, and what cures it.

NOTE [ How a cure is found ]
`trace` has the record of the call. The call is made again, on tensors of the same dtypes and shapes with made-up
values: as the program made it, it has to raise the same error, and under an override, it has to pass. Only then is the
override said to be tried. A call that cannot be made again (a backward, a library's op, a sparse or a large tensor, a
device that is not here) gets the first override that its schema and its dtypes allow, and the text says that it was not
tried.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torch_promote.observe.call import AUTOCAST_OFF, BY_SETTER, COMPILED, Call, TensorInfo
from torch_promote.observe.ops import facts_of, find_overload
from torch_promote.observe.policy_sources import STOCK
from torch_promote.policy.named_policies import stock_policy
from torch_promote.policy.op_table import DEVICE_TYPES, CastPolicy
from torch_promote.policy.overrides import selects
from torch_promote.reading.findings import promoted
from torch_promote.recording.recording import Failure
from torch_promote.reference.dtypes import LOWER_DTYPES, dtype_name
from torch_promote.regions.autocast import my_autocast
from torch_promote.regions.defaults import DEFAULT_POLICY, registered_policies
from torch_promote.regions.installation import installed
from torch_promote.report.base import module_name, short_line, some_of

OF_CHECKPOINT = "original forward and recomputation|different metadata than during|during recomputation than during"
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
    OF_CHECKPOINT: "The recomputation of a checkpoint saved other tensors than the forward.",
    r"(result type \w+|input types) can't be cast to the desired output type (Long|Int|Short|Char|Byte|Bool)": (
        "The op writes floating numbers to a tensor of integers. Make that tensor floating, or write x = x * y in "
        "place of x *= y: a dict or module that holds the old x keeps it unchanged."
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
#: Errors of kernels and checks that need a wider dtype, so that float32 comes first among the overrides.
_NEEDS_FLOAT32 = re.compile(
    r"not implemented for '(Half|BFloat16)'|Low precision dtypes|either float or double|Unsupported dtype|primitive "
    r"descriptor|other than float and double|of float, double|Half, Float or Double|half, float and double|is banned|"
    r"unsafe to autocast|support tensors of type"
)
_MAKES_COMPLEX = re.compile("complex|::stft|fft_(?!ir|hf)")
#: The backward of an autograd.Function that custom_bwd decorates.
DECORATED = "custom_bwd.<locals>."
#: The most elements of the tensors of a call that is made again.
_MOST_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Cure:
    """What cures an error."""

    text: str  # what to do, in sentences; "" if nothing is known
    overrides: Mapping[str, str]  # the override that cures it, for `my_autocast` or `--override`; empty if none does
    tried: bool = False  # whether the call was made again under the override, and passed


IN_PYTHON = "raised in Python at "
NAMES_DTYPES = re.compile(r"\btorch\.(b?float|complex|half|double)\d*")


IN_SCRIPT = " (in TorchScript"
IN_THREAD = (
    "It ran in a thread of its own: a region that another thread has opened does not act there. Open torch.autocast in "
    "that thread. "
)


def describe_raised(raised: tuple[Call, Call]) -> str:
    """Returns the call that raised, with its tensors and its place."""
    call, first = raised
    inside = f" (in it, {first.name} of {spell_tensors(first.ran_with)})" if first is not call else ""
    autocast = spell_autocast(call.autocast) or "off"
    policy = f", policy {call.policy_name} by {call.reason}" if call.policy_name else ""
    place = f"{call.phase}, module {module_name(call.module)}"
    place += f", {spell_line(call.line, call.policy_source == COMPILED)}" if call.line else ""
    return f"{call.name} of {spell_tensors(call.inputs)}{inside}: {place}, autocast {autocast}{policy}"


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


def spell_line(line: str, is_compiled: bool) -> str:
    """Returns a line without folders, or that compiled code has none."""
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
    if IN_PYTHON in failure.told:
        return _changed_dtypes(calls)
    own = [call for call in calls if call.own and call.op != "aten::detach"][::-1]  # which the checkpoint calls, too
    again = list(itertools.takewhile(lambda call: call.phase == "recompute", own))
    forward = list(itertools.takewhile(lambda call: call.phase != "optimizer", own[len(again) :]))
    for call in reversed(again) if re.search(OF_CHECKPOINT, failure.text) else ():
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


def spell_tensors(infos: Sequence[TensorInfo]) -> str:
    """Returns the names, dtypes and shapes of tensors."""
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
    if not cure.text or cure.overrides or len({one.dtype for one in floats_of(call.inputs)}) < 2:
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
    for info in floats_of(call.inputs):
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
    if call.phase == "backward" and not call.autocast and not in_function.startswith(DECORATED):
        return Cure(cure_of_a_backward(first.inputs, in_function, first.name, forward), {})
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
    by_hand, cast = _by_hand(call, AT_LINE, computed)
    if repeats and _outcome(replace(call, inputs=cast), _in_force(call)) != "":
        return Cure("No cast policy cures it." if is_about_dtypes(text) else "", {})
    if not repeats and not is_about_dtypes(text):
        return Cure("", {})
    by_hand = "" if IN_SCRIPT in text else by_hand.replace(_NOT_TRIED, _TRIED) if repeats else by_hand
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


def cure_of_a_backward(infos: Sequence[TensorInfo], function: str, name: str = "", forward: Call | None = None) -> str:
    """Returns what cures an error of a backward: of an op, of an autograd.Function, or of autograd's own."""
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


def cure_of_a_step(infos: Iterable[TensorInfo]) -> str:
    """Returns what cures an error of a step of an optimizer."""
    mixed = ", ".join(f"{one.name} {dtype_name(one.dtype)}" for one in floats_of(infos))
    return (
        f"A step of the optimizer got several dtypes ({mixed}). A parameter, its gradient and its states need one: "
        "make the optimizer after the model has its dtype, and load its state with load_state_dict, which casts."
    )


def _with_autocast_off(call: Call, text: str, computed: frozenset[str]) -> Cure:
    if not _outcome(call, {}) and not is_about_dtypes(text):
        return Cure("", {})
    compiled = call.policy_source == COMPILED
    by_hand, cast = _by_hand(call, OF_COMPILED if compiled else AT_LINE, computed)
    again = _outcome(call, {})
    if again and _alike(again, text or again):
        outcome = _outcome(replace(call, inputs=cast), {})
        by_hand = by_hand.replace(_NOT_TRIED, _TRIED) if outcome == "" else by_hand
        by_hand *= not is_about_dtypes(outcome or "")  # another error may be one of the made-up values
    by_hand *= IN_SCRIPT not in text  # whose ops have no line
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
    return Cure(f"{off}{by_hand}{in_region}{f' {UNCOMPILED}' * compiled}", {})


_NOT_TRIED, _TRIED = "(not tried)", "(tried for the call alone)"
#: Where to cast, if the program's line makes the call, calls a function of PyTorch's, or calls a graph.
AT_LINE, CALLING, OF_COMPILED = ", at that line", " that calls it", " of that function"
_IN_GRAPH = "An override acts only where the function is compiled. "
UNCOMPILED = "With TORCH_COMPILE_DISABLE=1, `torch-promote trace` names the call and its line, and tries what it can."


def _by_hand(call: Call, place: str, computed: Iterable[str] = ()) -> tuple[str, tuple[TensorInfo, ...]]:
    """Returns what to write in the code, not tried, and the tensors then; "" and the same ones if there is nothing."""
    infos = floats_of(call.inputs)
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
    hidden = "out" * (place == OF_COMPILED)  # a tensor of the graph
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


def floats_of(infos: Iterable[TensorInfo]) -> list[TensorInfo]:
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


def advice_on(call: Call, text: str, place: str = AT_LINE, in_thread: bool = False, idle: bool = False) -> str:
    """What cures the error of a call of which a traceback alone is known."""
    by_hand, dtypes = _by_hand(call, place)[0], {one.dtype for one in call.inputs if _is_float(one.dtype)}
    if (len(dtypes) < 2 and not _NEEDS_FLOAT32.search(text)) or not place:  # or does not show the other tensor
        by_hand = ""
    by_hand += " " * bool(by_hand)
    if in_thread or place == OF_COMPILED:
        return f"{IN_THREAD}{by_hand.replace('In', 'Or in', 1)}" if in_thread else f"{_IN_GRAPH}{by_hand}"
    all_known = len(call.inputs) >= len(tensor_arguments(call.name))
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
    # A cast acts everywhere; whether a region was open, a traceback does not say.
    return f"{by_hand}{'Or, where' if by_hand else 'Where'} autocast is on: {_override(key, policy, tried=False)} "


#: Texts that may be of an error of dtypes.
_ABOUT_DTYPES = re.compile(
    r"dtype|scalar type|not implemented for '|same type|types other than|Low precision|type promot|Unsupported dtype|"
    r"did not match|should be the same|must be the same|primitive descriptor|is banned|unsafe to autocast|c10::|"
    r"tensors but got|Type promoting",
    re.IGNORECASE,
)


def is_of_two_dtypes(text: str) -> bool:
    """Whether the text of an error is of two dtypes that differ, and not of one that an op lacks."""
    return is_about_dtypes(text) and not _NEEDS_FLOAT32.search(text)


def is_about_dtypes(text: str) -> bool:
    """Whether the text of an error may be of dtypes."""
    return any(one.search(text) for one in (_ABOUT_DTYPES, _NEEDS_FLOAT32, NAMES_DTYPES))


def tensor_arguments(name: str, optional: bool = True) -> list[str]:
    """Returns the names of the arguments of an overload that are tensors, also of those that may be None."""
    arguments = find_overload(name)._schema.arguments
    return [
        one.name for one in arguments if "Tensor" in str(one.type) and (optional or "Optional" not in str(one.type))
    ]
