"""Trains torchtitan's Llama debug model with its FSDP2 mixed precision."""

import dataclasses
import gc

import torch
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
config = model_registry("debugmodel").model
config = dataclasses.replace(config, layers=config.layers[:2])
for layer in config.layers:  # its own default, flex_attention, has no backward on the CPU
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
torch.manual_seed(0)
model = config.build()
model.init_states(buffer_device=torch.device("cpu"))
mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
apply_fsdp_to_decoder(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)

torch.manual_seed(rank)
losses = []
for _ in range(20):
    tokens = torch.randint(0, 2048, (2, 17))
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())

weights = {name: weight.to_local().detach() for name, weight in model.named_parameters()}
torch.save({"losses": losses, "weights": weights}, f"rank{rank}.pt")
gc.collect()  # cycles of a model hold the process group, whose threads have to end before Python does
torch.distributed.barrier()
torch.distributed.destroy_process_group()
