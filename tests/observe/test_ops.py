"""What observers know of ops, compared with what the ops do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_promote as tp
from torch_promote.observe.ops import OVERWRITING, find_overload

#: They replace the storage, and write nothing.
NOT_WRITING = {"aten::set_", "aten::shallow_copy_data_"}


def value_for(argument: Any) -> Any:
    values = {"Tensor": torch.arange(6).view(2, 3) / 5, "number": 0.5, "float": 0.5, "int": 1, "bool": False}
    return argument.default_value if argument.has_default_value() else values[str(argument.type)]


def written_over(name: str) -> list[torch.Tensor] | None:
    """Returns what an in-place op makes of several contents; None if it does not run on simple arguments."""
    op, results = find_overload(name), []
    first, *others = op._schema.arguments
    try:
        for content in (float("nan"), 0.0, 0.25, 0.5, -3.0, 7.0):
            torch.manual_seed(0)
            tensor = torch.full((2, 3), content)
            op(tensor, **{one.name: value_for(one) for one in others})
            results.append(tensor)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    return results if str(first.type) == "Tensor" and all(one.shape == (2, 3) for one in results) else None


@pytest.mark.filterwarnings("ignore")
def test_ops_that_overwrite_are_those_for_which_the_old_content_does_not_matter() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    in_place = {name for name in names if (op := name.partition(".")[0]).endswith("_") and not op.startswith("aten::_")}
    ran = {name: results for name in in_place if (results := written_over(name)) is not None}
    assert len(ran) > 100
    overwrite = {
        name.partition(".")[0]
        for name, results in ran.items()
        if all(torch.equal(results[0], one) for one in results[1:])
    }
    assert overwrite - NOT_WRITING == {name for name in OVERWRITING if not name.startswith("aten::_")}


@pytest.mark.parametrize("name", sorted(OVERWRITING))
def test_a_tensor_that_is_overwritten_is_not_read(name: str) -> None:
    tensor = torch.full((2, 3), float("nan"))
    with tp.trace(values=True) as report, tp.find_nonfinite() as found:
        if "_foreach" in name:
            getattr(torch, name.removeprefix("aten::"))([tensor], *([[torch.ones(2, 3)]] if "copy" in name else []))
        else:
            arguments = {"copy_": [torch.ones(2, 3)], "fill_": [0.5], "geometric_": [0.5]}
            getattr(tensor, name.removeprefix("aten::"))(*arguments.get(name.removeprefix("aten::"), []))
        _ = tensor + 1
    assert not found.found
    (number,) = (number for number, call in enumerate(report.calls) if call.op == name)
    assert report.reads[number][0].written_by == ()
