"""Bugs that the sanitizers have to find: `make sanitize ARGS=--planted` builds them into the copy of the checkout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reports import Report


@dataclass(frozen=True, slots=True)
class Planted:
    """A bug."""

    file: str
    old: str
    new: str
    test: str
    kind: str
    within: str

    def plant(self, copy: Path) -> None:
        """Changes a copy of the checkout."""
        file = copy / self.file
        text = file.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.file} has changed: adapt planted.py"
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")

    def explains(self, report: Report) -> bool:
        """Whether a report is about this bug."""
        return report.kind.startswith(self.kind) and self.within in report.text


PLANTED: dict[str, tuple[Planted, ...]] = {
    "address": (
        Planted(
            file="csrc/cache/persistent_casts.cpp",
            old="  registry_of_weights.weights.erase(this);\n",
            new="",
            test="tests/cache/test_cache_persistent.py",
            kind="heap-use-after-free",
            within="CastsOfWeight",
        ),
        Planted(
            file="csrc/cache/kept_cast.cpp",
            old="  offset_ = impl.storage_offset();\n  if (impl.is_cuda())",
            # volatile: the compiler must not leave out the product.
            new="  const volatile int64_t planted = impl.numel() * INT64_MAX;\n  static_cast<void>(planted);\n"
            "  offset_ = impl.storage_offset();\n  if (impl.is_cuda())",
            test="tests/cache/test_cache_persistent.py",
            kind="signed integer overflow",
            within="csrc/cache/kept_cast.cpp",
        ),
        Planted(
            file="csrc/cast/pooled.h",
            old="      while (free.first != nullptr) {\n",
            new="      while (false) {\n",
            test="tests/cache/test_cast_lifetimes.py",
            kind="Direct leak",
            within="csrc/cast/pooled.h",
        ),
    ),
    "thread": (
        Planted(
            file="csrc/cache/persistent_casts.cpp",
            old="  const Lock lock(registry_of_weights.mutex);\n  for (const CastsOfWeight",
            new="  for (const CastsOfWeight",
            test="tests/cache/test_threads_on_shared_weights.py",
            kind="data race",
            within="csrc/cache/persistent_casts.cpp",
        ),
        Planted(
            file="csrc/cache/kept_cast.cpp",
            old="    const Lock lock(casts_mutex());\n    cast_.swap(",
            new="    cast_.swap(",
            test="tests/cache/test_casts_and_other_threads.py::test_a_cast_is_borrowed_while_its_owner_uses_it",
            kind="data race",
            within="csrc/cache/kept_cast.cpp",
        ),
    ),
}
