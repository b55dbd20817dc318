"""Runs a callback of docs/monitor.md, for the programs of this folder that train with it."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[3] / "docs" / "monitor.md"


def check(framework, train, tags):
    """Trains with the framework's recipe and without it: equal weights, looks at 5, 10, 15 and 20, these tags."""
    start = rf"import torch_promote as tp\nfrom {framework}"
    (recipe,) = re.findall(rf"^```python\n({start}.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names, found = {"__name__": "recipe"}, {}
    exec(recipe, names)
    callback = names["Monitor"](to=found.__setitem__, every=5)
    monitored, plain = train(callback), train()
    assert all(torch.equal(one, plain[name]) for name, one in monitored.items())
    assert [*found] == [5, 10, 15, 20]
    assert callback.monitor.steps == 20
    assert callback.monitor.alarms == []
    assert tags <= {*found[5]}
