"""A program that feeds a GPU in three steps: disk to pageable memory, to pinned memory, to the GPU.

Run it with ``python examples/pinned_memory.py``. The workers read and decode picture files. With
``pin_memory=True``, the training process copies each batch once, directly into page-locked memory.
With ``non_blocking=True``, the training loop does not wait for the copy from there to the GPU.
Without a GPU, the last two steps do nothing.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torchvision import datasets, transforms

from dpex import DpexDataLoader


def write_pictures(folder: Path, count: int) -> None:
    """Write ``count`` pictures of two classes, in the layout that ``ImageFolder`` reads."""
    for number in range(count):
        kind = ("dark", "light")[number % 2]
        (folder / kind).mkdir(exist_ok=True)
        noise = torch.randint(0, 128, (96, 96, 3), dtype=torch.uint8) + 127 * (number % 2)
        Image.fromarray(noise.numpy()).save(folder / kind / f"{number:05}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Disk, pageable memory, pinned memory, GPU.")
    parser.add_argument("--pictures", type=int, default=1_000)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if use_gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder), options.pictures)
        transform = transforms.Compose([transforms.RandomCrop(64), transforms.ToTensor()])
        loader = DpexDataLoader(
            datasets.ImageFolder(folder, transform),
            batch_size=50,
            shuffle=True,
            num_workers=2,
            persistent_workers=True,
            pin_memory=use_gpu,
            distribute_mode=True,
        )
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for epoch in range(options.epochs):
            began, waited = time.monotonic(), 0.0
            asked = began
            pinned = True
            for images, labels in loader:
                waited += time.monotonic() - asked
                pinned &= images.is_pinned()
                logits = model(images.to(device, non_blocking=True))
                loss = nn.functional.cross_entropy(logits, labels.to(device, non_blocking=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                asked = time.monotonic()
            print(
                f"epoch {epoch}: {time.monotonic() - began:.2f} s, {waited:.2f} s of them waiting; "
                f"batches pinned: {'yes' if pinned else 'no'}"
            )


if __name__ == "__main__":
    main()
