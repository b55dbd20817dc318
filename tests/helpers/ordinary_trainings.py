"""Ten small trainings of the kinds that people run, each with its own losses, optimizers and habits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)

import torch_promote as tp

#: A model, and a function that makes a step of its training.
Training = tuple[nn.Module, Callable[[], Any]]


class Block(nn.Module):
    """A block of a transformer, causal or not."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder of characters, with small initial weights and a tied head."""

    def __init__(self, symbols: int = 17, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.blocks = nn.ModuleList(Block(width, causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)
        for one in self.parameters():
            if one.dim() > 1:
                nn.init.normal_(one, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_with_warm_up() -> Training:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))

    def step() -> None:
        start = torch.randint(17, (8, 1))
        text = (start + 3 * torch.arange(17)) % 17
        with tp.my_autocast("cpu"):
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return model, step


def conv_net_with_batch_norm() -> Training:
    def layer(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())

    model = nn.Sequential(layer(3, 8), layer(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        labels = torch.randint(4, (16,))
        images = torch.randn(16, 3, 16, 16) + labels.view(-1, 1, 1, 1)
        optimizer.zero_grad(set_to_none=False)
        with tp.my_autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, step


def gan() -> Training:
    model = nn.ModuleDict(
        {
            "generator": nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)),
            "critic": nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
        }
    )
    generator, critic = model["generator"], model["critic"]
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def step() -> None:
        angle = 2 * math.pi * torch.rand(32, 1)
        real, fake = 3 * torch.cat([angle.cos(), angle.sin()], 1), generator(torch.randn(32, 4))
        of_critic.zero_grad()
        (F.relu(1 - critic(real)) + F.relu(1 + critic(fake.detach()))).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake)).mean().backward()
        of_generator.step()

    return model, step


def rnn() -> Training:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(11, 16), nn.LSTM(16, 32, 2), nn.Linear(32, 11)

        def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
            x, state = self.lstm(self.embed(x), state)
            return self.head(x), state

    model = Tagger()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    state: Any = None

    def step() -> None:
        nonlocal state
        text = (torch.randint(11, (1, 8)) + 2 * torch.arange(13).view(-1, 1)) % 11
        logits, state = model(text[:-1], state)
        state = tuple(one.detach() for one in state)  # truncated back-propagation through time
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), text[1:].flatten()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()

    return model, step


class ViT(nn.Module):
    """A vision transformer, whose head starts at 0."""

    def __init__(self, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(Block(width, causal=False), Block(width, causal=False))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit() -> Training:
    model = ViT()
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1, "name": "decayed"}, {"params": others, "weight_decay": 0.0}]
    groups[1]["name"] = "others"
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=5000)

    def step() -> None:
        labels = torch.randint(4, (8,))
        images = torch.randn(8, 3, 16, 16) * (1 + labels.view(-1, 1, 1, 1))
        for half in (slice(0, 4), slice(4, 8)):  # accumulated gradients
            with tp.my_autocast("cpu"):
                loss = F.cross_entropy(model(images[half]), labels[half]) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    return model, step


def diffusion() -> Training:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 32))
            self.enter, self.middle, self.leave = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 8)
            nn.init.zeros_(self.leave.weight)
            nn.init.zeros_(self.leave.bias)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            x = self.enter(x) + self.time(t)
            return self.leave(F.silu(self.middle(F.silu(x))))

    model = Denoiser()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def step() -> None:
        clean, noise, t = torch.sin(torch.arange(8) * torch.rand(32, 1)), torch.randn(32, 8), torch.rand(32, 1)
        noisy = torch.cos(t * math.pi / 2) * clean + torch.sin(t * math.pi / 2) * noise
        optimizer.zero_grad()
        F.mse_loss(model(noisy, t), noise).backward()
        optimizer.step()
        average.update_parameters(model)

    return model, step


def mixture_of_experts() -> Training:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.router, self.leave = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 8)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.enter(x)
            shares = self.router(x).softmax(-1)
            weights, chosen = shares.topk(2)
            result = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                token, place = (chosen == number).nonzero(as_tuple=True)
                if len(token):
                    result = result.index_add(0, token, weights[token, place, None] * expert(x[token]))
            balance = 4 * (shares.mean(0) * F.one_hot(chosen[:, 0], 4).float().mean(0)).sum()
            return self.leave(x + result), balance

    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step() -> None:
        x = torch.randn(16, 8)
        result, balance = model(x)
        loss = F.mse_loss(result, torch.where(x[:, :1] > 0, x.flip(-1), -x)) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, step


class LoRA(nn.Module):
    """A frozen layer with a trained update of low rank, which starts at 0."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * self.up(self.down(x))


def lora() -> Training:
    model = GPT().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = LoRA(block.qkv), LoRA(block.out)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)

    def step() -> None:
        text = (torch.randint(17, (8, 1)) + torch.randint(1, 4, (8, 1)) * torch.arange(17)) % 17
        with tp.my_autocast("cpu"):
            loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return model, step


def contrastive() -> Training:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
            self.text = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
            self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
            return self.temperature.exp() * a @ b.t()

    model = Towers()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    views = torch.randn(8, 16), torch.randn(8, 12)

    def step() -> None:
        what = torch.randn(16, 8)
        logits, labels = model(what @ views[0], what @ views[1]), torch.arange(16)
        optimizer.zero_grad()
        ((F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2).backward()
        optimizer.step()
        with torch.no_grad():
            model.temperature.clamp_(max=math.log(100))

    return model, step


def policy_gradient() -> Training:
    """Keeps a ball on a slope: episodes, returns and the value function's results grow as it learns."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
            self.policy, self.value = nn.Linear(32, 2), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.body(x)
            return self.policy(x), self.value(x).squeeze(-1)

    model = Agent()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step() -> None:
        place, speed = torch.zeros(4), 0.1 * torch.randn(4)
        log_probabilities, values, alive = [], [], []
        running = torch.ones(4)
        for _ in range(16):
            logits, value = model(torch.stack([place, speed], 1))
            chosen = torch.distributions.Categorical(logits=logits)
            action = chosen.sample()
            log_probabilities.append(chosen.log_prob(action))
            values.append(value)
            alive.append(running)
            speed = speed + 0.5 * place + 0.5 * (action.float() - 0.5)
            place = (place + 0.2 * speed).clamp(-2, 2)
            running = running * (place.abs() < 1)
            if not running.any():
                break
        returns, total = [], torch.zeros(4)
        for one in reversed(alive):
            total = one + 0.97 * total
            returns.insert(0, total)
        mask, target, value = torch.stack(alive), torch.stack(returns), torch.stack(values)
        advantage = (target - value.detach()) * mask
        loss = -(torch.stack(log_probabilities) * advantage).sum() / mask.sum()
        loss = loss + 0.5 * (mask * (value - target) ** 2).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return model, step


TRAININGS: tuple[Callable[[], Training], ...] = (
    *(gpt_with_warm_up, conv_net_with_batch_norm, gan, rnn, vit, diffusion, mixture_of_experts, lora, contrastive),
    policy_gradient,
)
