"""What results depend on beside the calls: the states of optimizers and generators, versions, devices and settings.

Whatever is asked here may raise in some program, whose other part goes on: it is then unknown.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import platform
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from torch_promote import _C
from torch_promote.observe.call import Argument, TensorInfo
from torch_promote.observe.ops import argument_of, unnoticed
from torch_promote.observe.places import frames
from torch_promote.recording.recording import OptimizerState
from torch_promote.recording.values import Values

UNKNOWN = "unknown"
#: How the names of a group's parameters are recorded: "parameters of group 0".
PARAMETERS = "parameters of "
_T = TypeVar("_T")


def _ask(question: Callable[[], _T], otherwise: _T) -> _T:
    """The answer of PyTorch; `otherwise` if it raises."""
    try:
        return question()
    except Exception:
        return otherwise


# --- generators


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def generator_states() -> dict[str, str]:
    """Returns digests of the states of the global random number generators, by device, "python" and "numpy"."""
    found = {"cpu": _of_generator(torch.default_generator)}
    if torch.cuda.is_initialized() and not _is_capturing():
        found |= {f"cuda:{i}": _of_generator(one) for i, one in enumerate(torch.cuda.default_generators)}
    version, numbers, gauss = random.getstate()
    # The hash of numbers is the same in each process; that of None is its address before Python 3.12.
    found["python"] = f"{hash((version, numbers, () if gauss is None else gauss)) & (1 << 64) - 1:016x}"
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        parts: dict[str, Any] = _ask(lambda: numpy.get_state(legacy=False)["state"], {})
        state = b"".join(one.tobytes() if hasattr(one, "tobytes") else b"%d" % one for one in parts.values())
        found["numpy"] = hashlib.blake2b(state, digest_size=8).hexdigest()
    return found


def _of_generator(generator: torch.Generator) -> str:
    with unnoticed():
        return _ask(lambda: _C.digest(generator.get_state()), UNKNOWN)


def state_drawn_from(args: Iterable[Any], inputs: Sequence[TensorInfo]) -> str:
    """Returns the generator from which a call is about to draw, with a digest of its state: "cpu 0123456789abcdef"."""
    given = next((one for one in args if isinstance(one, torch.Generator)), None)
    device = next((one for one in args if isinstance(one, torch.device)), None)
    name = str(device) if device is not None else inputs[0].device if inputs else "cpu"
    if given is not None:
        return f"its own {_of_generator(given)}"
    if name == "cpu":
        return f"cpu {_of_generator(torch.default_generator)}"
    if not name.startswith("cuda") or not torch.cuda.is_initialized() or _is_capturing():
        return ""
    index = int(name.partition(":")[2] or torch.cuda.current_device())
    return f"cuda:{index} {_of_generator(torch.cuda.default_generators[index])}"


# --- optimizers


_OF_OPTIMIZER = " of optimizer "
Searched: TypeAlias = weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[Any]]]
"""The schedulers and GradScalers of optimizers, as they were found at the first step of each in one of several blocks.
"""


class OptimizerStates:
    """Reads the states of optimizers, and of the schedulers and GradScalers that exist when one steps first."""

    def __init__(
        self,
        name_of: Callable[[torch.Tensor], str],
        values_of: Callable[[torch.Tensor], Values],
        searched: Searched | None = None,
    ) -> None:
        self._searched: Searched = weakref.WeakKeyDictionary() if searched is None else searched
        self._name_of = name_of
        self._values_of = values_of
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # numbers
        self._count = 0  # of those that there have been
        self._others: list[weakref.ref[Any]] = []  # schedulers and scalers
        self._numbers: dict[str, Argument] = {}

    def at_step(self, optimizer: torch.optim.Optimizer, step: int) -> OptimizerState | None:
        """The state at the start of a step: all of an optimizer's at its first, then numbers that have changed."""
        first = optimizer not in self._known
        if first:
            self._known[optimizer] = self._count
            self._count += 1
            self._forget_dead()
            known = {id(one()) for one in self._others}
            found = self._searched.get(optimizer)
            if found is None:  # a search of all objects in the process
                found = self._searched[optimizer] = list(map(weakref.ref, _schedulers_and_scalers(optimizer)))
            self._others += [one for one in found if id(one()) not in known]
        numbers = self._all_numbers(optimizer)
        if first:
            numbers |= self._unknown(optimizer) | self._members(optimizer)
        changed = {name: value for name, value in numbers.items() if self._numbers.get(name, self) != value}
        self._numbers |= changed
        tensors = self._values([optimizer]) if first else {}
        return OptimizerState(step, tensors, changed) if tensors or changed else None

    def _forget_dead(self) -> None:
        """A program may make ever new optimizers."""
        self._others = [one for one in self._others if one() is not None]
        alive = {"", *map(self._suffix, self._known)}
        of_each = ((name, name.partition(_OF_OPTIMIZER)) for name in self._numbers)
        self._numbers = {name: self._numbers[name] for name, (_, of, number) in of_each if of + number in alive}

    def at_end(self, step: int) -> OptimizerState | None:
        """The states of all optimizers that have made a step; None if there are none."""
        found = self._values(self._known)
        unknown = {name: value for optimizer in self._known for name, value in self._unknown(optimizer).items()}
        return OptimizerState(step, found, unknown) if found or unknown else None

    def _values(self, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Values]:
        return {name: self._values_of(tensor) for name, tensor in self.tensors(optimizers)}

    def tensors(self, optimizers: Iterable[torch.optim.Optimizer] | None = None) -> list[tuple[str, torch.Tensor]]:
        """The tensors of the states that can be read, of all known optimizers or of some, and those of GradScalers."""
        found: list[tuple[str, torch.Tensor]] = []
        for optimizer in self._known if optimizers is None else optimizers:
            found += _ask(functools.partial(self._tensors_of, optimizer), [])
        return found + self._scales()

    def _tensors_of(self, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = []
        number = 0
        for place, group in enumerate(optimizer.param_groups):
            found += [
                (f"{key} of group {place}{self._suffix(optimizer)}", value)
                for key, value in group.items()
                if isinstance(value, torch.Tensor)
            ]
            for parameter in group["params"]:
                name = self._name_of(parameter) or f"parameter {number}{self._suffix(optimizer)}"
                number += 1
                state = optimizer.state.get(parameter)
                for key, value in state.items() if isinstance(state, Mapping) else ():
                    if isinstance(value, torch.Tensor):
                        found.append((f"{key} of {name}", value))
        return found

    def _unknown(self, optimizer: torch.optim.Optimizer) -> dict[str, Argument]:
        """Says of an optimizer whose state raises that it is unknown."""
        if _ask(lambda: self._tensors_of(optimizer), None) is not None:
            return {}
        return {f"state of {type(optimizer).__name__}{self._suffix(optimizer)}": UNKNOWN}

    def _members(self, optimizer: torch.optim.Optimizer) -> dict[str, Argument]:
        """The names of the parameters of each group, if all have one."""
        groups = enumerate(optimizer.param_groups)
        found = {
            f"{PARAMETERS}group {i}{self._suffix(optimizer)}": (*map(self._name_of, one["params"]),)
            for i, one in groups
        }
        return found if all(map(all, found.values())) else {}

    def _suffix(self, optimizer: torch.optim.Optimizer) -> str:
        """Tells the second and later optimizers from the first."""
        number = self._known[optimizer]
        return f"{_OF_OPTIMIZER}{number}" if number else ""

    def _scales(self) -> list[tuple[str, torch.Tensor]]:
        scalers = [one for reference in self._others if isinstance(one := reference(), GradScaler)]
        return [
            (f"{name.removeprefix('_')} of GradScaler", tensor)
            for one in scalers
            for name in ("_scale", "_growth_tracker")
            if isinstance(tensor := getattr(one, name, None), torch.Tensor)
        ]

    def _all_numbers(self, optimizer: torch.optim.Optimizer) -> dict[str, Argument]:
        suffix = self._suffix(optimizer)
        found = {
            f"{key} of group {place}{suffix}": value
            for place, group in enumerate(optimizer.param_groups)
            for key, value in _numbers_in({key: value for key, value in group.items() if key != "params"}).items()
        }
        for reference in self._others:
            one = reference()
            if one is None or (isinstance(one, LRScheduler) and getattr(one, "optimizer", None) is not optimizer):
                continue
            values = dict(vars(one))
            if isinstance(one, LRScheduler):
                values = {key: value for key, value in values.items() if key != "_step_count"}  # an extra step at start
            elif values.get("_scale") is not None:  # of which nothing is left of the initial ones
                values = {key: value for key, value in values.items() if not key.startswith("_init")}
            of = f"{type(one).__name__}{suffix if isinstance(one, LRScheduler) else ''}"
            found |= {f"{key} of {of}": value for key, value in _numbers_in(values).items()}
        return found


def _numbers_in(values: Mapping[str, Any]) -> dict[str, Argument]:
    """The numbers, bools, texts and lists of numbers among values."""
    found = {}
    for key, value in values.items():
        numbers = value if isinstance(value, list | tuple) else ()
        is_plain = value is None or isinstance(value, bool | int | float | str)
        if is_plain or (numbers and all(isinstance(one, int | float) for one in numbers)):
            found[key] = argument_of(value)
    return found


_OF_SCALER = GradScaler.step.__code__, GradScaler.update.__code__


def _schedulers_and_scalers(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The schedulers of an optimizer, of which PyTorch has no list, and the GradScaler that calls its step."""
    found = gc.get_referrers(optimizer)
    attributes = [one for one in found if type(one) is dict and one.get("optimizer") is optimizer]
    found += gc.get_referrers(*attributes) if attributes else []
    schedulers = [one for one in found if issubclass(type(one), LRScheduler)]
    frame = next((one for one in frames() if one.f_code in _OF_SCALER), None)
    return schedulers if frame is None else [*schedulers, frame.f_locals["self"]]


# --- versions, devices and settings

#: Those of scaled_dot_product_attention, which their flags name.
_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
#: Environment variables that select kernels.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
#: Settings of compilers, which exist if a program has loaded them.
_OF_COMPILERS = {
    "torch._inductor.config": ("emulate_precision_casts", "fallback_random", "max_autotune", "deterministic"),
    "torch._functorch.config": ("backward_pass_autocast", "activation_memory_budget"),
}
#: The backends and kinds of ops that have an attribute `fp32_precision`.
_PRECISIONS = (
    *("", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn"),
    *("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
)


@functools.cache
def _cpu() -> str:
    """The model of the CPU, by which libraries select kernels; "" if it is unknown."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def environment() -> dict[str, str]:
    """Returns what the bits of results may depend on, besides the program; "unknown" if PyTorch does not tell."""
    # If a program sets `torch.backends.cuda.matmul.fp32_precision`, the functions for the older settings raise.
    backends: Any = torch.backends
    asked: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.__version__,
        "python": platform.python_version,
        "machine": platform.machine,
        "cpu": _cpu,
        "cpu capability": backends.cpu.get_cpu_capability,
        "threads": torch.get_num_threads,
        "float32 matmul precision": torch.get_float32_matmul_precision,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "mkldnn": lambda: backends.mkldnn.is_available() and backends.mkldnn.enabled,
        "sdpa": lambda: ", ".join(name for name in _KERNELS if getattr(backends.cuda, f"{name}_sdp_enabled")()),
        "mha fastpath": backends.mha.get_fastpath_enabled,
        "cuda": lambda: torch.version.cuda or "none",
    }
    for name in _PRECISIONS:
        path = f"{name}.fp32_precision".removeprefix(".")
        asked[f"backends.{path}"] = functools.partial(functools.reduce, getattr, path.split("."), backends)
    if torch.cuda.is_initialized():
        matmul = backends.cuda.matmul
        asked |= {
            "gpus": lambda: ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
            "cudnn": backends.cudnn.version,
            "cudnn.deterministic": lambda: backends.cudnn.deterministic,
            "cudnn.benchmark": lambda: backends.cudnn.benchmark,
            "cudnn.allow_tf32": lambda: backends.cudnn.allow_tf32,
            "cuda.matmul.allow_tf32": lambda: matmul.allow_tf32,
            "float16 reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
            "bfloat16 reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
        }
    for module, names in _OF_COMPILERS.items():
        config = sys.modules.get(module)
        for name in names if config is not None else ():
            asked[f"{module.removeprefix('torch._').removesuffix('.config')}.{name}"] = functools.partial(
                getattr, config, name
            )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        asked["rank"] = lambda: os.environ["RANK"]
    found = {name: str(_ask(question, UNKNOWN)) for name, question in asked.items()}
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}
