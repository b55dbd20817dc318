"""The training step of diffusers' example train_unconditional.py, on random images."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DConditionModel, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", default="bf16")
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--use_ema", action="store_true")
parser.add_argument("--conditional", action="store_true")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()

set_seed(0)
accelerator = Accelerator(
    gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision, cpu=True
)
shape = {"sample_size": 16, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "block_out_channels": (32, 64)}
if args.conditional:
    model = UNet2DConditionModel(
        **shape,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
    )
    model.enable_gradient_checkpointing()
else:
    model = UNet2DModel(
        **shape,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
ema_model = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True) if args.use_ema else None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
count = args.steps * args.gradient_accumulation_steps
images = torch.rand(4 * count * accelerator.num_processes, 3, 16, 16) * 2 - 1
dataloader = torch.utils.data.DataLoader(images, batch_size=4, shuffle=True)
lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=5, num_training_steps=args.steps)
model, optimizer, dataloader, lr_scheduler = accelerator.prepare(model, optimizer, dataloader, lr_scheduler)

losses = []
model.train()
for clean_images in dataloader:
    noise = torch.randn(clean_images.shape)
    timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(clean_images),)).long()
    noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
    states = (torch.randn(len(clean_images), 7, 32),) if args.conditional else ()

    with accelerator.accumulate(model):
        model_output = model(noisy_images, timesteps, *states).sample
        loss = torch.nn.functional.mse_loss(model_output.float(), noise.float())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients and ema_model is not None:
        ema_model.step(model.parameters())
    losses.append(loss.detach())

results = {"losses": losses, "weights": accelerator.get_state_dict(model)}
unet = accelerator.unwrap_model(model)
if ema_model is not None:
    ema_model.copy_to(unet.parameters())
if not args.conditional:
    pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    results["images"] = torch.from_numpy(
        pipeline(generator=generator, batch_size=2, num_inference_steps=4, output_type="np").images
    )
torch.save(results, f"rank{accelerator.process_index}.pt")
