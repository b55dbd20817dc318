"""Trains a small Llama of torchtune as its recipes do: the model and its inputs in one dtype, without autocast."""

import argparse

import torch
from torchtune import training
from torchtune.models.llama3 import llama3
from torchtune.modules.loss import CEWithChunkedOutputLoss

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bf16")
parser.add_argument("--autocast", action="store_true")
args = parser.parse_args()

training.set_seed(0)
device = torch.device("cpu")
dtype = training.get_dtype(args.dtype, device=device)
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
loss_of = CEWithChunkedOutputLoss(num_output_chunks=4)
model.set_num_output_chunks(loss_of.num_output_chunks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

losses = []
for _ in range(20):
    tokens = torch.randint(0, 100, (4, 17))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.autocast):
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
torch.save({"losses": losses, "weights": model.state_dict()}, "result.pt")
