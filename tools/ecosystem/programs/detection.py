"""Trains a detector on random images, as the references of torchvision do (references/detection), on the CPU."""

import argparse
import math

import torch
import torchvision
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="fasterrcnn_mobilenet_v3_large_320_fpn")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--size", type=int, default=96)
args = parser.parse_args()


class Boxes(Dataset):
    """Images with one to three bright boxes."""

    def __len__(self):
        return args.steps * args.batch_size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.rand(3, args.size, args.size, generator=generator) * 0.3
        count = int(torch.randint(1, 4, (), generator=generator))
        corners = torch.randint(0, args.size - 40, (count, 2), generator=generator)
        sides = torch.randint(16, 40, (count, 2), generator=generator)
        masks = torch.zeros(count, args.size, args.size, dtype=torch.uint8)
        for mask, (x, y), (width, height) in zip(masks, corners, sides):
            image[:, y : y + height, x : x + width] += 0.6
            mask[y : y + height, x : x + width] = 1
        boxes = torch.cat([corners, corners + sides], 1).float()
        return image, {"boxes": boxes, "labels": torch.ones(count, dtype=torch.int64), "masks": masks}


def train_one_epoch(model, optimizer, data_loader, scaler=None):
    losses_of_steps = []
    model.train()
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=len(data_loader) - 1)
    for images, targets in data_loader:
        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            loss_dict = model(images, targets)
            losses = sum(loss for loss in loss_dict.values())
        assert math.isfinite(losses.item()), loss_dict
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        lr_scheduler.step()
        losses_of_steps.append({name: loss.detach() for name, loss in loss_dict.items()})
    return losses_of_steps


@torch.inference_mode()
def evaluate(model, data_loader):
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return [model(images) for images, _ in data_loader][:2]


torch.manual_seed(0)
size = {"min_size": args.size, "max_size": args.size} if "rcnn" in args.model else {}
model = torchvision.models.get_model(args.model, weights=None, weights_backbone=None, num_classes=2, **size)
parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.SGD(parameters, lr=0.005, momentum=0.9, weight_decay=1e-4)
loader = DataLoader(Boxes(), batch_size=args.batch_size, collate_fn=lambda batch: tuple(zip(*batch)))
losses = train_one_epoch(model, optimizer, loader)
outputs = evaluate(model, DataLoader(Boxes(), batch_size=2, collate_fn=lambda batch: tuple(zip(*batch))))
torch.save({"losses": losses, "weights": model.state_dict(), "outputs": outputs}, "results.pt")
