"""The tables for modules of TORCH_PROMOTE_POLICY: the program names no model, so the models that run follow them."""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_promote
from helpers.subprocesses import plain_environment, run_python

#: A model whose call prints in which dtype its blocks and its head have run, and programs with it.
MODEL = """
import copy, torch, torch_promote
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.mlp(self.attn(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(4, 4)
    def forward(self, x):
        outs = []
        for block in self.blocks:
            outs.append(x := block(x))
        outs.append(torch.ones(2, 4) @ torch.ones(4, 4))
        outs.append(self.head(x))
        print(type(self).__name__, *(str(one.dtype)[6:] for one in outs))
        return outs[-1]

class Wrapper(nn.Module):
    def __init__(self, *models):
        super().__init__()
        self.inner, self.head = nn.ModuleList(models), nn.Linear(4, 4)
    def forward(self, x):
        return self.head(sum(one(x) for one in self.inner))
    def training_step(self, x):
        return self.inner[0](x)

class Other(Net):
    pass

X = torch.ones(2, 4)
def in_region(function, *args):
    with torch.autocast("cpu"):
        return function(X)
"""
ONE_BLOCK = '[modules."blocks.1"]\nlinear = "fp32"\n'
BLOCKS_AND_HEAD = '[modules."blocks.*.mlp"]\nlinear = "float16"\n[modules.head]\npolicy = "fp32"\n'

LOW, HALF, SINGLE = "bfloat16", "float16", "float32"
#: A program, the tables, what the model prints.
APPLIED = {
    "the outermost module": ("in_region(Net())", ONE_BLOCK, [f"Net {LOW} {SINGLE} {LOW} {LOW}"]),
    "patterns": ("in_region(Net())", BLOCKS_AND_HEAD, [f"Net {HALF} {HALF} {LOW} {SINGLE}"]),
    "a model in a wrapper with a head": (
        "in_region(Wrapper(Net()))",
        BLOCKS_AND_HEAD,
        [f"Net {HALF} {HALF} {LOW} {SINGLE}"],
    ),
    "a method of a wrapper": (
        "in_region(Wrapper(Net()).training_step)",
        BLOCKS_AND_HEAD,
        [f"Net {HALF} {HALF} {LOW} {SINGLE}"],
    ),
    "the outermost module itself, at its first call": (
        "net = Net(); in_region(net); in_region(net)",
        '[modules.""]\nmatmul = "fp32"\nlinear = "fp32"\n',
        [f"Net {SINGLE} {SINGLE} {SINGLE} {SINGLE}"] * 2,
    ),
    "a copy, such as a moving average": (
        "net = Net(); in_region(net); in_region(copy.deepcopy(net))",
        ONE_BLOCK,
        [f"Net {LOW} {SINGLE} {LOW} {LOW}"] * 2,
    ),
    "modules of a class": (
        "in_region(Wrapper(Net()))",
        '[modules."class:Block"]\nlinear = "fp32"\n',
        [f"Net {SINGLE} {SINGLE} {LOW} {LOW}"],
    ),
    "a loss beside the model": (
        "in_region(lambda x: nn.MSELoss()(Net()(x), x))",
        ONE_BLOCK,
        [f"Net {LOW} {SINGLE} {LOW} {LOW}"],
    ),
    "a region inside of the model": (
        "net = Net(); Wrapper.forward = lambda self, x: in_region(self.inner[0]); Wrapper(net)(X)",
        ONE_BLOCK,
        [f"Net {LOW} {SINGLE} {LOW} {LOW}"],
    ),
    "outside of regions": (
        "net = Net(); net(X); in_region(net)",
        ONE_BLOCK,
        [f"Net {SINGLE} {SINGLE} {SINGLE} {SINGLE}", f"Net {LOW} {SINGLE} {LOW} {LOW}"],
    ),
    "another policy in the program": (
        "with torch_promote.my_autocast('cpu', policy='stock'): Net()(X)",
        ONE_BLOCK,
        [f"Net {LOW} {LOW} {LOW} {LOW}"],
    ),
}
#: A program that does not say whose the tables are, and the end of the error.
AMBIGUOUS = {
    "two models, one after the other": (
        "in_region(Net()); in_region(Other())",
        "the program runs two models that have them: Net and Other. Say which one is meant by its class: "
        "--model Other, or TORCH_PROMOTE_MODEL=Other.",
    ),
    "two models in a wrapper": (
        "in_region(Wrapper(Net(), Net()))",
        "the program runs two models that have them: Net ('inner.0') and Net ('inner.1'). In the program, say which "
        "one is meant: policy.apply_to(model).",
    ),
}


