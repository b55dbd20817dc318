"""`Policy`: the cast policy of every op on every device type, as an immutable value; `PolicyDiff`."""

from __future__ import annotations

import functools
import html
import itertools
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self, get_args

from torch import nn
from torch.utils import _pytree

from torch_promote.errors import DeviceTypeError, PolicyError, explains_arguments, shown
from torch_promote.policy import files, module_tables
from torch_promote.policy.files import Pattern
from torch_promote.policy.module_tables import Tables, entries_of, section_of, spell_table
from torch_promote.policy.named_policies import (
    EVERY_OP,
    LEGAL_POLICIES,
    MEANINGS,
    RECOGNIZED,
    Change,
    PolicyName,
    Value,
    closest_policy,
    named_changes,
    registered_ops,
    stock_policy,
)
from torch_promote.policy.op_names import exact_key, find_overloads
from torch_promote.policy.op_table import DEVICE_TYPES, DeviceType, DeviceTypes, OpPolicy, rows_by_name, spell_policy
from torch_promote.policy.overrides import LEGAL_DEVICES, advice_for, check_device_types, parse_overrides

#: How many rows a notebook shows of the differences of two policies.
_SHOWN = 20


class PolicyDifference(NamedTuple):
    """One difference between two policies.

    Attributes:
        overload: An overload's full name. In a table of modules also "policy", for the policy of a whole module.
        device: The device type; for an entry of a table of modules, the table's section, `[modules."blocks.*.attn"]`.
        mine: The first policy's value; None if it has none for the overload.
        theirs: The second policy's value.
    """

    overload: str
    device: str
    mine: Value | str | None
    theirs: Value | str | None


class PolicyDiff(tuple[PolicyDifference, ...]):
    """The differences between two policies: a tuple that prints as a table, also in a notebook.

    Attributes:
        names: What the two policies are called.

    Example:
        >>> from torch_promote import Policy
        >>> print(Policy.stock().override({"mm.default": "fp32"}, device_type="cpu").diff("stock"))
        op  devices  this policy  stock
        mm  cpu      fp32         lower_precision_fp
    """

    names: tuple[str, str]

    def __new__(cls, found: Iterable[PolicyDifference], names: tuple[str, str]) -> PolicyDiff:
        """Makes the tuple of differences between two policies that are called `names`."""
        made = super().__new__(cls, found)
        made.names = names
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return PolicyDiff, (tuple(self), self.names)

    def to_dict(self) -> dict[str, Any]:
        """Returns the differences as values that JSON has."""
        return {
            "policies": list(self.names),
            "differences": [
                {
                    "op": each.overload,
                    "device": each.device,
                    "policies": [spell_value(each.mine), spell_value(each.theirs)],
                }
                for each in self
            ],
        }

    def table(self) -> list[tuple[str, ...]]:
        """Returns the titles of columns and the rows below them: one for the device types of an op that are alike."""
        devices: dict[tuple[str, ...], list[str]] = {}
        for each in self:
            values = (spell_value(value) or "-" for value in (each.mine, each.theirs))
            devices.setdefault((each.overload.removeprefix("aten::"), *values), []).append(each.device)
        rows = ((op, ", ".join(found), *values) for (op, *values), found in devices.items())
        return [("op", "devices", *self.names), *rows]

    def __str__(self) -> str:
        if not self:
            return f"{self.names[0]} and {self.names[1]} are equal."
        table = self.table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        rows = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
        return "\n".join(rows)

    def __repr__(self) -> str:
        return f"<PolicyDiff between {' and '.join(self.names)}: {len(self)} differences. print() shows a table.>"

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>{self}</p>"
        titles, *rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.table())
        body = "".join(f"<tr>{row}</tr>" for row in rows[:_SHOWN])
        more = f"<p>... {len(rows) - _SHOWN:,} more: print() shows all</p>" if len(rows) > _SHOWN else ""
        return f"<table><thead><tr>{titles.replace('td>', 'th>')}</tr></thead><tbody>{body}</tbody></table>{more}"


def spell_value(value: Value | str | None) -> str | None:
    """Returns a value of a `PolicyDifference` as text."""
    return value if value is None or isinstance(value, str) else spell_policy(value)


