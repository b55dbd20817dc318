"""Names of ops: the ways to write one, the overloads that each selects, and suggestions for misspelt ones.

An op may be named by a function of PyTorch: `torch.mm`, "F.cross_entropy". Most functions that C++ implements are ops
of the same name. A function in Python may call another op, one of several, or several: `_CALLED_OPS`.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import types
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._library.custom_ops import CustomOpDef
from torch.nn import functional

from torch_promote.errors import LONGEST_NAME, PolicyError
from torch_promote.policy.op_table import rows_by_name, schema_of

#: What programs call ops, and what the ops are called.
_ALIASES = {
    "attention": ("scaled_dot_product_attention", "flex_attention"),
    "conv": ("conv1d", "conv2d", "conv3d"),
    "convolution": ("conv1d", "conv2d", "conv3d"),
    "crossentropy": ("cross_entropy_loss",),
    "sdpa": ("scaled_dot_product_attention",),
}


def closest_ops(name: str, ops: Iterable[str], namespace: str = "aten") -> list[str]:
    """Returns the ops that a misspelt name is likely to mean, the likeliest first. Often there are none."""
    # A wrong suggestion is worse than none, so the limits are narrow, and narrower for ops that have no row in the
    # table. The names are without a namespace; `namespace` is "" for names that are not of ops.
    if len(name) > LONGEST_NAME:
        return []
    name = name.strip().lower()
    asked = name.replace("_", "")
    if namespace == "aten" and asked in _ALIASES:
        return list(_ALIASES[asked])
    rows = {row.op for row in rows_by_name().values()}
    found = []
    for op in set(ops):
        known = namespace != "aten" or op in rows
        if (op.startswith("_") and not name.startswith("_")) or (op.endswith("_") and not name.endswith("_")):
            continue  # few programs name private ops, or those that write in place
        letters = op.lower().replace("_", "")
        ratio = difflib.SequenceMatcher(None, asked, letters).ratio()
        is_close = (ratio >= (0.8 if known else 0.9) and letters[:1] == asked[:1]) or sorted(letters) == sorted(asked)
        is_word = known and len(name) > 2 and (op.startswith(f"{name}_") or op.endswith(f"_{name}"))
        if is_close or is_word:
            found.append((-ratio if is_close else 1.0, not known, op))
    return [op for _, _, op in sorted(found)[:3]]


#: A function or method, and the op that stands for a call of it; or the main ones of several ops, if none does;
#: or nothing, where a function is not the op of its name.
_CALLED_OPS = """
F._threshold                          threshold
F.adaptive_max_pool1d_with_indices    adaptive_max_pool1d
F.adaptive_max_pool2d_with_indices    adaptive_max_pool2d
F.adaptive_max_pool3d_with_indices    adaptive_max_pool3d
F.affine_grid                         affine_grid_generator
F.cross_entropy                       cross_entropy_loss
F.dropout1d                           feature_dropout
F.dropout2d                           feature_dropout
F.dropout3d                           feature_dropout
F.fold                                col2im
F.fractional_max_pool2d_with_indices  fractional_max_pool2d
F.fractional_max_pool3d_with_indices  fractional_max_pool3d
F.grid_sample                         grid_sampler
F.interpolate                         upsample_nearest2d upsample_bilinear2d upsample_bicubic2d adaptive_avg_pool2d
F.max_unpool1d                        max_unpool2d
F.multi_head_attention_forward        linear scaled_dot_product_attention bmm softmax
F.nll_loss                            nll_loss_nd
F.normalize                           linalg_vector_norm clamp_min div
F.unfold                              im2col
F.upsample_bilinear                   upsample_bilinear2d
F.upsample_nearest                    upsample_nearest1d upsample_nearest2d upsample_nearest3d
torch.lu                              _lu_with_info
torch.norm                            linalg_vector_norm linalg_matrix_norm
Tensor.index
Tensor.lu                             _lu_with_info
Tensor.norm                           linalg_vector_norm linalg_matrix_norm
Tensor.resize
Tensor.resize_as
"""


_CALLS = {function: ops for function, *ops in (line.split() for line in _CALLED_OPS.strip().splitlines())}

#: How people write the places in which PyTorch has functions and methods.
_ROOTS: dict[str, object] = {"torch": torch, "F": functional, "nn": nn, "Tensor": torch.Tensor}

#: How ops are named: the end of errors.
HOW_TO_NAME = (
    "Ops are named as in torch.ops or in Python: 'softmax', 'aten::softmax.int', 'mylib::op', 'F.softmax', torch.mm."
)

#: The types of functions and methods that C++ implements.
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
#: Their places in torch._C, besides those of torch and Tensor.
_NAMES_OF_PLACES = ("_nn", "_linalg", "_special", "_fft", "_sparse", "_nested")
#: Where these are. The functions of torch.linalg, torch.special and torch.fft have their place in the name of the op.
_PLACES: dict[str, Any] = {
    "torch": torch._C._VariableFunctions,
    "Tensor": torch.Tensor,
    **{f"torch._C.{name}": getattr(torch._C, name, None) for name in _NAMES_OF_PLACES},
}

#: The modules that define functions in Python, and where people find these functions.
_MODULES = {
    "torch.functional": "torch",
    "torch.nn.functional": "F",
    "torch._tensor": "Tensor",
    "torch.nn.attention.flex_attention": "torch.nn.attention.flex_attention",
    "torch.ops.higher_order": "torch.ops.higher_order",
}


def op_of_function(function: object, shown: str = "") -> str:
    """Returns the op that a function or method of PyTorch calls; errors show it as the user wrote it."""
    if isinstance(function, nn.Module) or _is_module(function):
        raise _module_error(function)
    path = _path_of(function)
    if path is None:
        got = repr(shown or function)
        raise PolicyError(
            f"expected the name of an op, an op object or a function of PyTorch, got {got}. {HOW_TO_NAME}"
        )
    calls = _CALLS.get(path, [path.rpartition(".")[2]])
    if len(calls) > 1:
        raise PolicyError(
            f"{shown or path} is not an op. It calls several, or one of several, such as {', '.join(calls)}. Name the "
            f"ops that you mean."
        )
    if not calls or not _is_op(calls[0]):
        raise PolicyError(
            f"{shown or path} is not an op, and this package does not know which ops it calls. Name those "
            f"ops; torch_promote.trace shows them. {HOW_TO_NAME}"
        )
    return f"aten::{calls[0]}"


def calls_of_function(name: str) -> str | None:
    """Returns a sentence about a function or module of PyTorch that has the name of no op; None: there is none."""
    for root in ("F", "torch", "nn"):
        found = getattr(_ROOTS[root], name, None)
        try:
            if isinstance(found, types.FunctionType | type) and (_path_of(found) in _CALLS or _is_module(found)):
                op = op_of_function(found).removeprefix("aten::")
                return f"{root}.{name} calls the op {op!r}. Use that name."
        except PolicyError as error:
            return f"{error}"
    return None


def _is_op(name: str) -> bool:
    """Whether PyTorch's dispatcher has an op. TorchScript has others, such as aten::tensor."""
    op = getattr(torch.ops.aten, name, None)
    overloads = op.overloads() if isinstance(op, torch._ops.OpOverloadPacket) else []
    names = (f"aten::{name}" + ("" if one == "default" else f".{one}") for one in overloads)
    return any(map(torch._C._dispatch_has_kernel, names))


