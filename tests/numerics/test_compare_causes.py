"""`compare` names the call that loses positions, masks or statistics, although no gradient reaches its result."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_promote as tp
from torch_promote.numerics.comparison import Comparison

F = nn.functional
BF16, FP16 = torch.bfloat16, torch.float16


class Body(nn.Module):
    """Residual layers of width 32, without an error that stands out."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 32), nn.Linear(32, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h)  # type: ignore[no-any-return]


class Rotary(nn.Module):
    """As Hugging Face's Llama computes it, but for the region that is switched off there."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000 ** (-torch.arange(0, width, 2) / width))

    @torch.no_grad()
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        inv_freq = self.inv_freq[None, :, None].expand(len(positions), -1, 1)
        angles = (inv_freq @ positions[:, None].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Llama(Body):
    """One attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary(32)
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        table = self.rotary(h, 3000 + torch.arange(x.shape[1]).repeat(len(x), 1))
        q, k = (4 * turned(one(h), *table) for one in (self.q, self.k))
        return super().forward(h + F.scaled_dot_product_attention(q, k, h.to(q.dtype)))


class Timesteps(Body):
    """Sinusoids of a diffusion model. `angles` gets the timesteps, the frequencies and a hidden state."""

    def __init__(self, angles: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.angles = angles

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        frequencies = torch.exp(-math.log(10000) * torch.arange(16) / 16)
        angles = self.angles(torch.tensor([999, 997, 501, 503, 250, 251, 777, 333]), frequencies, h)
        return super().forward(h + torch.cat([angles.cos(), angles.sin()], -1)[:, None])


class Alibi(Body):
    """A bias of distance as a matrix product."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        slopes, positions = torch.full((1, 1), 0.5), torch.arange(x.shape[1]) + 2049.0
        scores = (h @ h.mT).float() + slopes @ positions[None]
        return super().forward((scores.softmax(-1) @ h).to(h.dtype))


class Positions(Body):
    """Learned embeddings of positions, through which no gradient flows. `positions` gets the hidden state."""

    def __init__(self, positions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(4096, 32), positions

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        return super().forward(h + self.embed(self.positions(h).long().clamp(0, 4095)))


def buckets(h: Tensor) -> Tensor:
    pairs = torch.stack([torch.arange(h.shape[1]) + 700.0, torch.full((h.shape[1],), 700.0)], -1)
    return (pairs @ torch.tensor([[1.0], [-1.0]]))[:, 0]


class Masked(Body):
    """A mean over the positions up to a length."""

    def __init__(self, lengths: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.lengths = lengths

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        mask = torch.arange(x.shape[1])[None] < self.lengths(torch.arange(len(x)) * 50 + 301, h)[:, None]
        return super().forward((h * mask[..., None]).float().sum(1) / 300)


class Whitened(Body):
    """Data in 0 to 255, whitened with a variance that is a difference of products."""

    def forward(self, x: Tensor) -> Tensor:
        data, mean_of = 200 + 3 * x, torch.full((8, 8), 1 / 8)
        mean = data @ mean_of
        variance = (data * data) @ mean_of - mean * mean
        return super().forward(self.inp((data - mean) / (variance.abs() + 1e-2).sqrt()))


class Weighted(Body):
    """A loss with weights of classes, the smallest of which float16 cannot hold."""

    def forward(self, x: Tensor) -> Tensor:
        counts = (torch.ones(1, 3) @ torch.diag(torch.tensor([1e-6, 1e-8, 2e-8])))[0]
        logits = super().forward(self.inp(x))[..., :3].flatten(0, 1)
        return F.cross_entropy(logits.float(), torch.arange(len(logits)) % 3, weight=counts / counts.sum() + 1e-4)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], torch.dtype, int, tuple[str, str]]] = {
    "rotary": (Llama, BF16, 24, ("aten::matmul", "rotary")),
    "timesteps, product": (
        lambda: Timesteps(lambda t, freqs, h: t[:, None].float() @ freqs[None]),
        BF16,
        4,
        ("aten::matmul", ""),
    ),
    "timesteps, conversion": (
        lambda: Timesteps(lambda t, freqs, h: t.to(h.dtype)[:, None] * freqs),
        BF16,
        4,
        ("aten::to", ""),
    ),
    "frequencies, mm": (
        lambda: Timesteps(lambda t, freqs, h: torch.mm(t[:, None].float(), freqs[None])),
        BF16,
        4,
        ("aten::mm", ""),
    ),
    "alibi": (Alibi, BF16, 48, ("aten::matmul", "")),
    "buckets": (lambda: Positions(buckets), BF16, 48, ("aten::matmul", "")),
    "cumsum": (
        lambda: Positions(lambda h: torch.ones(h.shape[1], dtype=h.dtype).cumsum(0)),
        BF16,
        600,
        ("aten::cumsum", ""),
    ),
    "arange": (
        lambda: Positions(lambda h: torch.arange(h.shape[1], dtype=h.dtype)),
        FP16,
        4000,
        ("aten::arange", ""),
    ),
    "lengths": (lambda: Masked(lambda lengths, h: lengths.to(h.dtype)), BF16, 500, ("aten::to", "")),
    "whitening": (Whitened, BF16, 4, ("aten::matmul", "")),
    "class weights": (Weighted, FP16, 4, ("aten::matmul", "")),
}


def program(name: str, in_region: bool = True) -> tuple[nn.Module, Callable[[], Any], Tensor]:
    make, dtype, length, _ = PROGRAMS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(8 if length < 100 else 2, length, 8)
    if name == "lengths":
        x = x.cumsum(1)

    def step() -> Any:
        with torch.autocast("cpu", dtype, enabled=in_region):
            return model(x)

    return model, step, x


def headline(comparison: Comparison) -> list[str]:
    """The site that the first fact names, if it names one."""
    label, text, *_ = comparison.content().facts[0]
    return [text] if label.startswith(("largest", "unknown")) else []


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_cause_is_named_first(name: str) -> None:
    model, step, x = program(name)
    before = x.clone()
    comparison = tp.compare(step, model=model)
    first = comparison.sites[0]
    assert (first.op, first.module) == PROGRAMS[name][3]
    assert headline(comparison) == [str(first)]
    assert comparison.runs > 3
    assert comparison.notes == []
    assert torch.equal(x, before)


@pytest.mark.parametrize("run", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["rotary", "cumsum"])
def test_it_is_also_named_in_an_evaluation(name: str, run: Any) -> None:
    model, step, _ = program(name)
    first = tp.compare(run()(step), model=model).sites[0]
    assert (first.op, first.module) == PROGRAMS[name][3]


@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_programs_have_no_cause(name: str) -> None:
    model, step, _ = program(name, in_region=False)
    comparison = tp.compare(step, model=model)
    assert headline(comparison) == []
    assert comparison.runs == 3


def test_what_the_program_passes_is_restored() -> None:
    """A conversion that does nothing in the reference returns its argument, to which the error is added."""
    layer, data = nn.Linear(8, 8), torch.linspace(1.0, 2.0, 8).expand(4, 8).clone()
    before = data.clone()

    def step() -> Tensor:
        with torch.autocast("cpu", BF16):
            hidden = layer(torch.ones(4, 8))
            return hidden.float() + data.to(hidden.dtype).float()

    [site] = [site for site in tp.compare(step, model=layer).sites if site.op == "aten::to"]
    assert site.impact == pytest.approx(float((data.bfloat16().float() - data).norm()), rel=1e-3)
    assert torch.equal(data, before)


def test_what_the_program_converts_itself_is_not_compared() -> None:
    """The cumulative sum of 300 ones is as wrong in the reference, so a zero is no finding."""
    layer = nn.Linear(1, 1)

    def step() -> torch.Tensor:
        with tp.my_autocast("cpu", torch.bfloat16):
            return layer(torch.ones(300).bfloat16().cumsum(0)[:, None].float()).float().mean()

    [note] = tp.compare(step, model=layer).notes
    assert note.startswith("The program itself converts to a lower dtype")
    assert "aten::cumsum in (model), " in note
    assert "aten::to" not in note, "the conversion of ones loses nothing"


class Boxes(nn.Module):
    """Adds offsets to anchors of up to 1,200, some of which bfloat16 does not tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Linear(16, 4)

    def forward(self, x: Tensor, anchors: Tensor) -> Tensor:
        low = anchors.to(BF16)
        return low + self.delta(x)  # type: ignore[no-any-return]


def test_what_conversions_of_the_program_lose_in_the_reference() -> None:
    torch.manual_seed(0)
    model, anchors, x = Boxes(), 1200 * torch.rand(64, 4), torch.randn(64, 16)

    def step() -> Tensor:
        with torch.autocast("cpu", BF16):
            return (model(x, anchors) - anchors).float().square().mean()

    comparison, line = tp.compare(step, model=model), Boxes.forward.__code__.co_firstlineno + 1
    assert comparison.runs == 4
    rounds, converts = comparison.notes
    lost = float((anchors.bfloat16().float() - anchors).norm() / anchors.norm())
    assert f"test_compare_causes.py:{line} (local error {lost:.2g})" in converts
    found = re.fullmatch(r"The reference rounds as well: compared with .* error is (\S+), that of loss\.", rounds)
    reference, exact = comparison.metrics[0].reference, float(model.delta(x).detach().square().mean())
    assert found
    assert reference
    assert float(found[1]) == pytest.approx(abs(reference - exact) / exact, rel=0.05)
    assert rounds in comparison.content().verdict
    for tolerance in (0.5, 1e-3):
        assert rounds in tp.tune(step, model=model, tolerance=tolerance).content().verdict


def test_conversions_without_which_the_program_fails() -> None:
    """A weight in bfloat16 takes no float32."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=BF16))

    def step() -> Tensor:
        with torch.autocast("cpu", BF16):
            hidden = model[0](torch.linspace(0, 1, 8)[None])
        return F.linear(hidden.to(BF16), model[1].weight).float().mean()

    assert [note[:11] for note in tp.compare(step, model=model).notes] == ["The program"]


def test_conversions_of_one_module_are_told_apart_by_line() -> None:
    model, data = nn.Linear(8, 8), torch.linspace(1.0, 2.0, 8).expand(4, 8).clone()

    def step() -> Tensor:
        with torch.autocast("cpu", BF16):
            hidden = model(torch.ones(4, 8))
            exact = torch.ones(4, 8).to(hidden.dtype)
            small = (data / 1000).to(hidden.dtype)
            large = data.to(hidden.dtype)
            return exact.float() + small.float() + large.float() + hidden.float()

    comparison, first = tp.compare(step, model=model), step.__code__.co_firstlineno
    found = {int(site.line.rpartition(":")[2]) - first: site for site in comparison.sites if site.op == "aten::to"}
    assert list(found) == [5, 4], "the largest impact first; without the exact one"
    assert found[5].impact == pytest.approx(1000 * (found[4].impact or 0.0), rel=1e-2)
    text, change = next(one[1:] for one in comparison.content().facts if one[0] == "largest impact")
    assert (text, change.count("change the conversion in the code")) == (str(found[5]), 1)
    assert text == f"to.dtype in (model), test_compare_causes.py:{first + 5}"
    assert comparison.notes == []


@pytest.mark.parametrize("has_loss", [True, False])
def test_a_gradient_that_is_not_finite_in_the_reference(has_loss: bool) -> None:
    """The derivative of the root is infinite at a distance of 0; the impacts are measured by runs."""
    torch.manual_seed(0)
    model, data = nn.Linear(16, 16), torch.randn(32, 16)

    def step() -> Tensor:
        with torch.autocast("cpu", BF16):
            hidden = model(data)
            distances = (hidden[:, None] - hidden).square().sum(-1)
            roots = distances.sqrt()
        return roots.mean() if has_loss else roots

    comparison, first = tp.compare(step, model=model), step.__code__.co_firstlineno
    assert all(site.impact is None or math.isfinite(site.impact) for site in comparison.sites)
    [note] = comparison.notes
    assert note.startswith("The gradient of the reference is infinite or NaN, first that of the result of aten::sum.")
    assert f"test_compare_causes.py:{first + 3}: 32 of 1,024 elements." in note
    told, measured = map(int, re.findall(r"impact of (\d+) sites with errors\. .* measured (\d+) of these", note)[0])
    before = ("aten::linear", "aten::sub", "aten::square", "aten::sum")  # of the root itself, the gradient is finite
    assert told == measured == len([site for site in comparison.sites if site.local and site.op in before])
    assert headline(comparison) == [str(comparison.sites[0])]
    assert comparison.sites[0].impact
    assert "nan" not in str(comparison)


def test_a_reference_that_is_not_finite_has_no_impacts() -> None:
    model = nn.Linear(4, 4)

    def step() -> Tensor:
        with torch.autocast("cpu", BF16):
            return model(torch.ones(2, 4)).float().sum() * math.inf

    comparison = tp.compare(step, model=model)
    assert (comparison.runs, [site.impact for site in comparison.sites if site.local]) == (3, [None])


def test_a_result_whose_elements_share_memory() -> None:
    """A conversion keeps the strides of `expand`; the error of the one element is that of all."""
    model, position = nn.Linear(8, 8), torch.tensor(750.25)

    def step() -> Tensor:
        with torch.autocast("cpu", BF16):
            h = model(torch.ones(16, 8))
            return h * (position.expand(16).to(h.dtype) / 1000)[:, None]

    comparison = tp.compare(step, model=model)
    (site,) = (site for site in comparison.sites if site.op == "aten::to")
    assert site.impact is not None
    assert 0 < site.impact < math.inf
    assert position.item() == 750.25


def test_indices_that_are_chosen_otherwise() -> None:
    scores = torch.tensor([1.0, 1.0 + 2**-12, 0.5])  # equal in bfloat16, of which the first is chosen
    model = nn.Linear(1, 1)

    def step(chooses: bool = True) -> Tensor:
        with torch.autocast("cpu", BF16):
            near = scores.to(model(torch.ones(1, 1)).dtype) if chooses else scores
            return torch.arange(3.0)[near.argmax()] + model(torch.ones(1, 1)).sum()

    comparison = tp.compare(step, model=model)
    text = "Chosen otherwise than in the reference: aten::argmax in (model), 1 of 1 indices."
    assert text in " ".join(str(comparison).split())
    assert "Chosen otherwise" not in str(tp.compare(lambda: step(False), model=model))