@pytest.fixture
def ran(tmp_path: Path) -> object:
    def run(program: str, tables: str, model: str = "") -> tuple[int, list[str], str]:
        file = tmp_path / "mine.toml"
        file.write_text(f"format = 2\n{tables}")
        asked = {"AUTOCAST": "1", "POLICY": str(file)} | ({"MODEL": model} if model else {})
        env = {**plain_environment(), **{f"TORCH_PROMOTE_{name}": value for name, value in asked.items()}}
        done = run_python(f"{MODEL}{program}", env=env, cwd=tmp_path)
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


@pytest.mark.parametrize("name", APPLIED)
def test_tables_apply_to(ran: object, name: str) -> None:
    program, tables, expected = APPLIED[name]
    assert ran(program, tables) == (0, expected, "")  # type: ignore[operator]


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_model_is_an_error(ran: object, name: str) -> None:
    program, expected = AMBIGUOUS[name]
    status, _, err = ran(program, ONE_BLOCK)  # type: ignore[operator]
    assert status == 1
    assert err.count("the policy has tables") == 1
    assert err.count(f'File "{Path(torch_promote.__file__).parent}') == 1  # the frame that raises
    assert err.strip().endswith(f"the policy has tables for modules ('blocks.1'), and {expected}")


def test_an_ambiguous_model_that_a_program_catches_is_said(ran: object) -> None:
    """Each call raises, and so runs nothing without the policy; the end of the program says it."""
    program = """in_region(Net())
other = Other()
for _ in range(2):
    try:
        in_region(other)
    except Exception as error:
        print(type(error).__name__)
"""
    status, out, err = ran(program, ONE_BLOCK)  # type: ignore[operator]
    assert (status, out[1:]) == (0, ["PolicyError"] * 2)
    assert err.startswith("torch_promote: the policy has tables for modules ('blocks.1'), and the program runs two")


def test_the_class_says_which_model(ran: object) -> None:
    expected = [f"Net {LOW} {LOW} {LOW} {LOW}", f"Other {LOW} {SINGLE} {LOW} {LOW}"]
    assert ran("in_region(Net()); in_region(Other())", ONE_BLOCK, "Other") == (0, expected, "")  # type: ignore[operator]
    both = [f"Net {LOW} {SINGLE} {LOW} {LOW}"] * 2
    assert ran("in_region(Wrapper(Net(), Net()))", ONE_BLOCK, "Net") == (0, both, "")  # type: ignore[operator]
    assert ran("in_region(Net())", ONE_BLOCK, "Lit")[2] == (  # type: ignore[operator]
        "torch_promote: the tables for modules ('blocks.1') had no effect. No module of the class Lit ran under the "
        "policy. Outermost modules that ran: Net.\n"
    )


def test_a_model_without_the_modules_is_a_warning(ran: object) -> None:
    status, out, err = ran("in_region(Net())", '[modules."block.1"]\nlinear = "fp32"\n')  # type: ignore[operator]
    assert (status, out) == (0, [f"Net {LOW} {LOW} {LOW} {LOW}"])
    expected = (
        "UnusedOverrideWarning: the policy's tables for modules ('block.1') are not applied to Net, which does not "
        "have 'block.1'. Closest: blocks.1"
    )
    assert expected in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("net = torch.compile(plain(), backend='eager'); print(in_region(net).dtype)", (["torch.float32"], "")),
        ("net = plain(); net.compile(backend='eager'); print(in_region(net).dtype)", (["torch.float32"], "")),
        (
            "net = plain(); print(in_region(torch.compile(lambda x: net(x), backend='eager')).dtype)",
            (
                ["torch.bfloat16"],
                "torch_promote: the tables for modules ('0') had no effect. Models are not found inside of compiled "
                "functions: compile the model itself.\n",
            ),
        ),
    ],
    ids=["compile", "Module.compile", "in a compiled function"],
)
def test_compiled(ran: object, program: str, expected: tuple[list[str], str]) -> None:
    plain = "plain = lambda: nn.Sequential(nn.Linear(4, 4))\n"
    status, out, err = ran(plain + program, '[modules."0"]\nlinear = "fp32"\n')  # type: ignore[operator]
    assert (status, (out, err)) == (0, expected)
