"""A program that reads samples that fail, and samples that are slow.

Run it with ``python examples/bad_samples.py``. The training loop gets the sample's own error, with
the index of the sample and the worker's traceback. The loop can then continue with the next batch.
"""

import time

import torch
from torch.utils.data import Dataset

from dpex import DpexDataLoader


class Reciprocals(Dataset[torch.Tensor]):
    """Reciprocals of ``index - 5``; index 5 raises a ``ZeroDivisionError``."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(1 / (index - 5))


class Slow(Dataset[torch.Tensor]):
    """Samples for which the worker waits one second each."""

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
