"""The pictures of the demo: FashionMNIST, or the digits of scikit-learn."""

import os
import shutil
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, Subset
from torchvision import datasets

SIDE = 28
SCAN_SIDE = 1_200
PROBE_S = 5
DOWNLOAD_S = 90

# Makes the training or the test set, with a transform that maps a PIL image.
MakeSet = Callable[[bool, Callable[[Any], Any] | None], Dataset[Any]]


class Digits(Dataset[tuple[Any, int]]):
    """scikit-learn's 8x8 digits as 28x28 pictures; each read applies the transform.

    Args:
        train: Whether to use the first four fifths of the pictures, or the rest.
        transform: Maps a PIL image; None leaves it as it is.
    """

    def __init__(self, train: bool, transform: Callable[[Any], Any] | None = None) -> None:
        digits = load_digits()
        cut = len(digits.images) * 4 // 5
        part = slice(0, cut) if train else slice(cut, None)
        self.pictures = (digits.images[part] * 15).astype("uint8")
        self.labels = digits.target[part]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture = Image.fromarray(self.pictures[index]).resize((SIDE, SIDE))
        return self.transform(picture) if self.transform else picture, int(self.labels[index])


class Scans(Dataset[tuple[Any, int]]):
    """Pictures as JPEG files of 1200x1200 pixels, which each read decodes and scales to 28x28.

    Args:
        pictures: Samples of a PIL image and a label.
        folder: Existing folder for the files.
        transform: Maps a PIL image.
    """

    def __init__(
        self, pictures: Dataset[Any], folder: Path, transform: Callable[[Any], Any]
    ) -> None:
        self.transform = transform

        def write(index: int) -> tuple[str, int]:
            picture, label = pictures[index]
            file = folder / f"{index:05d}.jpg"
            picture.resize((SCAN_SIDE, SCAN_SIDE)).convert("RGB").save(file)
            return str(file), label

        with ThreadPoolExecutor() as pool:
            self.files = list(pool.map(write, range(len(pictures))))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        file, label = self.files[index]
        with Image.open(file) as image:
            return self.transform(image.convert("L").resize((SIDE, SIDE))), label


def first(dataset: Dataset[Any], samples: int) -> Dataset[Any]:
    """Return a number of samples of a dataset, repeated if it has fewer."""
    length = len(dataset)  # type: ignore[arg-type]
    return Subset(dataset, [index % length for index in range(samples)])


def find_pictures() -> tuple[str, MakeSet]:
    """Return the name of the pictures, and the function that makes their sets.

    They are FashionMNIST if it is in ``$DPEX_DATA`` or ``./data``, or if it can be downloaded.
    """
    folder = Path(os.environ.get("DPEX_DATA", "data"))
    if fashion_is_in(folder) or fetch_fashion(folder):
        return f"FashionMNIST in {folder}", lambda train, transform: datasets.FashionMNIST(
            folder, train, transform
        )
    return "the digits of scikit-learn (FashionMNIST is neither on disk nor downloadable)", Digits


def fashion_is_in(folder: Path) -> bool:
    try:
        datasets.FashionMNIST(folder, train=True)
        datasets.FashionMNIST(folder, train=False)
    except RuntimeError:
        return False
    return True


def fetch_fashion(folder: Path) -> bool:
    """Download FashionMNIST, and return whether it is there.

    The download starts only if the server sends its smallest file within ``PROBE_S`` seconds.
    """

    def probe() -> None:
        smallest = datasets.FashionMNIST.mirrors[0] + "t10k-labels-idx1-ubyte.gz"
        urllib.request.urlopen(smallest, timeout=PROBE_S).read()

    if not finishes(probe, PROBE_S):
        return False
    print(f"Downloading FashionMNIST (30 MB) into {folder} ...")
    folder.mkdir(parents=True, exist_ok=True)
    # An interrupted download must not look like complete data, so it has a folder of its own.
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as aside:
        if not finishes(lambda: datasets.FashionMNIST(aside, download=True), DOWNLOAD_S):
            return False
        shutil.move(Path(aside) / "FashionMNIST", folder / "FashionMNIST")
    return fashion_is_in(folder)


def finishes(action: Callable[[], Any], timeout_s: float) -> bool:
    """Run an action in a thread, and return whether it succeeds in time.

    Without the thread, the action could hang: a name look-up has no timeout.
    """
    done = threading.Event()

    def run() -> None:
        try:
            action()
        except (OSError, RuntimeError):
            return
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return done.is_set()
