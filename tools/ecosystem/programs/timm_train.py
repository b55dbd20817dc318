"""Trains a model of timm with the parts that timm's train.py is made of, on generated PNG files.

The wheel and the sdist of timm contain these parts, but not train.py itself.
"""

import argparse
import logging
from functools import partial
from pathlib import Path

import numpy
import torch
from PIL import Image
from timm import utils
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.layers import set_fast_norm
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet10t")
parser.add_argument("--img-size", type=int, default=64)
parser.add_argument("--model-kwargs", nargs="*", default={}, action=utils.ParseKwargs)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--grad-accum-steps", type=int, default=1)
parser.add_argument("--grad-checkpointing", action="store_true")
parser.add_argument("--fast-norm", action="store_true")
parser.add_argument("--torchcompile", action="store_true")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

logging.basicConfig(level=logging.INFO)
utils.random_seed(42, 0)
device = torch.device("cpu")
amp_autocast = partial(torch.autocast, device_type=device.type, dtype=torch.bfloat16)

count = args.steps * args.batch_size * args.grad_accum_steps
for index in range(count):
    folder = Path("data", "train", f"class{index % 4}")
    folder.mkdir(parents=True, exist_ok=True)
    pixels = numpy.random.default_rng(index).integers(0, 256, (args.img_size, args.img_size, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(folder / f"{index}.png")

if args.fast_norm:
    set_fast_norm()
size = {"img_size": args.img_size} if "vit" in args.model else {}
model = create_model(args.model, num_classes=4, drop_path_rate=0.1, **size, **args.model_kwargs)
model.set_grad_checkpointing(args.grad_checkpointing)
data_config = resolve_data_config({"input_size": (3, args.img_size, args.img_size)}, model=model)
loader_train = create_loader(
    create_dataset("", root="data", split="train", is_training=True),
    input_size=data_config["input_size"],
    batch_size=args.batch_size,
    is_training=True,
    use_prefetcher=False,
    mean=data_config["mean"],
    std=data_config["std"],
    num_workers=0,
    device=device,
)
task = ClassificationTask(model, criterion_kwargs={"smoothing": 0.1}, device=device)
model_ema = utils.ModelEmaV3(model, decay=0.9)
if args.torchcompile:
    task.compile()
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
lr_scheduler, _ = create_scheduler_v2(
    optimizer, sched="cosine", num_epochs=1, step_on_epochs=False, updates_per_epoch=args.steps
)

losses = []
task.train()
optimizer.zero_grad()
for step, (images, targets) in enumerate(loader_train):
    need_update = (step + 1) % args.grad_accum_steps == 0
    with amp_autocast():
        loss = task(images.to(device), targets.to(device))["loss"] / args.grad_accum_steps
    loss.backward()
    if need_update:
        utils.dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        model_ema.update(model)
        lr_scheduler.step_update(num_updates=(step + 1) // args.grad_accum_steps)
    losses.append(loss.detach())

model.eval()
with torch.inference_mode(), amp_autocast():
    outputs = model(torch.linspace(-1, 1, 2 * 3 * args.img_size**2).view(2, 3, args.img_size, args.img_size))
torch.save({"losses": losses, "weights": model.state_dict(), "ema": model_ema.state_dict(), "outputs": outputs}, "r.pt")
