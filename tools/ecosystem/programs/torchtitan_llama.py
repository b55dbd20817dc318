"""Trains torchtitan's Llama debug model with its FSDP2 mixed precision, or checks module policies on it."""

import argparse
import dataclasses
import gc
from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

parser = argparse.ArgumentParser()
parser.add_argument("--check_module_policy", action="store_true", help="run the last layer in float32")
args = parser.parse_args()


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


def train(model, region=nullcontext):
    """Trains a model in regions of one kind. Returns its losses and the dtypes of its last layer's results."""
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


def check_module_policy():
    import torch_promote as tp

    def with_policy(policies, region=nullcontext):
        model = make_model()
        tp.set_module_policy(model, policies)
        return train(model, region)

    def off():
        return tp.my_autocast("cpu", policy="off")

    last_layer = {"lm_head": {"linear": "fp32"}}
    plain, dtypes = with_policy({})
    assert dtypes == {(torch.bfloat16, torch.bfloat16)}
    assert torch.equal(with_policy({}, off)[0], plain), "a region with the policy `off` casts nothing"
    assert torch.equal(with_policy(last_layer)[0], plain), "without a region, the policy has no effect"
    changed, dtypes = with_policy(last_layer, off)
    assert not torch.equal(changed, plain), "in a region, it has"
    assert dtypes == {(torch.bfloat16, torch.float32)}


torch.distributed.init_process_group("gloo")
if args.check_module_policy:
    check_module_policy()
else:
    model = make_model()
    losses, _ = train(model)
    weights = {name: weight.to_local().detach() for name, weight in model.named_parameters()}
    torch.save({"losses": losses, "weights": weights}, f"rank{torch.distributed.get_rank()}.pt")
    del model
gc.collect()  # cycles of a model hold the process group, whose threads have to end before Python does
torch.distributed.barrier()
torch.distributed.destroy_process_group()
