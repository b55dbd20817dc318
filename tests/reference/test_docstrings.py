"""The reference's docstrings: each public name has an example, and names the PyTorch source that it mirrors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from torch_promote import reference

ROOT = Path(reference.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

#: One file and function of PyTorch, as `c10/core/ScalarType.h, canCast (v2.13)`.
CITATION = r"[\w.-]+(?:/[\w.-]+)+\.\w+, (?:TORCH_(?:META|IMPL)_FUNC2?\(\w+(?:, \w+)?\)|~?\w+(?:::\w+)*) \(v\d+\.\d+\)"
CITATIONS = re.compile(rf"{CITATION}(?:; {CITATION})*\.")

_CASTS = "PyTorch casts, and says nothing of it"
_TABLE = "PyTorch has kernels in place of a table of op rules"
_RULES = "PyTorch has one promotion rule, in code"
_TEXT = "PyTorch derives and reads nothing in words"
_ERROR = "PyTorch raises RuntimeError, of no class of its own"
_READS_SCHEMA = "PyTorch's kernels have typed arguments, and read no schema"

#: Names that mirror no PyTorch function, and why.
MIRRORS_NOTHING = {
    "autocast.plan.AutocastPlan": _CASTS,
    "autocast.plan.AutocastPlan.all_casts": _CASTS,
    "autocast.plan.Cast": _CASTS,
    "autocast.state.AutocastState.override": "PyTorch's policies cannot be overridden",
    "autocast.arguments.Candidate": _CASTS,
    "autocast.arguments.replace_tensors": _CASTS,
    "autocast.arguments.tensors_in": _CASTS,
    "autocast.arguments.written_tensors": _READS_SCHEMA,
    "derivation.derivation.Derivation": _TEXT,
    "derivation.derivation.Derivation.text": _TEXT,
    "derivation.derivation.derive": _TEXT,
    "derivation.nodes.Binary": _TEXT,
    "derivation.nodes.Constant": _TEXT,
    "derivation.nodes.FunctionCall": _TEXT,
    "derivation.nodes.Item": _TEXT,
    "derivation.nodes.Items": _TEXT,
    "derivation.nodes.NumberTerm": _TEXT,
    "derivation.nodes.TensorTerm": _TEXT,
    "derivation.nodes.Unary": _TEXT,
    "derivation.nodes.in_parentheses": _TEXT,
    "derivation.step_writer.Runner": _TEXT,
    "derivation.step_writer.Runner.run": _TEXT,
    "derivation.step_writer.Runner.takes_operators": _TEXT,
    "derivation.rule_step_writer.RuleStepWriter": _TEXT,
    "derivation.rule_step_writer.RuleStepWriter.operate": _TEXT,
    "derivation.rule_step_writer.RuleStepWriter.reciprocal_dtype": _TEXT,
    "derivation.step_writer.StepWriter": _TEXT,
    "derivation.step_writer.StepWriter.compute": _TEXT,
    "derivation.step_writer.StepWriter.operate": _TEXT,
    "derivation.step_writer.StepWriter.reciprocal_dtype": _TEXT,
    "derivation.step_writer.StepWriter.visit": _TEXT,
    "dtypes.Family": "PyTorch has a predicate for each family, see dtypes.family",
    "dtypes.Kind": "PyTorch asks predicates one after the other, where a number ranks dtypes here",
    "dtypes.named_dtype": "the names are Python's, and this package's",
    "dtypes.kind": "PyTorch asks predicates one after the other, where a number ranks dtypes here",
    "dtypes.typecode": "PyTorch's typecodes are constants of its table's source",
    "derivation.expression.ExpressionError": _TEXT,
    "derivation.expression.parse": _TEXT,
    "ops.infer.Inference": "PyTorch returns tensors",
    "ops.infer.NoRule": _TABLE,
    "ops.infer.functional_of": _READS_SCHEMA,
    "ops.infer.infer": _TABLE,
    "ops.infer.rule_name": _TABLE,
    "derivation.operators.Operator": "PyTorch binds each operator to its op in code that it generates",
    "promotion_rules.registry.promotion_rule": _RULES,
    "promotion_rules.remedy.remedy": "PyTorch's errors propose no cast",
    "promotion_rules.operands.Parts": _RULES,
    "promotion_rules.rule.PromotionRule": _RULES,
    "promotion_rules.rule.PromotionRule.common": _RULES,
    "promotion_rules.rule.PromotionRule.of_float": _RULES,
    "promotion_rules.rule.PromotionRule.of_number": _RULES,
    "promotion_rules.rule.PromotionRule.of_pair": _RULES,
    "promotion_rules.rule.PromotionRule.under": _RULES,
    "promotion_rules.operands.describe": _TEXT,
    "promotion_rules.operands.fits": _RULES,
    "promotion_rules.operands.number_type": _RULES,
    "promotion_rules.operands.parts_of": _RULES,
    "promotion_rules.operands.words_of_table": _TEXT,
    "promotion_rules.strict_rule.strict_rule": _RULES,
    "promotion_rules.text_table.read_table": "PyTorch's table is a C++ array",
    "promotion_rules.user.make_rule": _RULES,
    "promotion.table.PromotionError": _ERROR,
    "promotion.table.no_common_dtype": _ERROR,
    "ops.call.Argument.is_list": _READS_SCHEMA,
    "ops.call.Argument.is_tensor": _READS_SCHEMA,
    "ops.call.Call": _READS_SCHEMA,
    "ops.call.Call.operands": _READS_SCHEMA,
    "ops.call.Call.tensor": _READS_SCHEMA,
    "ops.call.Call.without_layout": "PyTorch dispatches on the layout",
    "ops.call.described": "PyTorch has tensors only",
    "ops.call.signature_of": _READS_SCHEMA,
    "ops.call.strides_of": "PyTorch has tensors only",
    "ops.rule_table.Entry": _TABLE,
    "ops.rule_table.Term": _TABLE,
    "ops.rule_table.rule_table": _TABLE,
    "elementwise.strides.ShapeError": _ERROR,
    "elementwise.tensor_iterator.ElementwiseResult": "PyTorch returns a tensor",
}

Definition = ast.FunctionDef | ast.ClassDef


def definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Every function, method, property and class outside of functions, by its qualified name."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        prefix, parent = waiting.pop(0)
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                assert not isinstance(node, ast.AsyncFunctionDef), node.name
                yield f"{prefix}{node.name}", node
                if isinstance(node, ast.ClassDef):
                    waiting.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.stmt | ast.ExceptHandler):
                waiting.append((prefix, node))


def is_public(name: str) -> bool:
    return not any(part.startswith("_") for part in name.split("."))


def sources(text: str) -> list[str]:
    """What follows each `Source: `, up to the next empty line or the end, on one line."""
    found = re.findall(r"Source: (.*?)(?:\n\s*\n|\Z)", text, re.DOTALL)
    return [" ".join(part.split()) for part in found]


def comments(text: str) -> Iterator[str]:
    """The comments that stand on lines of their own, those on adjacent lines as one."""
    for block in re.findall(r"(?:^ *#.*\n)+", text, re.MULTILINE):
        yield re.sub(r"^ *#:? ?", "", block, flags=re.MULTILINE)


def complaints(module: str, text: str, mirrors_nothing: Mapping[str, str]) -> list[str]:
    """Missing parts of a file's docstrings, and sources that are not written as a file and a function."""
    found = []
    tree = ast.parse(text)
    documented = [(module, ast.get_docstring(tree) or "")]
    for name, node in definitions(tree):
        docstring = ast.get_docstring(node) or ""
        documented.append((f"{module}.{name}", docstring))
        if not is_public(name):
            continue
        if ">>> " not in docstring:
            found.append(f"{module}.{name} shows no example")
        if not sources(docstring) and f"{module}.{name}" not in mirrors_nothing:
            found.append(f"{module}.{name} names no source")
    documented += [(f"a comment in {module}", comment) for comment in comments(text)]
    for where, words in documented:
        found += [f"{where}: {s!r} is no source" for s in sources(words) if not CITATIONS.fullmatch(s)]
    return found


