"""`Policy`: the cast policy of every op on every device type, as an immutable value."""

from __future__ import annotations

import functools
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils import _pytree

from torch_promote.errors import DeviceTypeError, PolicyError, UnsupportedDeviceError, did_you_mean
from torch_promote.policy import files
from torch_promote.policy.cast_policy import spell_policy
from torch_promote.policy.named import MEANINGS, Change, Value, named_changes, stock_policy
from torch_promote.policy.op_names import exact_key, find_overloads
from torch_promote.policy.op_table import DEVICE_TYPES, rows_by_name
from torch_promote.policy.overrides import parse_overrides
from torch_promote.policy.registered_policies import registered_ops

__all__ = ["Difference", "Policy"]

#: How many entries a repr or an error shows.
_SHOWN = 4


class Difference(NamedTuple):
    """One difference between two policies.

    Attributes:
        overload: An overload's full name.
        device: "cpu" or "cuda".
        mine: The first policy's value; None if it has none for the overload.
        theirs: The second policy's value.
    """

    overload: str
    device: str
    mine: Value | None
    theirs: Value | None


class Policy:
    """What autocast does with each op on each device type: stock's policy with overrides.

    A policy is immutable. Two policies with the same effect are equal and have the same hash, however they were made.
    Policies can be copied, pickled and saved. Create one with `Policy.stock()`, `Policy.named(...)` or
    `Policy.load(...)`; `override` returns a changed copy.

    For an op outside the table, a policy contains only the entry you gave it. Without one, PyTorch's own autocast, a
    library or `register_policy` decides about the op; `fallthrough` disables what they do.

    Attributes:
        changes: The differences from stock in the running PyTorch: sorted triples of an overload's full name, a device
            type, and a `CastPolicy` or a floating dtype.

    Example:
        >>> policy = Policy.stock().override({"mm.default": "fp32"}, device="cpu")
        >>> policy.lookup("mm", "cpu").value, policy.lookup("mm", "cuda").value
        ('fp32', 'lower_precision_fp')
        >>> [(d.overload, d.device) for d in policy.diff(Policy.stock())]
        [('aten::mm', 'cpu')]
        >>> Policy.stock().override({"mm.default": "fp32"}).override({"mm.default": "fp16"}) == Policy.stock()
        True
    """

    # Not a dataclass: torch.compile would treat its fields as variables instead of the policy as a constant.
    __slots__ = ("_hash", "changes")

    changes: tuple[Change, ...]
    _hash: int

    def __init__(self, changes: tuple[Change, ...] = ()) -> None:
        """Makes a policy from changes without checking them. Use `stock`, `named` and `override` instead."""
        if not isinstance(changes, tuple) or not all(
            isinstance(change, tuple) and len(change) == 3 for change in changes
        ):
            raise PolicyError(
                f"Policy(...) takes a tuple of (overload, device, policy) triples, got {changes!r}. To get a policy by "
                f"name, use Policy.named(...)."
            )
        object.__setattr__(self, "changes", changes)

    @classmethod
    def stock(cls) -> Policy:
        """Returns the policy of PyTorch's autocast.

        Example:
            >>> Policy.stock().changes
            ()
        """
        return cls()

    @classmethod
    def named(cls, name: str) -> Policy:
        """Returns a policy by its name.

        Args:
            name: "stock"; "cpu" or "cuda" (the policies of that device type, on every device type); "fp32_safe"
                (stock, but an op that runs in float32 on one device type does so on every device type); "off" (casts
                in no op).

        Raises:
            PolicyError: There is no policy with this name.

        Example:
            >>> Policy.named("cuda").lookup("exp", "cpu")
            <CastPolicy.fp32: 'fp32'>
        """
        if not isinstance(name, str) or name not in MEANINGS:
            raise PolicyError(
                f"no policy is called {name!r}.{did_you_mean(str(name), MEANINGS)} Legal: {', '.join(MEANINGS)}."
            )
        return _named(name, registered_ops() if name == "off" else ())

    @staticmethod
    def names() -> tuple[str, ...]:
        """Returns the names that `named` accepts.

        Example:
            >>> Policy.names()
            ('stock', 'cpu', 'cuda', 'fp32_safe', 'off')
        """
        return tuple(MEANINGS)

    @classmethod
    def of(cls, value: Policy | str | os.PathLike[str]) -> Policy:
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
            raise PolicyError(
                f"a policy is a Policy, a name or the path of a policy file, got {value!r} of type "
                f"{type(value).__name__}. For single ops, use Policy.stock().override({{op: policy}})."
            )
        if value in MEANINGS:
            return cls.named(value)
        if value.endswith(".toml") or os.sep in value or "/" in value:
            return cls.load(value)
        raise PolicyError(
            f"no policy is called {value!r}.{did_you_mean(value, MEANINGS)} Legal: {', '.join(MEANINGS)}, or the path "
            f"of a file, which contains a separator or ends with .toml."
        )

    def override(self, overrides: Mapping[Any, Any], device: str | Sequence[str] | None = None) -> Policy:
        """Returns a copy of this policy with other policies for some ops.

        Args:
            overrides: Maps ops to policies, as `my_autocast(overrides=...)` does.
            device: The device type or types to which they apply, "cpu" or "cuda". None: all.

        Returns:
            The new policy. The overrides take precedence over this policy's entries.

        Raises:
            PolicyError: An op or a policy does not exist, a policy is not legal for an op, or two keys give the same
                overload different policies.
            DeviceTypeError: A device type is not a str, or a sequence is empty or has duplicates.
            UnsupportedDeviceError: This package has no policies for a device type.

        Example:
            >>> Policy.stock().override({"linalg_*": "fp32", "mm.out": "match_self"}).lookup("mm.out", "cpu")
            <CastPolicy.match_self: 'match_self'>
        """
        device_types = _device_types(device)
        entries = dict(self._entries())
        for overload, value in parse_overrides(overrides):
            entries.update({(overload, name): value for name in device_types})
        return self._of_entries(entries)

    def diff(self, other: Policy | str | os.PathLike[str]) -> tuple[Difference, ...]:
        """Returns the differences between this policy and another. Empty if they are equal.

        Args:
            other: A policy, or a value that `of` accepts.

        Returns:
            The differences, sorted by overload and device type.

        Example:
            >>> [difference.overload for difference in Policy.stock().override({"mm.default": "fp32"}).diff("stock")]
            ['aten::mm', 'aten::mm']
        """
        theirs = Policy.of(other)
        places = sorted({*dict(self._entries()), *dict(theirs._entries())})
        pairs = ((place, self._value(*place), theirs._value(*place)) for place in places)
        return tuple(Difference(*place, mine, other) for place, mine, other in pairs if mine != other)

    def lookup(self, op: object, device: str) -> Value | None:
        """Returns the policy of an op on a device type.

        Args:
            op: An op, named as in `override`. If some of its overloads are in the op table, only those are considered.
            device: "cpu" or "cuda".

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
        if not isinstance(device, str):
            raise DeviceTypeError(f"lookup takes one device type, got {device!r}.{_LEGAL_DEVICES}")
        (device,) = _device_types(device)
        names = find_overloads(op)
        names = tuple(name for name in names if name in rows_by_name()) or names
        values = {name: self._value(name, device) for name in names}
        if len(set(values.values())) > 1:
            known = [f"{_spell(value)} ({name})" for name, value in values.items()]
            shown = ", ".join(known[:_SHOWN]) + (f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else "")
            raise PolicyError(
                f"{str(op)!r} selects {len(names)} overloads with different policies on {device}: {shown}. "
                f"Name one of them, such as {exact_key(names[0])!r}."
            )
        return values[names[0]]

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy as plain data, for JSON, with the structure of a policy file.

        Example:
            >>> Policy.stock().override({"mm.default": "fp32"}).to_dict()["all"]
            {'aten::mm.default': 'fp32'}
        """
        return files.to_data(self.changes)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """Returns the policy that plain data describes: what `to_dict` returns, or the same structure written by hand.

        Raises:
            PolicyError: An entry is unknown, illegal or repeated.

        Example:
            >>> Policy.from_dict({"format": 1, "cpu": {"softmax": "fp32"}}).lookup("softmax", "cpu")
            <CastPolicy.fp32: 'fp32'>
        """
        return cls._of_entries(files.from_data(data))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves the policy to a TOML file. An existing file is replaced atomically.

        Args:
            path: The path of the file, by convention with the suffix `.toml`.

        Raises:
            PolicyError: The file cannot be written.
        """
        files.save(self.changes, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Loads a policy from a file.

        Raises:
            PolicyError: The file cannot be read, or an entry is unknown, illegal or repeated. The text names the
                section and the key.

        Example:
            >>> import tempfile, pathlib
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Policy.named("fp32_safe").save(path := pathlib.Path(folder, "safe.toml"))
            ...     Policy.load(path)
            Policy.named('fp32_safe')
        """
        return cls._of_entries(files.load(path))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Policy is immutable, so {name!r} cannot be set. Use policy.override({{op: policy}}).")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Policy is immutable, so {name!r} cannot be deleted.")

    def __eq__(self, other: object) -> bool:
        return self.changes == other.changes if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(self.changes))
            return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Policy, (self.changes,)

    def __repr__(self) -> str:
        for name in MEANINGS:
            if self == Policy.named(name):
                return "Policy.stock()" if name == "stock" else f"Policy.named({name!r})"
        sections = {name: entries for name, entries in self.to_dict().items() if isinstance(entries, dict)}
        return "Policy.stock()" + "".join(_spell_override(name, entries) for name, entries in sections.items())

    @classmethod
    def _of_entries(cls, entries: Mapping[tuple[str, str], Value]) -> Policy:
        changes = ((*place, value) for place, value in sorted(entries.items(), key=lambda entry: entry[0]))
        return cls(tuple(change for change in changes if stock_policy(*change[:2]) != change[2]))

    def _entries(self) -> Iterable[tuple[tuple[str, str], Value]]:
        return (((overload, device_type), value) for overload, device_type, value in self.changes)

    def _value(self, overload: str, device_type: str) -> Value | None:
        index = bisect_left(self.changes, (overload, device_type), key=lambda change: change[:2])
        if index < len(self.changes) and self.changes[index][:2] == (overload, device_type):
            return self.changes[index][2]
        return stock_policy(overload, device_type)


