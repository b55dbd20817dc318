"""Trains with the callback of docs/monitor.md. Ends with an error if a check fails."""

import re
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

PAGE = Path(__file__).parents[3] / "docs" / "monitor.md"
(RECIPE,) = re.findall(
    r"^```python\n(import torch_promote as tp\nfrom lightning.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
)
names = {"__name__": __name__}
exec(RECIPE, names)
found = {}


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


callback = names["Monitor"](to=found.__setitem__, every=5)
monitored, plain = train(callback), train()
assert all(torch.equal(one, plain[name]) for name, one in monitored.items())
assert [*found] == [5, 10, 15, 20]
assert callback.monitor.steps == 20
assert callback.monitor.alarms == []
assert {"net.0/amax", "net.0.weight/update", "net.2/casts"} <= {*found[5]}
