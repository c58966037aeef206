"""Friedman's first benchmark for regression, with ten features; replace `load` by your own data.

Friedman, "Multivariate Adaptive Regression Splines", The Annals of Statistics 19 (1991), equation 61.
"""

import math

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

FEATURES = 10


def load(train: int = 1000, held_out: int = 300, noise: float = 1.0, seed: int = 0) -> dict[str, TensorDataset]:
    """Draw samples.

    Args:
        train: Number of training samples.
        held_out: Number of samples in `val`, and in `test`.
        noise: Standard deviation of the noise on the targets of all sets.
        seed: Seed of the draw.

    Returns:
        `train`, `val` and `test`: features in [0, 1] as float32 [samples, 10], and targets as float32
        [samples, 1], with about zero mean and unit variance.
    """
    generator = torch.Generator().manual_seed(seed)
    sets = {"train": train, "val": held_out, "test": held_out}
    drawn = {name: torch.rand(samples, FEATURES, generator=generator) for name, samples in sets.items()}
    targets = {name: _target(inputs, noise, generator) for name, inputs in drawn.items()}
    # All sets are scaled by the training set's mean and deviation: nothing of the others may leak into training.
    mean, std = targets["train"].mean(), targets["train"].std()
    return {name: TensorDataset(inputs, (targets[name] - mean) / std) for name, inputs in drawn.items()}


def _target(inputs: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    first, second, third, fourth, fifth = inputs[:, :5].unbind(dim=1)
    exact = 10 * torch.sin(math.pi * first * second) + 20 * (third - 0.5) ** 2 + 10 * fourth + 5 * fifth
    return (exact + noise * torch.randn(len(inputs), generator=generator)).unsqueeze(1)
