"""Trains a small model with Lightning's Trainer."""

import argparse
import importlib

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--package", default="lightning")
parser.add_argument("--strategy", default="auto")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--manual", action="store_true", help="a GAN: several optimizer steps in one training step")
parser.add_argument("--distill", action="store_true", help="run the model without gradients before each step")
parser.add_argument("--steps", type=int, default=20)
args = parser.parse_args()
lightning = importlib.import_module(args.package)
sharded = args.strategy == "fsdp2"


class LanguageModel(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 64)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(64, 100)
        self.losses = []

    def configure_model(self):
        if sharded:
            for block in self.encoder.layers:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        with torch.no_grad():
            teacher = self(tokens.roll(1)) if args.distill else 0
        loss = cross_entropy((self(tokens) - 0.9 * teacher).flatten(0, 1), targets.flatten())
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, targets = batch
        self.losses.append(cross_entropy(self(tokens).flatten(0, 1), targets.flatten()))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class GAN(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        (real,) = batch
        for_generator, for_discriminator = self.optimizers()
        fake = self.generator(torch.randn(len(real), 16))
        self.step(for_generator, softplus(-self.discriminator(fake)).mean())
        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), 16))
        scores = self.discriminator(torch.cat([real.to(fake.dtype), fake]))
        self.step(for_discriminator, softplus(torch.cat([-scores[: len(real)], scores[len(real) :]])).mean())

    def step(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.detach())

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.discriminator)]


def main():
    lightning.seed_everything(0)
    model = GAN() if args.manual else LanguageModel()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else args.strategy,
        precision="bf16-mixed",
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=None if sharded or args.manual else 1.0,
        max_steps=args.steps,
        val_check_interval=None if args.manual else args.accumulate * 10,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if args.manual:
        trainer.fit(model, DataLoader(TensorDataset(torch.randn(160, 32)), batch_size=8, shuffle=True))
    else:
        dataset = TensorDataset(torch.randint(0, 100, (1024, 16)), torch.randint(0, 100, (1024, 16)))
        trainer.fit(model, DataLoader(dataset, batch_size=8, shuffle=True), DataLoader(dataset, batch_size=8))
    weights = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    torch.save({"losses": model.losses, "weights": weights}, f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
