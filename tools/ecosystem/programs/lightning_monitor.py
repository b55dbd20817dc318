"""Trains with the callback of docs/monitor.md. Ends with an error if a check fails."""

import lightning
import torch
from monitor_recipe import check
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def train(*callbacks):
    lightning.seed_everything(0)
    module, loader = Module(), DataLoader(TensorDataset(torch.randn(64, 8)), 4)
    trainer = lightning.Trainer(
        max_steps=20, accelerator="cpu", precision="bf16-mixed", accumulate_grad_batches=2, callbacks=[*callbacks]
    )
    trainer.fit(module, loader, loader)
    return module.state_dict()


check("lightning", train, {"net.0/amax", "net.0.weight/update", "net.2/casts"})