def _is_module(found: object) -> TypeGuard[type[nn.Module]]:
    return isinstance(found, type) and issubclass(found, nn.Module)


def _path_of(function: object) -> str | None:
    """Where people find a function of PyTorch, such as "torch.mm"; None: it is not one."""
    name = getattr(function, "__name__", "")
    if isinstance(function, _BUILTIN):
        places = (where for where, place in _PLACES.items() if getattr(place, name, None) == function)
        where = next(places, None)
    else:
        is_python = isinstance(function, types.FunctionType | torch._ops.HigherOrderOperator)
        where = _MODULES.get(function.__module__) if is_python else None
    return where and f"{where}.{name}"


def is_python_name(name: str) -> bool:
    """Whether a name starts as those of PyTorch's functions and modules do."""
    return name.partition(".")[0] in _ROOTS and "." in name


def op_of_python_name(name: str) -> str | None:
    """Returns the op that a name in Python stands for. One of torch.ops is only rewritten."""
    if name.startswith("torch.ops.") and not name.startswith("torch.ops.higher_order."):
        return name.removeprefix("torch.ops.").replace(".", "::", 1)
    root, *parts = name.split(".")
    found: Any = _ROOTS[root]
    for part in parts:
        found = getattr(found, part, None)
    return op_of_function(found, name) if callable(found) else None


def _module_error(module: nn.Module | type[nn.Module]) -> PolicyError:
    """Returns the error for a module in the place of an op, with the line that gives the module a policy."""
    kind = module if isinstance(module, type) else type(module)
    spelled = f"nn.{kind.__name__}" if getattr(nn, kind.__name__, None) is kind else kind.__name__
    return PolicyError(
        f"{spelled} is a module, and overrides are for ops. For the modules of a model, write: "
        f'torch_promote.set_module_policy(model, {{{spelled}: "fp32"}}).'
    )


def find_overloads(key: object) -> tuple[str, ...]:
    """Returns the full names of the overloads that a name, an op object or a pattern selects, in `in_order`."""
    # "softmax", `torch.ops.aten.softmax`: all of the op; "mm.default": one; `torch.mm`, "F.softmax": all of the only op
    # that the function calls; "linalg_*": a shell pattern of the op, the overload or the full name.
    asked = spell_key(key)
    if len(asked) > LONGEST_NAME:
        raise PolicyError(f"no op is called {asked!r}. {HOW_TO_NAME}")
    name = asked if "::" in asked else f"aten::{asked}"
    found = _find(name)
    if not found:
        raise PolicyError(_unknown(asked, name))
    return in_order(found)


