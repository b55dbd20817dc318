"""Trains a small Llama of torchtune as its recipes do: the model in one dtype. Or checks module policies on it."""

import argparse
from contextlib import nullcontext

import torch
from torchtune import training
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bf16")
parser.add_argument("--autocast", action="store_true")
parser.add_argument("--check_module_policy", action="store_true", help="run the last layer in float32")
args = parser.parse_args()
device = torch.device("cpu")
dtype = training.get_dtype(args.dtype, device=device)


def make_model():
    training.set_seed(0)
    with training.set_default_dtype(dtype), device:
        model = llama3(
            vocab_size=100,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            embed_dim=64,
            max_seq_len=32,
            intermediate_dim=128,
        )
    training.validate_expected_param_dtype(model.named_parameters(), dtype=dtype)
    training.set_activation_checkpointing(model, auto_wrap_policy={type(model.layers[0])})
    return model


def train(model, region):
    """Trains a model in regions of one kind, and returns its losses."""
    loss_of = CEWithChunkedOutputLoss(num_output_chunks=4)
    model.set_num_output_chunks(loss_of.num_output_chunks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        tokens = torch.randint(0, 100, (4, 17))
        with region():
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert all(weight.dtype is dtype for weight in model.parameters())
    return torch.stack(losses)


def check_module_policy():
    import torch_promote as tp

    def with_policy(policies, region=nullcontext):
        dtypes = set()
        model = make_model()
        model.output.register_forward_hook(lambda module, args, output: dtypes.add((args[0].dtype, output.dtype)))
        tp.set_module_policy(model, policies)
        return train(model, region), dtypes

    def off():
        return tp.my_autocast("cpu", policy="off")

    last_layer = {"output": {"linear": "fp32"}}
    plain, dtypes = with_policy({})
    assert dtypes == {(torch.bfloat16, torch.bfloat16)}
    assert torch.equal(with_policy({}, off)[0], plain), "a region with the policy `off` casts nothing"
    assert torch.equal(with_policy(last_layer)[0], plain), "without a region, the policy has no effect"
    changed, dtypes = with_policy(last_layer, off)
    assert not torch.equal(changed, plain), "in a region, it has"
    assert dtypes == {(torch.bfloat16, torch.float32)}


if args.check_module_policy:
    check_module_policy()
else:
    model = make_model()
    losses = train(model, lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.autocast))
    torch.save({"losses": losses, "weights": model.state_dict()}, "result.pt")
