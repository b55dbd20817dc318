"""Trains a small transformer with Lightning's Trainer."""

import argparse

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class LanguageModel(lightning.LightningModule):
    def __init__(self, sharded=False):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 64)
        layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(64, 100)
        self.sharded = sharded
        self.losses = []

    def configure_model(self):
        if self.sharded:
            for block in self.encoder.layers:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))

    def training_step(self, batch, batch_idx):
        tokens, targets = batch
        loss = torch.nn.functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, targets = batch
        loss = torch.nn.functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        self.losses.append(loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    lightning.seed_everything(0)
    sharded = args.strategy == "fsdp2"
    model = LanguageModel(sharded)
    dataset = TensorDataset(torch.randint(0, 100, (1024, 16)), torch.randint(0, 100, (1024, 16)))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else args.strategy,
        precision="bf16-mixed",
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=None if sharded else 1.0,
        max_steps=args.steps,
        val_check_interval=args.accumulate * 10,
        limit_val_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model, DataLoader(dataset, batch_size=8, shuffle=True), DataLoader(dataset, batch_size=8, shuffle=False)
    )
    weights = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    torch.save({"losses": model.losses, "weights": weights}, f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