class Policy:
    """What autocast does with each op on each device type: stock's policy with overrides.

    A policy is immutable. Two policies with the same effect are equal and have the same hash, however they were made.
    Policies can be copied, pickled and saved, with the patterns that they were made of. Create one with
    `Policy.stock()`, `Policy.named(...)` or `Policy.load(...)`; `override` returns a changed copy.

    For an op outside the table, a policy contains only the entry you gave it. Without one, PyTorch's own autocast, a
    library or `register_policy` decides about the op; `fallthrough` disables what they do.

    A policy may have tables for modules, too: `override_modules`. A region that has them needs a model to find the
    modules in: `my_autocast(policy=policy, model=model)`, or `policy.apply_to(model)` before.

    Attributes:
        changes: The differences from stock in the running PyTorch: sorted triples of an overload's full name, a device
            type, and a `CastPolicy` or a floating dtype.
        modules: The tables for modules: sorted pairs of a name or a pattern of names, and "fp32", "off", or sorted
            pairs of an overload's full name and its policy.

    Example:
        >>> policy = Policy.stock().override({"mm.default": "fp32"}, device_type="cpu")
        >>> policy.lookup("mm", "cpu").value, policy.lookup("mm", "cuda").value
        ('fp32', 'lower_precision_fp')
        >>> [(d.overload, d.device) for d in policy.diff(Policy.stock())]
        [('aten::mm', 'cpu')]
        >>> Policy.stock().override({"mm.default": "fp32"}).override({"mm.default": "lower"}) == Policy.stock()
        True
    """

    # Not a dataclass: torch.compile would treat its fields as variables instead of the policy as a constant.
    __slots__ = ("_hash", "_patterns", "changes", "modules")

    changes: tuple[Change, ...]
    modules: Tables
    _patterns: tuple[Pattern, ...]  # for files; they say nothing that `changes` and `modules` do not say
    _hash: int

    def __init__(
        self, changes: tuple[Change, ...] = (), modules: Tables = (), _patterns: tuple[Pattern, ...] = ()
    ) -> None:
        """Makes a policy from changes without checking them. Use `stock`, `named` and `override` instead."""
        if not isinstance(changes, tuple) or not all(isinstance(one, tuple) and len(one) == 3 for one in changes):
            raise PolicyError(
                f"Policy(...) takes a tuple of (overload, device, policy) triples, got {shown(changes)}. To get a "
                f"policy by name, use Policy.named(...)."
            )
        object.__setattr__(self, "changes", changes)
        object.__setattr__(self, "modules", modules)
        object.__setattr__(self, "_patterns", _patterns)

    @classmethod
    def stock(cls) -> Policy:
        """Returns the policy of PyTorch's autocast.

        Example:
            >>> Policy.stock().changes
            ()
        """
        return cls()

    @classmethod
    def named(cls, name: PolicyName) -> Policy:
        """Returns a policy by its name.

        Args:
            name: "stock"; a device type such as "cuda" (its policies, on every device type); "fp32_safe" (stock, but an
                op that runs in float32 on one device type does so on every device type); "fp32" (every op runs in
                float32); "off" (casts in no op); "torch-2.8" to "torch-2.15" (what the autocast of that PyTorch does,
                without the ops that the running one lacks; `torch-promote policies --policy NAME` lists these).

        Raises:
            PolicyError: There is no policy with this name.

        Example:
            >>> Policy.named("cuda").lookup("exp", "cpu")
            <CastPolicy.fp32: 'fp32'>
        """
        if not isinstance(name, str) or name not in MEANINGS:
            raise PolicyError(f"no policy is called {name!r}.{closest_policy(str(name))} Legal: {LEGAL_POLICIES}.")
        return _named(name, registered_ops() if name in EVERY_OP else ())

    @staticmethod
    def names() -> tuple[PolicyName, ...]:
        """Returns the names that `named` accepts.

        Example:
            >>> Policy.names()[:7]
            ('stock', 'cpu', 'cuda', 'xpu', 'mps', 'fp32_safe', 'fp32')
        """
        return get_args(PolicyName)

    @classmethod
    def of(cls, value: PolicyLike) -> Policy:
        """Converts what `my_autocast(policy=...)` accepts into a policy.

        Args:
            value: A policy, a name that `named` accepts, or the path of a policy file. A str is taken for a path if it
                is not a name, and contains a path separator or ends with `.toml`.

        Raises:
            PolicyError: The value is none of these, or the file cannot be read or is invalid.

        Example:
            >>> Policy.of("stock") == Policy.of(Policy.stock())
            True
        """
        if isinstance(value, Policy):
            return value
        if isinstance(value, os.PathLike):
            return cls.load(value)
        if not isinstance(value, str):
            advice = advice_for(value) or " For single ops, use Policy.stock().override({op: policy})."
            raise PolicyError(
                f"a policy is a Policy, a name or the path of a policy file, got {shown(value)} of type "
                f"{type(value).__name__}.{advice}"
            )
        if value in MEANINGS:
            return cls.named(value)  # type: ignore[arg-type]
        if value.endswith(".toml") or os.sep in value or "/" in value:
            return cls.load(value)
        if os.path.exists(value):
            remedy = "It is a folder: name a file in it." if os.path.isdir(value) else "Rename it if it is one."
            raise PolicyError(f"{value} is there, but the name of a policy file ends in .toml. {remedy}")
        raise PolicyError(
            f"no policy is called {value!r}.{advice_for(value) or closest_policy(value)} Legal: "
            f"{LEGAL_POLICIES}, or the path of a file, which contains a separator or ends with .toml."
        )

    @explains_arguments
    def override(self, overrides: Mapping[Any, OpPolicy], device_type: DeviceTypes | None = None) -> Policy:
        """Returns a copy of this policy with other policies for some ops.

        Args:
            overrides: Maps ops to policies, as `my_autocast(overrides=...)` does.
            device_type: The device type or types to which they apply. None: all.

        Returns:
            The new policy. The overrides take precedence over this policy's entries.

        Raises:
            PolicyError: An op or a policy does not exist, a policy is not legal for an op, or two names, or two
                patterns, give the same overload different policies. (A name takes precedence over a pattern.)
            DeviceTypeError: A device type is not a str, or a sequence is empty or has duplicates.
            UnsupportedDeviceError: This package has no policies for a device type.

        Example:
            >>> Policy.stock().override({"linalg_*": "fp32", "mm.out": "match_self"}).lookup("mm.out", "cpu")
            <CastPolicy.match_self: 'match_self'>
        """
        device_types = check_device_types(device_type)
        entries = self._entries()
        for overload, value in parse_overrides(overrides):
            entries.update({(overload, name): value for name in device_types})
        sections = [files.ALL_DEVICE_TYPES] if len(device_types) == len(DEVICE_TYPES) else device_types
        return self._of_entries(entries, self.modules, self._with_patterns(dict.fromkeys(sections, overrides)))

    @explains_arguments
    def override_modules(self, tables: Mapping[str, str | Mapping[Any, OpPolicy]]) -> Policy:
        """Returns a copy of this policy with other policies for some modules.

        Args:
            tables: Maps modules to policies. A module is named as in `model.named_modules()`, or by a pattern, as in
                `set_module_policy`: "head", "blocks.*.attn", "**.norm". A policy is
                - overrides, as in `my_autocast(overrides=...)`, for every device type. They add to those of this policy
                  for the same name;
                - "fp32": autocast is off inside, and inputs are cast to float32;
                - "off": autocast is off inside.

        Returns:
            The new policy.

        Raises:
            PolicyError: A name is not a str, an op or a policy does not exist or is not legal, or a table is empty.

        Example:
            >>> policy = Policy.stock().override_modules({"blocks.*.attn": {"softmax.int": "lower"}, "head": "fp32"})
            >>> policy.modules[1]
            ('head', 'fp32')
            >>> policy.to_dict()["modules"]["blocks.*.attn"]
            {'aten::softmax.int': 'lower_precision_fp'}
        """
        merged = module_tables.merged(self.modules, module_tables.parse_tables(tables))
        written = {section_of(name): table for name, table in tables.items() if isinstance(table, Mapping)}
        return Policy(self.changes, merged, self._with_patterns(written))

    def _with_patterns(self, written: Mapping[str, Mapping[Any, Any]]) -> tuple[Pattern, ...]:
        """Returns the patterns of this policy, and after them those of overrides, by the sections of a file."""
        added = [one for section, overrides in written.items() for one in files.patterns_in(section, overrides)]
        places = {one[:2] for one in added}
        return (*(one for one in self._patterns if one[:2] not in places), *added)

    def without_modules(self) -> Policy:
        """Returns this policy without its tables for modules.

        Example:
            >>> Policy.stock().override_modules({"head": "fp32"}).without_modules() == Policy.stock()
            True
        """
        return Policy(self.changes, (), self._patterns)

    def apply_to(self, model: nn.Module) -> AppliedPolicy:
        """Has regions of this policy apply its tables for modules to a model, without `my_autocast(model=...)`.

        It holds in every region whose policy has the same tables, in every thread, also if `install`,
        `set_default_policy` or `torch.autocast` under them gave it the policy, and in no other region. The policies of
        ops are the region's alone.

        Args:
            model: The model. It is not kept alive.

        Returns:
            A handle: its `remove()` undoes it, and so does the end of a `with` block with it. `modules` maps the names
            of the modules that were found to their policies.

        Raises:
            PolicyError: A table matches no module, two tables of equal precedence give a module different policies, or
                a module cannot have a policy, as in `set_module_policy`. Nothing has changed.

        Example:
            >>> from torch_promote import my_autocast
            >>> head = nn.Linear(3, 4)
            >>> policy = Policy.stock().override_modules({"": "fp32"})
            >>> with policy.apply_to(head), my_autocast("cpu", policy=policy):
            ...     head(head.weight.new_ones(1, 3)).dtype
            torch.float32
        """
        handle: AppliedPolicy = module_tables.module_finder().apply(self, model)
        return handle

    def diff(self, other: PolicyLike) -> PolicyDiff:
        """Returns the differences between this policy and another, which print as a table. Empty if they are equal.

        Args:
            other: A policy, or a value that `of` accepts.

        Returns:
            A tuple of the differences, sorted by overload and device type; then those of tables for modules.

        Example:
            >>> Policy.stock().override({"mm.default": "fp32"}, "cpu").diff("stock")[0].overload
            'aten::mm'
        """
        theirs = Policy.of(other)
        found: list[PolicyDifference] = []
        mine, its = self._entries(), theirs._entries()
        for place in sorted({*mine, *its}):
            stock = stock_policy(*place)  # the policy of an entry that is missing
            found.append(PolicyDifference(*place, mine.get(place, stock), its.get(place, stock)))
        tables = entries_of(self.modules), entries_of(theirs.modules)
        found += (
            PolicyDifference(*place, *(table.get(place) for table in tables))
            for place in sorted({**tables[0], **tables[1]})
        )
        first, second = (None if policy.modules else policy._name for policy in (self, theirs))
        return PolicyDiff(
            (each for each in found if each.mine != each.theirs), (first or "this policy", second or "the other")
        )

    @explains_arguments
    def lookup(self, op: object, device_type: DeviceType | str) -> Value | None:
        """Returns the policy of an op on a device type.

        Args:
            op: An op, named as in `override`. If some of its overloads are in the op table, only those are considered.
            device_type: A device type of `my_autocast`.

        Returns:
            A cast policy, or the dtype that the op runs in. None: this policy has no entry for the op.

        Raises:
            PolicyError: No op has that name, or it selects several overloads with different policies.

        Example:
            >>> Policy.stock().lookup("softmax", "cuda").value
            'fp32_set_opt_dtype'
            >>> print(Policy.stock().lookup("relu", "cuda"))
            None
        """
        if not isinstance(device_type, str):
            raise DeviceTypeError(f"lookup takes one device type, got {shown(device_type)}.{LEGAL_DEVICES}")
        check_device_types(device_type)
        names = find_overloads(op)
        names = tuple(name for name in names if name in rows_by_name()) or names
        entries = self._entries()
        places = {name: (name, device_type) for name in names}
        values = {name: entries.get(place, stock_policy(*place)) for name, place in places.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name} {spell_value(value) or 'no entry'}" for name, value in values.items())
            raise PolicyError(
                f"{str(op)!r} selects overloads with different policies on {device_type}: {listed}. Name one of them, "
                f"such as {exact_key(names[0])!r}."
            )
        return values[names[0]]

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy as plain data, for JSON, with the structure of a policy file.

        Example:
            >>> Policy.stock().override({"mm.default": "fp32"}).to_dict()["all"]
            {'aten::mm.default': 'fp32'}
        """
        return files.to_data(self.changes, self.modules, self._patterns)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """Returns the policy that plain data describes: what `to_dict` returns, or the same structure written by hand.

        Raises:
            PolicyError: An entry is unknown, illegal or repeated.

        Example:
            >>> Policy.from_dict({"format": 1, "cpu": {"softmax": "fp32"}}).lookup("softmax", "cpu")
            <CastPolicy.fp32: 'fp32'>
        """
        return cls._of_entries(*files.from_data(data))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the policy to a TOML file. An existing file is replaced atomically.

        Args:
            path: The path of the file. Its suffix is `.toml`, or it has none.

        Raises:
            PolicyError: The path has another suffix, or the file cannot be written.
        """
        files.save(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Loads a policy from a file.

        Raises:
            PolicyError: The file cannot be read, or an entry (named in the text) is unknown, illegal or repeated.

        Example:
            >>> import tempfile, pathlib
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Policy.named("fp32_safe").save(path := pathlib.Path(folder, "safe.toml"))
            ...     Policy.load(path)
            Policy.named('fp32_safe')
        """
        return cls._of_entries(*files.load(path))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Policy is immutable, so {name!r} cannot be set. Use policy.override({{op: policy}}).")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Policy is immutable, so {name!r} cannot be deleted.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Policy):
            return NotImplemented
        return self.changes == other.changes and self.modules == other.modules

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash((self.changes, self.modules)))
            return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, (self.changes, self.modules, self._patterns)

    def __repr__(self) -> str:
        """Returns an expression whose value is the policy, or if that is long, the number of its entries."""
        text = "Policy.stock()" if self._name in (None, "stock") else f"Policy.named({self._name!r})"
        if self._name is None:
            for section, entries in files.to_data(self.changes).items():
                if isinstance(entries, dict):
                    device = "" if section == files.ALL_DEVICE_TYPES else f", device_type={section!r}"
                    text += f".override({_spell(entries)}{device})"
        if self.modules:
            tables = {name: table if isinstance(table, str) else spell_table(table) for name, table in self.modules}
            text += f".override_modules({_spell(tables)})"
        if len(text) < _LIMIT_OF_REPR:
            return text
        modules = f" and tables for {len(self.modules)} module{'s' * (len(self.modules) > 1)}" * bool(self.modules)
        return (
            f"<Policy: {len(self.changes)} entries{modules} differ from stock. print(policy.diff('stock')) shows them.>"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.diff('stock')._repr_html_()}"

    @property
    def _name(self) -> str | None:
        """The name of the policy without its tables for modules; None if it has none, or that of a PyTorch version."""
        return next((name for name in RECOGNIZED if self.changes == Policy.named(name).changes), None)

    @classmethod
    def _of_entries(
        cls, entries: Mapping[tuple[str, str], Value], modules: Tables = (), patterns: tuple[Pattern, ...] = ()
    ) -> Policy:
        changes = ((*place, value) for place, value in sorted(entries.items(), key=lambda entry: entry[0]))
        return cls(tuple(change for change in changes if stock_policy(*change[:2]) != change[2]), modules, patterns)

    def _entries(self) -> dict[tuple[str, str], Value]:
        return {(overload, device_type): value for overload, device_type, value in self.changes}


#: A policy as an argument: itself, its name or the path of its file.
PolicyLike = Policy | PolicyName | str | os.PathLike[str]
#: The policy of a module as an argument, as in `set_module_policy`.
ModulePolicyLike = PolicyLike | Mapping[Any, OpPolicy]
#: The policy of a module as a result. A mapping contains the names of ops and cast policies.
PolicyOfModule = dict[str, str] | Policy | str


class ModuleHandle:
    """A handle that undoes what returned it. Also a context manager that does so."""

    modules: Mapping[str, PolicyOfModule]  # those that have policies through it, by name

    def remove(self) -> None:
        """Undoes it. Repeating it does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class AppliedPolicy(ModuleHandle):
    """The handle that `Policy.apply_to` returns, which undoes it. Also a context manager that does so.

    Attributes:
        policy: The policy.
        modules: The modules that its tables select, by name, and their policies.
    """

    policy: Policy


#: In characters: three lines of a terminal, with the end of the last one.
_LIMIT_OF_REPR = 240


def _spell(entries: Mapping[str, Any]) -> str:
    """A dict as a repr shows it, without those after the first four entries."""
    shown = [
        f"{key!r}: {_spell(value) if isinstance(value, Mapping) else repr(value)}"
        for key, value in itertools.islice(entries.items(), 4)
    ]
    return f"{{{', '.join(shown)}{', ...' if len(entries) > 4 else ''}}}"


# Lets a compiled function take a policy as an argument. torch.compile recompiles for a policy that is not equal.
if hasattr(_pytree, "register_constant"):
    _pytree.register_constant(Policy)


@functools.lru_cache
def _named(name: str, registered: tuple[tuple[str, str], ...]) -> Policy:
    """The named policy, cached: a program may construct a region from a name many times."""
    changes = named_changes(name, registered)
    return Policy._of_entries({(overload, device_type): value for overload, device_type, value in changes})
