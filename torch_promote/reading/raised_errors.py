"""The errors that end a program or a traced block, as their tracebacks show them.

`trace` has the record of the call. `run` observes no calls: when an error has ended the program, the expression that
raised, and the tensors in it, are read from the traceback. What cures them is in `dtype_errors`.
"""

from __future__ import annotations

import ast
import concurrent.futures.thread
import contextlib
import dis
import gc
import itertools
import linecache
import os
import re
import sys
import threading
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._library.autograd import make_autograd_impl
from torch.amp import GradScaler
from torch.optim import Optimizer

from torch_promote.errors import PolicyError, say
from torch_promote.observe.call import Call, TensorInfo
from torch_promote.observe.places import RunningModules, is_of_program, line_in_graph, role, shown_line
from torch_promote.policy.op_names import find_overloads
from torch_promote.reading.dtype_errors import (
    AT_LINE,
    CALLING,
    DECORATED,
    IN_PYTHON,
    IN_SCRIPT,
    IN_THREAD,
    NAMES_DTYPES,
    OF_CHECKPOINT,
    OF_COMPILED,
    UNCOMPILED,
    advice_on,
    cure_by_text,
    cure_of_a_backward,
    cure_of_a_step,
    floats_of,
    is_about_dtypes,
    is_of_two_dtypes,
    spell_line,
    spell_tensors,
    tensor_arguments,
)
from torch_promote.recording.program_state import TensorUses
from torch_promote.recording.recording import Failure
from torch_promote.reference.dtypes import dtype_name
from torch_promote.report.base import module_name, short_line, some_of

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
#: The file with the autograd.Function of ops that have torch.library.register_autograd, and functions of PyTorch's.
_OF_LIBRARY = make_autograd_impl.__code__.co_filename
_BETWEEN_FUNCTIONS = "CheckpointFunction.", "make_autograd_impl.", "supports_tensorlist."
_CALLS_OF_OPS = torch._ops.OpOverload.__call__.__code__, torch._ops.OpOverloadPacket.__call__.__code__
#: The ops of operators, by the class of the syntax tree.
_OPERATORS = {"Add": "add", "Sub": "sub", "Mult": "mul", "Div": "div", "MatMult": "matmul", "Pow": "pow"}


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
            told = cure_of_a_step(last.inputs)
        if found or told:
            return Failure(text[:2000], _custom_function(frames), found, told, _called_at(steps))
        error = error.__cause__ or error.__context__
    told = _of_python(ended)
    return Failure(f"{type(ended).__name__}: {ended}"[:2000], "", False, told) if told else None


def _of_python(error: BaseException | None) -> str:
    """Says where Python code raised an error whose text names floating dtypes; "" for any other."""
    if error is None or not NAMES_DTYPES.search(str(error)) or not (trace := _trace_of(error)):
        return ""
    steps = list(traceback.walk_tb(trace[0]))
    frames = [frame for frame, _ in steps]
    by_op = any(one.f_code in _CALLS_OF_OPS or one.f_code.co_name == "__torch_dispatch__" for one in frames)
    if by_op or _is_in_thread(frames) or not _is_raise(trace[-1]):
        return ""
    line = _line(steps[-1])
    return f"The {type(error).__name__} was {IN_PYTHON}{short_line(line)}{_called_at(steps, line)}; no op raised it."


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
    return f"{text.rstrip().splitlines()[-1]}{IN_SCRIPT}{own[0] if own else ''})"


#: What runs the function of a thread.
_THREADS = threading.Thread.run.__code__, concurrent.futures.thread._WorkItem.run.__code__
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
    told += " Leave these in float32 there, and let autocast cast." * any(since) + _KEEP_FLOAT32 * ("" in since)
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


_MODULE_CALLS = nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__


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
    where = f"{spell_line(line, compiled)}{_called_at(steps)}, module {module_name(path)}"
    in_thread, handed_on = _is_in_thread(frames), _HANDED_ON.search(text)
    known = _cure_in(frames, text)
    if re.search(OF_CHECKPOINT, text) and not in_thread:
        known += " `torch-promote trace` names the first call that differs."
    if known or not is_about_dtypes(text.rstrip().rpartition("\n")[2] if handed_on else text):
        return known and f"{where}: {known}"
    if handed_on:
        return f"{where}: It ran {handed_on[1]}. A region acts in the thread that opens it: open torch.autocast there."
    ask = UNCOMPILED if compiled else "`torch-promote trace` names the call, with its dtypes, and tries what it can."
    ask = "" if in_thread else ask
    function = _custom_function(frames)
    if in_backward and not compiled and not function.startswith(DECORATED):
        return f"{where}, backward: {cure_of_a_backward((), function) or ask or IN_THREAD}"
    step = trace[-1 if at is None else at]
    call = None if _is_raise(step) else _written_call(step, modules, path, short_line(line))
    if call is None:  # such as an error that a program raises itself
        return ""
    shown_dtypes = {one.dtype for one in floats_of(call.inputs)}
    code = OF_COMPILED if compiled else CALLING if below and not line_in_graph(*steps[-1]) else AT_LINE
    if is_of_two_dtypes(text) and len(call.inputs) > 1 and len(shown_dtypes) < 2:
        # Such as weights that functional_call has put back, or the tangents of a forward-mode derivative.
        if len(call.inputs) >= len(tensor_arguments(call.name, optional=False)):
            return f"{call.op}, at {where}. The tensors that the traceback shows have one dtype. {ask}".rstrip()
        advice = f"The traceback does not show all of its tensors. {advice_on(call, text, code, in_thread, idle)}"
        return f"{call.op}, at {where}. {advice}{ask}".rstrip()
    shown = f"{call.op} of {spell_tensors(call.inputs)}" if call.inputs else call.op
    if code is CALLING:  # whose names these are
        # If code of PyTorch's calls that, no tensor of the program stands there.
        code *= all(is_of_program(one) or one.f_code in _MODULE_CALLS for one in below[:-1])
        where = f"{short_line(f'{frames[-1].f_code.co_filename}:{steps[-1][1]}')}, called at {where}"
    advice = (
        cure_of_a_step(call.inputs) if _is_in_step(below) else f"{advice_on(call, text, code, in_thread, idle)}{ask}"
    )
    return f"{shown}, at {where}. {advice}".rstrip()


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
        overloads = [(name, tensor_arguments(name)) for name in find_overloads(op) if not name.endswith("out")]
        name, names = next((one for one in overloads if len(one[1]) >= len(tensors)), overloads[0])
        infos = tuple(
            TensorInfo(*pair) for pair in ((one, *tensor) for one, tensor in zip(names, tensors, strict=False))
        )
        line = short_line(f"{found[4]}:{found[5]}") if found[4] else "line unknown"
        call = _call(name, infos, "", line)
        return (
            f"{call.op} of {spell_tensors(infos)}, at {line}, compiled: {found[3]}. "
            f"{advice_on(call, found[3], idle=idle)}{UNCOMPILED}"
        )
    return ""


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