# Lets a compiled function take a policy as an argument. torch.compile recompiles for a policy that is not equal.
if hasattr(_pytree, "register_constant"):
    _pytree.register_constant(Policy)


@functools.lru_cache
def _named(name: str, registered: tuple[tuple[str, str], ...]) -> Policy:
    """The named policy, cached: a program may construct a region from a name many times."""
    return Policy._of_entries(
        {(overload, device_type): value for overload, device_type, value in named_changes(name, registered)}
    )


def _device_types(device: object) -> tuple[str, ...]:
    names = DEVICE_TYPES if device is None else (device,) if isinstance(device, str) else device
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise DeviceTypeError(f"device is a device type, a sequence of them or None, got {device!r}.{_LEGAL_DEVICES}")
    for name in names:
        if name not in DEVICE_TYPES:
            raise UnsupportedDeviceError(f"a policy has no device type {name!r}.{_LEGAL_DEVICES}")
    if len(set(names)) < len(names):
        raise DeviceTypeError(f"device {list(names)!r} contains a duplicate. Name each device type once.")
    return tuple(names)


_LEGAL_DEVICES = f" Legal: {', '.join(map(repr, DEVICE_TYPES))}."


def _spell(value: Value | None) -> str:
    return "no entry" if value is None else spell_policy(value)


def _spell_override(section: str, entries: Mapping[str, str]) -> str:
    shown = [f"{op!r}: {policy!r}" for op, policy in list(entries.items())[:_SHOWN]]
    shown += [f"... {len(entries) - _SHOWN} more"] if len(entries) > _SHOWN else []
    device = "" if section == files.ALL_DEVICE_TYPES else f", device={section!r}"
    return f".override({{{', '.join(shown)}}}{device})"