def stale(mirrors_nothing: Mapping[str, str], files: Mapping[str, str]) -> list[str]:
    """Entries of the list that are of no public name, or of one that names a source after all."""
    lacking = {
        f"{module}.{name}"
        for module, text in files.items()
        for name, node in definitions(ast.parse(text))
        if is_public(name) and not sources(ast.get_docstring(node) or "")
    }
    return sorted(mirrors_nothing.keys() - lacking)


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_public_names_have_an_example_and_a_source(file: Path) -> None:
    assert complaints(module_of(file), file.read_text(encoding="utf-8"), MIRRORS_NOTHING) == []


def test_no_exception_is_stale() -> None:
    assert stale(MIRRORS_NOTHING, {module_of(file): file.read_text(encoding="utf-8") for file in FILES}) == []
    assert all(reason.strip() for reason in MIRRORS_NOTHING.values())


GOOD = '''
"""A module."""

#: Data. Source: c10/core/ScalarType.cpp, _promoteTypesLookup (v2.13).
TABLE = ""


def public(a):
    """Does it.

    Example:
        >>> public(1)
        1

    Source: aten/src/ATen/native/Pow.cpp, TORCH_META_FUNC2(pow, Scalar) (v2.13); c10/core/ScalarType.h, canCast
    (v2.13).
    """
    return a


class Public:
    """A value.

    Example:
        >>> Public()
        Public()

    Source: aten/src/ATen/TensorIterator.cpp, TensorIteratorBase::build (v2.13).
    """

    @property
    def shown(self):
        """Whether it is. Source: c10/core/TensorImpl.h, is_wrapped_number (v2.13).

        Example:
            >>> Public().shown
            True
        """
        return True

    def __len__(self):
        return 1


def _private():
    pass
'''


