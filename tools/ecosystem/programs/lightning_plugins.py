"""Compares the plugin of docs/frameworks.md with Lightning's own. Ends with an error if a check fails."""

import copy
import pickle
import re
from pathlib import Path

import lightning
import pytorch_lightning
import torch
from lightning.fabric.plugins import MixedPrecision as StockFabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision as StockMixedPrecision
from torch.utils.data import DataLoader, TensorDataset

STEPS = 20
PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
(RECIPE,) = re.findall(r"^```python\n(import lightning\n.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def plugin_for(package):
    """Returns the class, after running the code as printed, but on the CPU, and with the changes for a package."""
    code = RECIPE.replace('"cuda"', '"cpu"').replace("lightning.pytorch", package)
    if package == "lightning.fabric":
        code = code.replace("lightning.Trainer", "lightning.Fabric")
    if package == "pytorch_lightning":
        code = code.replace("import lightning\n", "import pytorch_lightning as lightning\n")
    names = {"__name__": __name__}
    exec(code, names)
    return names["MixedPrecision"]


MixedPrecision = plugin_for("lightning.pytorch")
PACKAGES = ((lightning, MixedPrecision), (pytorch_lightning, plugin_for("pytorch_lightning")))
FabricMixedPrecision = plugin_for("lightning.fabric")


def make_module(base, forwards=1, without_grad=False):
    """A module whose step runs the network several times, first without gradients if asked for."""

    class Module(base):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Softplus(), torch.nn.Linear(64, 32))
            self.losses = []
            self.cast_bytes = []

        def training_step(self, batch, batch_idx):
            (x,) = batch
            casts = {}
            shapes = {parameter.shape for parameter in self.parameters()}

            def pack(tensor):
                if tensor.dtype in (torch.bfloat16, torch.float16) and {tensor.shape, tensor.mT.shape} & shapes:
                    storage = tensor.untyped_storage()
                    casts[storage.data_ptr()] = storage
                return tensor

            y = x
            if without_grad:
                with torch.no_grad():
                    y = y + self.network(x)
            y.requires_grad_()  # so that backward needs every weight
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                for _ in range(forwards):
                    y = self.network(y).tanh()
            self.cast_bytes.append(sum(storage.nbytes() for storage in casts.values()))
            loss = y.float().square().mean()
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module


def fit(package=lightning, steps=STEPS, checkpoint=None, forwards=1, without_grad=False, **options):
    """Trains, and returns the module and the Trainer."""
    torch.manual_seed(0)
    module = make_module(package.LightningModule, forwards, without_grad)()
    data = TensorDataset(torch.randn(STEPS * 8, 32))
    trainer = package.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=checkpoint)
    return module, trainer


def bits(module):
    return [*module.losses, *module.state_dict().values()]


def same(one, other):
    one, other = bits(one), bits(other)
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def check_bits():
    for package, plugin in PACKAGES:
        stock, _ = fit(package, precision="bf16-mixed")
        ours, _ = fit(package, plugins=plugin("bf16-mixed", "cpu"))
        assert same(ours, stock), package
    off, _ = fit(plugins=MixedPrecision("bf16-mixed", "cpu", policy="off"))
    full, _ = fit(precision="32-true")
    assert same(off, full)
    assert not same(off, stock)
    override, _ = fit(plugins=MixedPrecision("bf16-mixed", "cpu", overrides={"linear": "fp32"}))
    assert not same(override, stock)
    for cache in ("weights", "persistent", "all", "none"):
        cached, _ = fit(plugins=MixedPrecision("bf16-mixed", "cpu", cache=cache))
        assert same(cached, stock), cache
    clipped = [
        fit(gradient_clip_val=0.1, accumulate_grad_batches=2, steps=5, **options)[0]
        for options in ({"precision": "bf16-mixed"}, {"plugins": MixedPrecision("bf16-mixed", "cpu")})
    ]
    assert same(*clipped)


def check_no_grad_before_the_step():
    """Lightning's issue 20644, PyTorch's issue 112583."""
    stock, _ = fit(without_grad=True, precision="bf16-mixed")
    ours, _ = fit(without_grad=True, plugins=MixedPrecision("bf16-mixed", "cpu"))
    assert same(ours, stock)
    torch.manual_seed(0)
    before = make_module(lightning.LightningModule)().state_dict()
    after = ours.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before), "every weight is trained"


def check_memory():
    """Lightning's issue 21611: a model that runs several times in one step."""
    for forwards in (1, 8):
        stock, _ = fit(forwards=forwards, steps=2, precision="bf16-mixed")
        ours, _ = fit(forwards=forwards, steps=2, plugins=MixedPrecision("bf16-mixed", "cpu"))
        assert torch.equal(stock.losses[0], ours.losses[0])
        of_weights = sum(2 * layer.weight.numel() for layer in ours.network if hasattr(layer, "weight"))
        assert (stock.cast_bytes[0], ours.cast_bytes[0]) == (forwards * of_weights, of_weights)


def check_scaler_and_checkpoints():
    made = {}
    for name, plugin in (("stock", StockMixedPrecision), ("ours", MixedPrecision)):
        module, trainer = fit(steps=10, plugins=plugin("16-mixed", "cpu"))
        trainer.save_checkpoint(f"{name}.ckpt")
        made[name] = module
        checkpoint = torch.load(f"{name}.ckpt", weights_only=False)
        assert checkpoint["MixedPrecision"]["scale"] > 0, sorted(checkpoint)
    assert same(made["ours"], made["stock"])
    resumed = [
        fit(checkpoint=f"{name}.ckpt", plugins=plugin("16-mixed", "cpu"))[0]
        for name, plugin in (("stock", StockMixedPrecision), ("stock", MixedPrecision), ("ours", StockMixedPrecision))
    ]
    assert same(resumed[1], resumed[0])
    assert same(resumed[2], resumed[0])


def check_fabric():
    def train(**options):
        torch.manual_seed(0)
        fabric = lightning.Fabric(accelerator="cpu", **options)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Softplus(), torch.nn.Linear(64, 32))
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        losses = []
        for _ in range(STEPS):
            loss = model(torch.randn(8, 32)).square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return torch.cat([torch.stack(losses), *(parameter.detach().flatten() for parameter in model.parameters())])

    for precision in ("bf16-mixed", "16-mixed"):
        stock = train(plugins=StockFabricMixedPrecision(precision, "cpu"))
        assert torch.equal(train(plugins=FabricMixedPrecision(precision, "cpu")), stock), precision
        override = FabricMixedPrecision(precision, "cpu", overrides={"linear": "fp32"})
        assert not torch.equal(train(plugins=override), stock), precision


def check_copies():
    plugin = MixedPrecision("bf16-mixed", "cpu", overrides={"linear": "fp32"}, cache="persistent")
    for twin in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        with twin.forward_context():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
            assert torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(f"{name}: passed", flush=True)
