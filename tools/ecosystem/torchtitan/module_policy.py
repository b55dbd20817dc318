"""Runs the last layer of torchtitan's sharded Llama debug model in float32. Ends with an error if a check fails."""

import dataclasses
import gc
from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

import torch_promote as tp


def make_model():
    config = model_registry("debugmodel").model
    config = dataclasses.replace(config, layers=config.layers[:2])
    for layer in config.layers:  # its own default, flex_attention, has no backward on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    return model


def train(region, policies):
    """Trains a model in regions of one kind. Returns its losses and the dtypes of its last layer's results."""
    model = make_model()
    tp.set_module_policy(model, policies)
    dtypes = set()
    model.lm_head.register_forward_hook(lambda module, args, output: dtypes.add((args[0].dtype, output.dtype)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4)
    losses = []
    for _ in range(20):
        tokens = torch.randint(0, 2048, (2, 17))
        with region():
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), dtypes


def region():
    return tp.my_autocast("cpu", policy="off")


torch.distributed.init_process_group("gloo")
last_layer = {"lm_head": {"linear": "fp32"}}
plain, dtypes = train(nullcontext, {})
assert dtypes == {(torch.bfloat16, torch.bfloat16)}
assert torch.equal(train(region, {})[0], plain), "a region with the policy `off` casts nothing"
assert torch.equal(train(nullcontext, last_layer)[0], plain), "without a region, the policy has no effect"
changed, dtypes = train(region, last_layer)
assert not torch.equal(changed, plain), "in a region, it has"
assert dtypes == {(torch.bfloat16, torch.float32)}
print(f"last loss in bfloat16: {plain[-1]:.6f}; with the last layer in float32: {changed[-1]:.6f}")
gc.collect()  # cycles of a model hold the process group, whose threads have to end before Python does
torch.distributed.barrier()
torch.distributed.destroy_process_group()
