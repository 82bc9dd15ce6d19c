"""Samples that fail, and samples that take their time.

Run it with ``python examples/bad_samples.py``. The error of a sample arrives in the training loop
as what it is, with the index of the sample and the worker's traceback; the loader can go on.
"""

import time

import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader


class Reciprocals(Dataset[torch.Tensor]):
    """1 / (index - 5), which one index has not."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(1 / (index - 5))


class Slow(Dataset[torch.Tensor]):
    """Samples of a second each, in which the worker waits."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(1)
        return torch.tensor(index)


def main() -> None:
    batches = iter(DpexDataLoader(Reciprocals(), batch_size=2, num_workers=2, distribute_mode=True))
    while True:
        try:
            batch = next(batches)
        except ZeroDivisionError as error:
            print("caught:", str(error).splitlines()[0])
        except StopIteration:
            break
        else:
            print([round(value, 3) for value in batch.tolist()])

    began = time.monotonic()
    for batch in DpexDataLoader(Slow(), batch_size=2, num_workers=8, distribute_mode=True):
        print(f"{time.monotonic() - began:4.1f} s: {batch.tolist()}")


if __name__ == "__main__":
    main()