def _find(name: str) -> list[str]:
    """Returns the overloads that a name or pattern selects. It includes a namespace."""
    if is_pattern(name):
        means = re.compile(fnmatch.translate(name)).match
        every = torch._C._dispatch_get_all_op_names()
        return _defined(other for other in every if means(other.partition(".")[0]) or means(exact_key(other)))
    if "." in name:
        full = name.removesuffix(".default")
        return [full] if _exists(full) else []
    try:
        # Listing all ops takes milliseconds. TorchScript lists those of a name, and has ops that are its own.
        schemas = torch._C._jit_get_schemas_for_operator(name)
    except (RuntimeError, TypeError):  # the text cannot be the name of an op
        return []
    overloads = (schema.name + (f".{schema.overload_name}" if schema.overload_name else "") for schema in schemas)
    return [overload for overload in overloads if _exists(overload)]


def _defined(names: Iterable[str]) -> list[str]:
    """Those that are ops. The dispatcher also lists names that only have a kernel, of an op that is gone."""
    return [name for name in names if schema_of(name) is not None]


def _exists(full_name: str) -> bool:
    """Whether an overload is registered with the dispatcher."""
    try:
        return torch._C._dispatch_has_kernel(full_name)  # true for every op that is defined
    except (RuntimeError, UnicodeError):  # the text cannot be the name of an op
        return False


def _unknown(asked: str, name: str) -> str:
    """Returns the error text for a name or pattern that selects nothing."""
    every = _defined(torch._C._dispatch_get_all_op_names())
    namespace, _, rest = name.partition("::")
    known = {exact_key(other) for other in every if other.startswith(f"{namespace}::")}
    if is_pattern(name):
        what = f"the pattern {asked!r} matches no op."
        if is_python_name(asked):
            return f"{what} A pattern has to match names of ops: write {asked.rpartition('.')[2]!r}."
    elif "::" not in asked and _find(spelled := asked.replace(".", "::", 1)):
        return f"no op is called {asked!r}. Write {spelled!r}."
    elif "::" not in asked and _find(f"aten::{asked.replace('.', '_')}"):  # linalg.norm
        return f"no op is called {asked!r}. Write {asked.replace('.', '_')!r}."
    elif not known:
        namespaces = dict.fromkeys(other.partition("::")[0] for other in every)
        first = f"no op is registered in namespace {namespace!r}. Import the library that defines {asked!r} first."
        return f"{first}{_closest(namespace, namespaces, '')}"
    elif siblings := sorted(other for other in known if other.partition(".")[0] == name.partition(".")[0]):
        return f"{name.partition('.')[0]} has no overload {rest.partition('.')[2]!r}. Legal: {', '.join(siblings)}."
    elif exact_key(name) in {exact_key(row) for row in rows_by_name()}:
        return f"{name} has a row in the op table, but torch {torch.__version__} has no such op."
    elif "::" not in asked and (called := calls_of_function(asked)):
        return f"no op is called {asked!r}. {called}"
    else:
        what = f"no op is called {asked!r}."
    ops = sorted({other.partition(".")[0].removeprefix(f"{namespace}::") for other in known})
    meant = asked.rpartition(".")[2] if is_python_name(asked) else rest.partition(".")[0].strip("*?")
    return f"{what}{_closest(meant, ops, namespace)} {HOW_TO_NAME}"


def _closest(name: str, known: Iterable[str], namespace: str) -> str:
    close = ", ".join(closest_ops(name, known, namespace))
    return f" Closest: {close}." if close else ""


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sorts overloads: the rows of the op table in its order, then the others by name."""
    rows = rows_by_name()
    return tuple(sorted(names, key=lambda name: (rows[name].index if name in rows else len(rows), name)))


def exact_key(name: str) -> str:
    """Returns the key that selects one overload: its full name, with `default` for the overload without a name."""
    return name if "." in name else f"{name}.default"


def spell_key(key: object) -> str:
    """Returns the name that selects the same overloads as a key."""
    if isinstance(key, str):
        is_written_in_python = is_python_name(key) and (not is_pattern(key) or key.startswith("torch.ops."))
        return (op_of_python_name(key) if is_written_in_python else None) or key
    if isinstance(key, torch._ops.OpOverload):
        return f"{key._schema.name}.{key._overloadname}"
    if isinstance(key, torch._ops.OpOverloadPacket):
        return key._qualified_op_name
    return key._qualname if isinstance(key, CustomOpDef) else op_of_function(key)


def is_pattern(name: str) -> bool:
    """Whether a name contains a wildcard. Names of ops never do."""
    return any(wildcard in name for wildcard in "*?[")


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern, or a name as in `find_overloads`, matches an op by its name, overload or full name."""
    if is_python_name(pattern):
        pattern = spell_key(pattern)
    overload = name.partition("::")[2]
    known = (overload.partition(".")[0], overload, name.partition(".")[0], name, exact_key(name))
    return any(fnmatch.fnmatchcase(one, pattern) for one in known)
