"""Trains a small GAN with Lightning's manual optimization: several optimizer steps in one training step."""

import lightning
import torch
from torch.utils.data import DataLoader


class GAN(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        self.discriminator = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.losses = []

    def training_step(self, real, batch_idx):
        for_generator, for_discriminator = self.optimizers()
        fake = self.generator(torch.randn(len(real), 16))
        loss = torch.nn.functional.softplus(-self.discriminator(fake)).mean()
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.losses.append(loss.detach())

        with torch.no_grad():
            fake = self.generator(torch.randn(len(real), 16))
        scores = self.discriminator(torch.cat([real.to(fake.dtype), fake]))
        loss = torch.nn.functional.softplus(torch.cat([-scores[: len(real)], scores[len(real) :]])).mean()
        for_discriminator.zero_grad()
        self.manual_backward(loss)
        for_discriminator.step()
        self.losses.append(loss.detach())

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.discriminator)]


lightning.seed_everything(0)
model = GAN()
trainer = lightning.Trainer(
    accelerator="cpu", precision="bf16-mixed", max_steps=40, logger=False, enable_progress_bar=False
)
trainer.fit(model, DataLoader(torch.randn(160, 32), batch_size=8, shuffle=True))
torch.save({"losses": model.losses, "weights": model.state_dict()}, "results.pt")
