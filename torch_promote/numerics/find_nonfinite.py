"""`find_nonfinite`: finds the call that made the first inf or NaN, and the overrides to try."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn

from torch_promote.errors import NonfiniteError, OptionError, check_flag, shown
from torch_promote.numerics.nonfinite import NonfiniteOrigin, ScalerSteps, Vanished, tell_line, tell_where
from torch_promote.numerics.nonfinite_finder import FinderState, NonfiniteFinder
from torch_promote.numerics.recent_calls import may_have_override
from torch_promote.observe.call import Call, Unseen
from torch_promote.observe.observer import observe
from torch_promote.observe.places import RunningModules, check_model, shorten
from torch_promote.observe.surroundings import watch_steps
from torch_promote.policy.op_names import exact_key, find_overloads
from torch_promote.recording.program_state import ScaledStep
from torch_promote.recording.values import TensorRange
from torch_promote.reference.dtypes import LOWER_DTYPES, dtype_name
from torch_promote.report.base import (
    Code,
    Column,
    Content,
    Fact,
    Listing,
    Part,
    Report,
    Table,
    module_name,
    some_of,
    to_json,
)
from torch_promote.report.block import block
from torch_promote.report.codec import decode_record, encode


@dataclass(frozen=True, slots=True)
class Attempt:
    """Ops to run in float32, in one module or everywhere. Whether that makes the program finite is not known.

    Attributes:
        code: The line to write in the program.
        option: The option of the commands that does the same, such as "--override linear=fp32"; "" if there is none.
        ops: The ops, such as "aten::linear.default".
    """

    code: str
    option: str
    ops: tuple[str, ...]


#: What a finder has seen beside the origin and the benign values, by its name in JSON.
_SEEN = (
    "scaler",
    "scaled",
    "clipped",
    "undivided",
    "uncleared",
    "stepped_scaled",
    "rescaled",
    "unmultiplied",
    "zero_gradients",
    "last_gradients",
    "nan_buffers",
)


class NonfiniteReport(Report):
    """The report of `find_nonfinite`. It fills while the block runs.

    `print(report)` shows the origin, a notebook a page; `save` writes text (.txt), a page (.html) or JSON.

    Attributes:
        origin: The first call with finite inputs and a non-finite output, or None.
        not_seen: Computations of the block that were not checked, one sentence each.
        torch_version: PyTorch's version.
    """

    NOUN: ClassVar[str] = "report"
    FORMAT: ClassVar[str] = "torch_promote find_nonfinite"
    NOT_LOADED: ClassVar[str] = "a report of find_nonfinite is not read again. json.load reads {path}."

    def __init__(self) -> None:
        self.origin: NonfiniteOrigin | None = None
        self.not_seen: list[Unseen] = []
        self.torch_version: str = str(torch.__version__)
        self._seen = FinderState()
        self._attempts: list[Attempt] | None = None  # those of another process
        self._when_final: Callable[[], None] | None = None

    def begin_at(self, step: int, when_final: Callable[[], None]) -> None:
        """The block begins after so many steps of the program. `when_final` is called when the checks end."""
        self._seen.steps = step
        self._when_final = when_final

    @property
    def found(self) -> bool:
        """Whether a call made a non-finite value that is not benign."""
        return self.origin is not None

    @property
    def benign(self) -> list[NonfiniteOrigin]:
        """The benign non-finite values by place: masks, steps that GradScaler skips, and those that `allow` names.

        What a call of the origin's place has made is not among them.
        """
        place = self.origin and (self.origin.call.name, self.origin.module, self.origin.line)
        return [one for one in self._seen.benign.values() if (one.op, one.module, one.line) != place]

    @property
    def scaler(self) -> ScalerSteps:
        """The steps of GradScaler before the origin, and how many of them it skipped."""
        return self._seen.scaler

    @property
    def checked(self) -> int:
        """The number of checked calls. Calls after the origin are not checked."""
        return self._seen.checked

    def zero_gradients(self, step: int) -> tuple[int, int]:
        """Returns the number of parameters whose gradients are all 0 from a step on, and of those that have some."""
        known = [(moved < step, count) for moved, last, count in self._seen.last_gradients if last >= step]
        return sum(count for is_zero, count in known if is_zero), sum(count for _, count in known)

    @property
    def attempts(self) -> list[Attempt]:
        """What to try, the narrowest first: the op in float32 in its module, and everywhere; last, `origin.other`.

        Empty if no override can change the result: the kind of the origin is "mathematics", "data", "scaled gradient"
        or "optimizer step", the op has no policy, or no region was open. An override in force is not among them. Empty,
        too, if the program computes with gradients that are scaled, or does not clear those of a skipped step, or has
        GradScaler step with scaled ones: an override would hide that.
        """
        if self._attempts is not None:
            return self._attempts
        fault = self.origin or (self._seen.scaled if self.scaler.skipped else None)
        if (
            fault is None
            or self._seen.undivided
            or self._seen.uncleared
            or self._seen.rescaled
            or fault.kind in ("mathematics", "data", "scaled gradient", "optimizer step")
        ):
            return []
        found: dict[str, Call] = {}
        for suspects in _suspects(fault, self._seen.forward_ops):
            found = found or {exact_key(name): one for name, one in suspects if may_have_override(name, one)}
        if not found or (fault.nonfinite is not None and len(found) < len(fault.cures)):
            return []
        # A module's policy ends with its forward.
        names, modules = list(found), {one.module * (one.phase != "backward") for one in found.values()}
        module = modules.pop() if len(modules) == 1 else ""
        module = "" if module[:1].isupper() else module  # the class of a module that is not in the model
        overrides = {_short(name): "fp32" for name in names}
        options = " ".join(f"--override {name}=fp32" for name in overrides)
        everywhere = Attempt(f"tp.my_autocast(..., overrides={json.dumps(overrides)})", options, tuple(names))
        found_all = [everywhere]
        if module:
            code = f"tp.set_module_policy(model, {json.dumps({module: overrides})})"
            found_all.insert(0, Attempt(code, "", tuple(names)))
        if fault.other is not None and may_have_override(fault.other.name, fault.other):
            key = exact_key(fault.other.name)
            code = f"tp.my_autocast(..., overrides={json.dumps({_short(key): 'fp32'})})"
            found_all.append(Attempt(code, f"--override {_short(key)}=fp32", (key,)))
        return found_all

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON-compatible values, as `save("NAME.json")` writes them."""
        return {
            "format": self.FORMAT,
            "version": self.VERSION,
            "found": self.found,
            "origin": encode(self.origin),
            "benign": encode(self.benign),
            **{name: encode(getattr(self._seen, name)) for name in _SEEN},
            "vanished": encode(list(self._seen.vanished.values())),
            "attempts": encode(self.attempts),
            "not_seen": encode(self.not_seen),
            "checked": self.checked,
            "torch": self.torch_version,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the report of another process from the data of its `to_dict`."""
        report = cls()
        names = {"origin": NonfiniteOrigin | None, "not_seen": list[Unseen], "torch": str, "attempts": list[Attempt]}
        read = decode_record(names, data)
        report.origin, report.not_seen = read["origin"], read["not_seen"]
        report.torch_version, report._attempts = read["torch"], read["attempts"]
        kinds: dict[str, Any] = {
            "benign": list[NonfiniteOrigin],
            "vanished": list[Vanished],
            "scaler": ScalerSteps,
            "scaled": NonfiniteOrigin | None,
            "clipped": Call | None,
            "zero_gradients": tuple[int, int, int] | None,
            "last_gradients": list[tuple[int, int, int]],
            "undivided": Call | None,
            "uncleared": tuple[int, str] | None,
            "stepped_scaled": tuple[str, str, float] | None,
            "rescaled": str,
            "unmultiplied": tuple[Call, int, int, float] | None,
            "checked": int,
            "nan_buffers": list[str],
        }
        seen = decode_record(kinds, data)
        benign, vanished = seen.pop("benign"), seen.pop("vanished")
        report._seen = FinderState(
            benign={(one.kind, one.op, one.module, one.line): one for one in benign},
            vanished={(one.call.name, one.call.module, one.call.line): one for one in vanished},
            **seen,
        )
        return report

    def formats(self) -> dict[str, tuple[str, Callable[[], str]]]:
        """Returns the formats of `save`."""
        json_format = ("for other programs", lambda: to_json(self.to_dict()))
        return {".txt": ("the text", lambda: f"{self}\n"), **super().formats(), ".json": json_format}

    def content(self) -> Content:
        """Returns what the report says to people."""
        origin, scaler = self.origin, self.scaler
        facts: list[Fact] = []
        parts: list[Part] = []
        if origin is not None:
            call = origin.call
            facts += [
                ("op", call.name, "" if origin.inner == call.name else f"in its call of {origin.inner}"),
                ("module", module_name(origin.module)),
                ("line", shorten(origin.line) or "unknown"),
                ("phase", f"{origin.phase}, step {origin.step:,}", origin.node),
                ("policy", call.policy_name or "none", call.policy_source),
                ("dtypes", call.dtypes),
            ]
            columns = "", "dtype", "shape", Column("min", "number"), Column("max", "number"), "inf", "NaN"
            rows = [
                (f"{what} {one.name}", dtype_name(one.dtype), str(list(one.shape)), *_numbers_of(one))
                for what, one in origin.shown
            ]
            parts += [
                Listing("Why", [*self._about_scaled(), *origin.why, *self._about_buffers()]),
                Table("Ranges", columns, rows, most=len(rows)),
            ]
        if scaler.skipped:
            facts.append(("skipped steps", scaler.counts.removesuffix(" steps")))
        facts += [("checked calls", f"{self.checked:,}")]
        codes = "\n".join(one.code for one in self.attempts) if self.found else ""
        about_scaler = " ".join(self._about_scaler())
        return Content(
            title=f"find_nonfinite: torch {self.torch_version}",
            verdict=self._clean() if origin is None else f"{origin.kind}: {origin.where}",
            facts=facts,
            good=not self.found
            and (None if scaler.skipped or self._seen.zero_gradients or self._about_scaled() else True),
            parts=(
                *parts,
                *([Code("To try, the narrowest first", codes, where="all")] if codes else []),
                Listing("Gradients that became 0 in the backward", self._about_zeros()),
                Listing("Steps that GradScaler skipped", [about_scaler] if about_scaler else []),
                Listing("Benign", list(map(str, self.benign))),
                Listing("Not seen", self.not_seen),
            ),
        )

    def _about_zeros(self) -> list[str]:
        """What vanished in the backward, and what to do."""
        vanished = sorted(self._seen.vanished.values(), key=lambda one: -one.count / one.total)
        if not vanished:
            return []
        lines = [str(one) for one in vanished[:3]]
        if len(vanished) > 3:
            lines.append(f"The same in {len(vanished) - 3:,} more place{'s' * (len(vanished) > 4)}.")
        if self.scaler.count:
            return [*lines, f"GradScaler's scale, {self.scaler.scale:,.10g}, is too low for them, or was at that time."]
        return [*lines, "To keep them: scale the loss of that backward (torch.amp.GradScaler), or use bfloat16."]

    def _about_scaled(self) -> list[str]:
        """What the program did with gradients while GradScaler's scale was in them."""
        seen, found = self._seen, []
        if seen.clipped is not None:
            by = seen.clipped.op.endswith(("mul_", "div_"))
            how = "multiplied by a factor that is computed from them" if by else "clipped"
            found.append(
                f"Gradients were {how} while they were scaled, {tell_line(seen.clipped)}: call "
                "scaler.unscale_(optimizer) before."
            )
        if seen.unmultiplied is not None:
            call, count, total, scale = seen.unmultiplied
            found.append(
                f"GradScaler divides {count:,} of {total:,} gradients by {scale:,.10g}, {tell_line(call)}, which come "
                "from a backward of a loss that it has not multiplied: call scaler.scale(loss).backward()."
            )
        if seen.undivided is not None:
            found.append(
                f"{tell_where(seen.undivided)}, computes with gradients of a loss that GradScaler has scaled: divide "
                "them by scaler.get_scale() before."
            )
        if seen.uncleared is not None:
            step, line = seen.uncleared
            found.append(
                f"The gradients of step {step:,}, which GradScaler skipped, were not cleared before the backward at "
                f"{shorten(line) or 'line unknown'} added to them: clear them (optimizer.zero_grad()) after a skipped "
                "step, too."
            )
        if seen.stepped_scaled is not None:
            found.append(str(ScaledStep(*seen.stepped_scaled)))
        return [*found, *([seen.rescaled] if seen.rescaled else [])]

    def _about_buffers(self) -> list[str]:
        """Which buffers were NaN at the end, such as running statistics, which a skipped step does not restore."""
        named = some_of(self._seen.nan_buffers)
        return [f"NaN was in these buffers at the end: {named}."] if named else []

    def _clean(self) -> str:
        threads = sum(one.number for one in self.not_seen if one.kind == "threads")
        clean = f"no inf or NaN{' (except benign ones)' * bool(self.benign)} in {self.checked:,} checked calls"
        clean += f"; threads that were not checked: {threads:,}" if threads else ""
        if self._seen.zero_gradients is not None:
            step, zeros, count = self._seen.zero_gradients
            of = (
                f"gradients of {zeros:,} of {count:,} parameters are all 0 in step {step:,}, because values became 0 in"
            )
            dtypes = {one.call.outputs[0].dtype for one in self._seen.vanished.values()}
            clean = f"{of} {' and '.join(sorted(map(dtype_name, dtypes)))}; {clean}"
        misused = " ".join(self._about_scaled())
        before = [misused[:-1], str(self.scaler) if self.scaler.skipped else "", "otherwise "]
        return "; ".join(filter(None, before)) + clean if misused or self.scaler.skipped else clean

    def _about_scaler(self) -> list[str]:
        first, where = self._seen.scaled, ""
        if first is not None:
            where = f"{first.call.name}, {first.phase}, {module_name(first.module)}, {tell_line(first.call)}"
        sizes = [(one.unscaled, _largest(one.call)) for one in self._seen.benign.values() if one.unscaled]
        size, largest = min(sizes, key=lambda one: one[1] / one[0], default=(0.0, 0.0))
        return self.scaler.explain(
            where, size, largest, [one.code for one in self.attempts], self._seen.uncleared is not None
        )

    def __str__(self) -> str:
        first = self._clean() if self.origin is None else str(self.origin)
        scaled = self._about_scaled() if self.origin is not None else []
        lines = [
            first,
            *(f"also: {one}" for one in (*scaled, *self._about_buffers())),
            *(f"to try: {one.code}" for one in self.attempts if self.found),
        ]
        lines += [f"zeros: {one}" for one in self._about_zeros()]
        about_scaler = " ".join(self._about_scaler())
        lines += [f"skipped steps: {about_scaler}"] if about_scaler else []
        lines += [f"benign: {one}" for one in self.benign] + [f"not seen: {one}" for one in self.not_seen]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<NonfiniteReport: {'no origin' if self.origin is None else f'{self.origin.kind}, {self.origin.op}'}>"


def _check(model: object, raise_at_first: object, allow: object) -> None:
    check_model(model, "find_nonfinite")
    check_flag("raise_at_first", raise_at_first)
    if (
        not isinstance(allow, Sequence)
        or isinstance(allow, str)
        or not all(isinstance(one, str) and one for one in allow)
    ):
        raise OptionError(
            f'`allow` expects a sequence of names, such as ("log", "blocks.3", "train.py:41"), got {shown(allow)}.'
        )


@block(_check, "raise_at_first")
def find_nonfinite(
    model: nn.Module | None = None, *, raise_at_first: bool = False, allow: Sequence[str] = ()
) -> Iterator[NonfiniteReport]:
    """Finds the first call in a block that has finite inputs and a non-finite output, in any phase.

    Infinite values that a mask asks for are benign, and so are gradients that overflow only because of GradScaler's
    scale: GradScaler then skips the step. The report lists both separately. What the program replaces (`torch.where`,
    `nan_to_num`, `clamp`), or PyTorch in a backward, is benign if no other call uses it. The program's results do not
    change. Until the first fault, each call costs a check of its results and of the arguments that it wrote to, which
    synchronizes on a GPU.

    Args:
        model: The module whose paths the report uses. None: the first module that is called outside of other modules.
        raise_at_first: Whether to raise at the call itself, so that a debugger stops there. For a call of a backward,
            it raises when the backward is over, which may replace the values. It also raises for values of a forward
            that the program replaces later, or only converts to integers, which are benign at the end of the block.
        allow: Ops ("log", "aten::log"), modules ("blocks.3", with those inside it) and lines ("train.py:41") that may
            make non-finite values.

    Yields:
        The report.

    Raises:
        NonfiniteError: `raise_at_first` is set, and a call made a non-finite value. It is an ArithmeticError.
        OptionError: `model` is not a module, or `allow` not a sequence of strings. It is a ValueError.

    Example:
        >>> import torch, torch_promote as tp
        >>> with find_nonfinite() as report, tp.my_autocast("cpu", torch.float16):
        ...     x = torch.full((2, 300), 100.0)
        ...     _ = (x @ x.t()).relu()
        >>> report.origin.op, report.origin.kind
        ('aten::matmul', 'overflow in the op')
    """
    allowed = tuple(allow)
    modules = RunningModules(model)
    report = NonfiniteReport()
    del model  # it may be destroyed before the block ends

    def found(origin: NonfiniteOrigin | None, is_final: bool) -> None:
        nonlocal raise_at_first
        report.origin = origin
        if finder.observer.is_done and report._when_final is not None:
            report._when_final()
        if raise_at_first and is_final and origin is not None:
            raise_at_first = False
            raise NonfiniteError(origin)

    finder = NonfiniteFinder(modules, found, lambda call: any(_names(one, call) for one in allowed))
    report._seen = finder.seen
    try:
        with watch_steps(finder.after_step, finder.before_step), observe(finder.observer, report.not_seen):
            yield report
    finally:
        finder.finish()
    found(report.origin, True)


def _names(name: str, call: Call) -> bool:
    return (
        name in (call.op, call.name, call.op.partition("::")[2], call.name.partition("::")[2])
        or f"{call.module}.".startswith(f"{name}.")
        or (":" in name and call.line.endswith(name))
    )


def _largest(call: Call) -> float:
    """The largest number of the dtype of a call's results."""
    dtypes = [one.dtype for one in call.outputs if one.dtype.is_floating_point]
    return max((torch.finfo(dtype).max for dtype in dtypes), default=math.inf)


def _numbers_of(one: TensorRange) -> tuple[float | int | None, ...]:
    return one.min, one.max, one.infs or None, one.nans or None


# --- what to try


def _short(key: str) -> str:
    """Returns the key that people write: "linear" if it means the same as "aten::linear.default"."""
    bare = key.removeprefix("aten::")
    name = bare.rpartition(".")[0]
    overloads = [one for one in find_overloads(name) if not one.endswith("out")] if bare != key else []
    return name if overloads == [key.removesuffix(".default")] else bare


def _suspects(
    fault: NonfiniteOrigin, forward_ops: Mapping[tuple[str, str], Mapping[str, tuple[Call, Call | None]]]
) -> Iterator[list[tuple[str, Call]]]:
    """The ops whose dtype may be at fault, most likely first, and the calls of them that ran in a lower dtype."""
    if fault.nonfinite is not None:  # only all of them cure it
        # A gradient has the dtype that the forward of its op chose.
        modules = {one.module for one in fault.cures if one.phase == "backward"}
        chosen = [
            (found.name, found)
            for (module, _), ops in forward_ops.items()
            for one in ops.values()
            if module in modules and (found := _lower(*one)) is not None
        ]
        if all(one.autocast or one.phase == "backward" for one in fault.cures):
            # In a backward, an override acts only if a region is open.
            yield [*dict(chosen).items(), *((one.name, one) for one in fault.cures if one.autocast)]
    elif fault.phase == "backward":  # a backward runs in the dtypes that the forward chose
        ops = forward_ops.get((fault.module, fault.line), {})
        of_node = [op for op in ops if _plain(op) and fault.node.lower().startswith(f"{_plain(op)}backward")]
        own = [fault.call] if fault.call.policy is not None and _lower(fault.call, None) else []  # of an open region
        for names in (of_node, list(ops)):
            calls = [one for name in names if (one := _lower(*ops[name])) is not None]
            yield [(one.name, one) for one in (*own, *calls)] if calls else []
        yield [(one.name, one) for one in own]
    elif fault.call.autocast:  # a region was open
        yield [(fault.call.name, fault.call)]
        if fault.inner != fault.call.name:
            yield [(fault.inner, fault.call)]


def _lower(call: Call, maker: Call | None) -> Call | None:
    """A call if it ran in a lower dtype, or the call that made its input if that did."""
    for one in (call, maker):
        if one is not None and any(info.dtype in LOWER_DTYPES for info in (*one.ran_with, *one.outputs)):
            is_wide = one is call and not any(info.dtype in LOWER_DTYPES for info in one.ran_with)
            if not is_wide:
                return one
    return None


def _plain(name: str) -> str:
    return name.partition("::")[2].partition(".")[0].replace("_", "")
