"""A program that trains with the ``Trainer`` of transformers; dpex makes its batches.

Run it with ``python examples/hf_trainer.py``. ``DpexTrainingArguments`` has the options of the
loaders.
"""

import argparse
import tempfile
from typing import Any

import torch
from digits import Digits, Net
from torch import nn
from transformers import Trainer, set_seed

from dpex.integrations.transformers import DpexTrainerMixin, DpexTrainingArguments


class Classifier(nn.Module):
    """``Net`` with the signature and the outputs that the ``Trainer`` expects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss and the logits."""
        logits = self.net(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class DpexTrainer(DpexTrainerMixin, Trainer):
    """A ``Trainer`` whose batches dpex makes."""


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    images, labels = torch.utils.data.default_collate(samples)
    return {"images": images, "labels": labels}


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with transformers' Trainer.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    set_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        trainer = DpexTrainer(
            model=Classifier(),
            args=DpexTrainingArguments(
                output_dir=directory,
                num_train_epochs=options.epochs,
                per_device_train_batch_size=100,
                per_device_eval_batch_size=100,
                learning_rate=0.01,
                dataloader_num_workers=2,
                dataloader_head_address="auto",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            data_collator=collate,
            train_dataset=Digits(),
            eval_dataset=Digits(train=False),
            compute_metrics=accuracy,
        )
        trainer.train()
        print(f"accuracy {trainer.evaluate()['eval_accuracy']:.2%}")


if __name__ == "__main__":
    main()
