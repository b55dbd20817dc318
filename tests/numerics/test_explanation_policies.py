"""`TraceReport.explain`: which policies held, why there was none, and which get no advice."""

from __future__ import annotations

import re

import torch
from torch import nn

import torch_promote as tp
from helpers.made_up_traces import made_up_call, report_of
from torch_promote.policy.op_table import CastPolicy

X = torch.ones(2, 4)


def test_no_policy() -> None:
    with tp.trace() as report:
        X.exp()
        with tp.my_autocast("cpu"):
            X.sin()
            X.cos()
        X.cos()
    assert "No call had a cast policy: autocast was off." in report.explain("exp").paragraph
    assert "No call had a cast policy: autocast has none for it." in report.explain("sin").paragraph
    assert "autocast was off for 1 of 2, and has none for it where it was on." in report.explain("cos").paragraph
    assert report.explain("exp").paragraph.endswith("Autocast cast no argument.")


def test_why_there_is_no_policy_where_not_all_calls_are_kept() -> None:
    with tp.trace(max_calls=1) as report:
        X.exp()
        with tp.my_autocast("cpu"):
            X.exp()
    assert "No call had a cast policy: autocast has none for it, where it was on." in report.explain("exp").paragraph


def test_calls_of_an_op_with_a_policy_and_without() -> None:
    with tp.trace() as report:
        with tp.my_autocast("cpu"):
            X.mm(X.t())
        X.mm(X.t())
    text = report.explain("mm").paragraph
    assert "1 call had no policy: autocast was off, as in most backward passes and inside an op that it casts." in text


def test_many_policies_are_counted() -> None:
    sources = ["register_policy", *(f"region at /code/train.py:{number}" for number in range(4))]
    report = report_of(*(made_up_call(policy=CastPolicy.fp32, said_by=source) for source in sources))
    assert "2 other policies held for other calls; see the table." in report.explain("op=add").paragraph


def test_ops_that_promote_get_no_advice() -> None:
    with tp.trace() as report, tp.my_autocast("cpu"):
        torch.cat([X, X.bfloat16()])
    assert "had the policy promote" in report.explain("cat").paragraph
    assert report.explain("cat").advice == ()


def test_ops_of_a_library_that_is_not_imported_get_no_advice() -> None:
    call = made_up_call("not_imported::op", "", policy=CastPolicy.lower_precision_fp, said_by="register_policy")
    assert report_of(call).explain("not_imported::op").advice == ()


def test_it_says_how_often_autocast_was_off() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tp.set_module_policy(net, {"1": "fp32"})
    with tp.trace(net) as found, tp.my_autocast("cpu"):
        net(X)
    text = found.explain("1").paragraph.replace("\n", " ")
    assert re.search(r"No call had a cast policy: autocast was off for \d+ of \d+, and has none for these ops", text)
