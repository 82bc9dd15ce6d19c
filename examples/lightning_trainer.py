"""A program that trains with Lightning, on one device or on several.

Run it with ``python examples/lightning_trainer.py``; ``--devices 2`` trains with DDP. Lightning's
``Trainer`` takes dpex's loaders like torch's.
"""

import argparse
from typing import Any

import lightning
import torch
from digits import Digits, Net
from torch import nn

from dpex import DpexDataLoader


class Reader(lightning.LightningModule):
    """A model that learns to read digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, _: int) -> None:
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Lightning.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()

    lightning.seed_everything(0)
    train_loader, test_loader = (
        DpexDataLoader(
            Digits(train),
            batch_size=100,
            shuffle=train,
            num_workers=2,
            persistent_workers=True,
            distribute_mode=True,
        )
        for train in (True, False)
    )
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        devices=options.devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Reader(), train_loader, test_loader)
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.2%}")


if __name__ == "__main__":
    main()
