"""Runs the last layer of a bfloat16 Llama of torchtune in float32. Ends with an error if a check fails."""

from contextlib import nullcontext

import torch
from torchtune import training
from torchtune.models.llama3 import llama3

import torch_promote as tp

DEVICE = torch.device("cpu")
INPUTS = []


def make_model(policies):
    training.set_seed(0)
    with training.set_default_dtype(torch.bfloat16), DEVICE:
        model = llama3(
            vocab_size=100,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            embed_dim=64,
            max_seq_len=32,
            intermediate_dim=128,
        )
    training.set_activation_checkpointing(model, auto_wrap_policy={type(model.layers[0])})
    model.output.register_forward_pre_hook(lambda module, args: INPUTS.append(args[0].detach()))
    tp.set_module_policy(model, policies)
    return model


def train(region, policies=None):
    """Trains a model in regions of one kind. Returns its losses and the model."""
    model = make_model(policies or {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        tokens = torch.randint(0, 100, (4, 17))
        with region():
            logits = model(tokens[:, :-1])
            if region is not nullcontext and policies:
                weight = model.output.weight.detach().float()
                assert torch.equal(logits, torch.nn.functional.linear(INPUTS[-1].float(), weight))
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert all(weight.dtype is torch.bfloat16 for weight in model.parameters())
    return torch.stack(losses)


def region():
    return tp.my_autocast("cpu", policy="off")


last_layer = {"output": {"linear": "fp32"}}
plain = train(nullcontext)
assert torch.equal(train(region), plain), "a region with the policy `off` casts nothing"
assert torch.equal(train(nullcontext, last_layer), plain), "without a region, the policy has no effect"
changed = train(region, last_layer)
assert not torch.equal(changed, plain), "in a region, it has"
print(f"last loss in bfloat16: {plain[-1]:.6f}; with the last layer in float32: {changed[-1]:.6f}")
