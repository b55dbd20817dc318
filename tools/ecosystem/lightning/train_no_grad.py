"""Runs the model without gradients before each training step, as in Lightning's issue 20644."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Distilled(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
        self.losses = []

    def training_step(self, batch, batch_idx):
        (inputs,) = batch
        with torch.no_grad():
            targets = self.network(inputs + 0.1)
        loss = (self.network(inputs) - 0.9 * targets).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
model = Distilled()
trainer = lightning.Trainer(
    accelerator="cpu", precision="bf16-mixed", max_steps=20, logger=False, enable_progress_bar=False
)
trainer.fit(model, DataLoader(TensorDataset(torch.randn(160, 32)), batch_size=8, shuffle=True))
torch.save({"losses": model.losses, "weights": model.state_dict()}, "results.pt")
