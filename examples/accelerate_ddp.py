"""A program that trains with Accelerate, and with ``prepare`` of dpex.

Run it with ``torchrun --nproc-per-node=2 examples/accelerate_ddp.py``, or ``accelerate launch``.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import Digits, Net
from torch import nn

from dpex import DpexDataLoader
from dpex.integrations.accelerate import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits with Accelerate.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train_loader, test_loader = (
        DpexDataLoader(
            Digits(train), batch_size=50, shuffle=train, num_workers=1, distribute_mode=True
        )
        for train in (True, False)
    )
    # instead of: accelerator.prepare(model, optimizer, train_loader, test_loader)
    model, optimizer, train_loader, test_loader = prepare(
        accelerator, model, optimizer, train_loader, test_loader
    )
    for epoch in range(options.epochs):
        model.train()
        steps = 0
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            steps += 1
        print(f"rank {accelerator.process_index}, epoch {epoch}: {steps} steps")
    model.eval()
    right: list[bool] = []
    for images, labels in test_loader:
        with torch.no_grad():
            found = model(images).argmax(1) == labels
        right += accelerator.gather_for_metrics(found).tolist()
    accelerator.print(f"accuracy {sum(right) / len(right):.2%} of {len(right)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
