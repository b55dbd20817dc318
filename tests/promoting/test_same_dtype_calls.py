"""Under "strict" no call on tensors of one dtype raises: PyTorch's whole op database."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import torch_promote as tp
from torch_promote.errors import PromotionRuleError

#: What PyTorch has written in Python, of ops that promote; docs/promotion_regions.md says so.
WRITTEN_IN_PYTHON = {
    "__rdiv__": "the reciprocal of integers times integers",
    "nn.functional.local_response_norm": "integers times a float",
    "nn.functional.normalize": "complex numbers by their norm",
    "nn.functional.softsign": "complex numbers by their modulus",
    "nn.functional.tanhshrink": "integers less their tanh",
    "masked.logsumexp": "complex numbers less a maximum of their real parts",
    "masked.mean": "a sum by a count",
    "masked.normalize": "complex numbers by their norm",
    "masked.std": "a sum by a count",
    "masked.var": "a sum by a count",
}


def refused(entry: Any, dtype: torch.dtype, region: Any) -> tuple[int, set[str]]:
    """The number of calls, and the rule's errors for refused calls."""
    calls, messages = 0, set()
    # Not through entry.sample_inputs, which walks the stack for each sample to name the test that it is for.
    for sample in itertools.islice(entry.sample_inputs_func(entry, "cpu", dtype, False), 4):
        tensors = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
        if len({tensor.dtype for tensor in tensors}) > 1:
            continue

        def call(sample: Any = sample) -> None:
            given = sample.input.clone() if isinstance(sample.input, torch.Tensor) else sample.input
            entry(given, *sample.args, **sample.kwargs)

        try:
            call()
        except Exception:
            continue
        calls += 1
        try:
            with region:
                call()
        except PromotionRuleError as error:
            messages.add(str(error))
    return calls, messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64], ids=str)
def test_the_op_database(dtype: torch.dtype) -> None:
    region, calls, wrong = tp.promotion("strict", matmul=True), 0, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in op_db:
            if dtype in entry.dtypes and entry.name not in WRITTEN_IN_PYTHON:
                count, messages = refused(entry, dtype, region)
                calls += count
                if messages:
                    wrong[entry.name, entry.variant_test_name] = messages
    assert wrong == {}
    assert calls > 300
