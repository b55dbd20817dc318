"""Trains a small convolutional network with the Trainer of the package pytorch_lightning."""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, stride=2),
            torch.nn.BatchNorm2d(16),
            torch.nn.GELU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(256, 10),
        )
        self.losses = []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.network(images), labels)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


pl.seed_everything(0)
model = Classifier()
dataset = TensorDataset(torch.randn(160, 3, 32, 32), torch.randint(0, 10, (160,)))
trainer = pl.Trainer(accelerator="cpu", precision="bf16-mixed", max_steps=20, logger=False, enable_progress_bar=False)
trainer.fit(model, DataLoader(dataset, batch_size=8, shuffle=True))
torch.save({"losses": model.losses, "weights": model.state_dict()}, "results.pt")