def test_a_good_file_has_no_complaints() -> None:
    assert complaints("good", GOOD, {}) == []


@pytest.mark.parametrize(
    ("good", "bad", "complaint"),
    [
        ("        >>> public(1)\n", "", "good.public shows no example"),
        ("            >>> Public().shown\n", "", "good.Public.shown shows no example"),
        ("        >>> Public()\n", "", "good.Public shows no example"),
        ("def _private", "def late", "good.late shows no example"),
        ("def _private", "def late", "good.late names no source"),
        ("def _private():", "if TABLE:\n  def late():", "good.late names no source"),
        (" Source: c10/core/TensorImpl.h, is_wrapped_number (v2.13).", "", "good.Public.shown names no source"),
        ("h, canCast\n    (v2.13)", "h, canCast", "is no source"),
        ("; c10", " and c10", "is no source"),
        ("c10/core/TensorImpl.h", "TensorImpl.h", "is no source"),
        ("is_wrapped_number (", "and its is_wrapped_number (", "is no source"),
        ("ScalarType.cpp, _promoteTypesLookup", "ScalarType.cpp", "a comment in good: "),
        ("(pow, Scalar)", "(pow", "is no source"),
    ],
)
def test_a_planted_gap_is_found(good: str, bad: str, complaint: str) -> None:
    assert good in GOOD
    found = complaints("good", GOOD.replace(good, bad, 1), {})
    assert any(complaint in words for words in found), found


def test_an_exception_is_for_the_source_alone() -> None:
    planted = GOOD.replace("def _private", "def late")
    assert complaints("good", planted, {"good.late": "a reason"}) == ["good.late shows no example"]


def test_a_stale_exception_is_found() -> None:
    planted = GOOD.replace("def _private", "def late")
    exceptions = {"good.late": "it lacks one", "good.public": "it has one", "good.gone": "there is no such name"}
    assert stale(exceptions, {"good": planted}) == ["good.gone", "good.public"]
