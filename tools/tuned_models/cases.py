"""Small models of transformers and timm, from configs, with their data: no download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from real_data import SYMBOLS, digits, masked, text
from torch import nn
from torch.nn import functional as F  # noqa: N812 (as everybody writes it)

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model and its training data."""

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[int, int], list[Batch]]
    logits: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    learning_rate: float = 1e-3


def declare_ops_of_torchvision() -> None:
    """Makes timm and transformers importable where torchvision is a build for CUDA, and torch one for the CPU.

    Both import torchvision, which refuses to load if its library of ops does not.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        _LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
        for op in ("nms", "qnms"):
            _LIBRARIES[-1].define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except ModuleNotFoundError:
        pass


_LIBRARIES: list[torch.library.Library] = []  # an op lives as long as its library


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy over all positions with a label."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def _llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=len(SYMBOLS) + 1,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    return transformers.BertForMaskedLM(config)


def _convnext() -> nn.Module:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(
        in_chans=1, num_classes=10, depths=(1, 1, 2, 1), dims=(16, 32, 64, 96), patch_size=2, use_grn=True,
        ls_init_value=None, drop_path_rate=0.1,
    )  # fmt: skip


def _next_symbols(number: int, seed: int) -> list[Batch]:
    return [(ids[:, :-1], ids[:, 1:]) for ids in text(number, seed, length=65)]


MODELS = [
    Case("HF Llama", _llama, _next_symbols, lambda model, ids: model(input_ids=ids).logits),
    Case(
        "HF BERT",
        _bert,
        lambda number, seed: masked(text(number, seed), len(SYMBOLS), seed),
        lambda model, ids: model(input_ids=ids).logits,
    ),
    Case("timm ConvNeXt V2", _convnext, digits, lambda model, images: model(images)),
]
