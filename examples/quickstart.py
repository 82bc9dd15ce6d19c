"""A small training loop whose batches Ray tasks make.

Run it with ``python examples/quickstart.py``.
"""

import torch
from torch.utils.data import TensorDataset

from dpex import DpexDataLoader  # instead of: from torch.utils.data import DataLoader

images, labels = torch.rand(2_000, 3, 32, 32), torch.randint(0, 10, (2_000,))
loader = DpexDataLoader(
    TensorDataset(images, labels), batch_size=100, shuffle=True, num_workers=2, distribute_mode=True
)

for epoch in range(3):
    for step, (image, label) in enumerate(loader):
        if step % 10 == 0:
            print(f"epoch {epoch}, step {step}: {tuple(image.shape)}, labels {label[:5].tolist()}")
