"""Scikit-learn's digits: 1,797 pictures of 8 by 8 pixels, ten classes."""

import torch
from sklearn.datasets import load_digits as load_pictures
from torch.utils.data import TensorDataset

SPLITS = {"train": 0.7, "val": 0.15, "test": 0.15}


def load_digits(seed: int = 0) -> dict[str, TensorDataset]:
    """Shuffle and split the pictures.

    Args:
        seed: Seed of the split.

    Returns:
        ``train``, ``val`` and ``test``: pixels float32 [samples, 64] in [0, 1], and the digit as int64.
    """
    pictures = load_pictures()
    inputs = torch.from_numpy(pictures.data).float() / 16
    targets = torch.from_numpy(pictures.target).long()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    sizes = [int(share * len(inputs)) for share in SPLITS.values()]
    sizes[0] += len(inputs) - sum(sizes)
    parts = order.split(sizes)
    return {name: TensorDataset(inputs[rows], targets[rows]) for name, rows in zip(SPLITS, parts, strict=True)}
