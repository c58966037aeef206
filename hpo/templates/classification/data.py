"""Three spiral arms in the plane, with noise; replace `load` by your own data."""

import math

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

ARMS = 3


def load(train: int = 1000, held_out: int = 300, noise: float = 0.25, seed: int = 0) -> dict[str, TensorDataset]:
    """Draw points on the arms.

    Args:
        train: Number of training points.
        held_out: Number of points in `val`, and in `test`.
        noise: Standard deviation of the noise on the angle, in radians.
        seed: Seed of the draw.

    Returns:
        `train`, `val` and `test`: positions as float32 [points, 2], and the arm's number as int64 [points].
    """
    generator = torch.Generator().manual_seed(seed)
    sets = {"train": train, "val": held_out, "test": held_out}
    return {name: TensorDataset(*_spirals(points, noise, generator)) for name, points in sets.items()}


def _spirals(points: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    arm = torch.randint(ARMS, (points,), generator=generator)
    radius = torch.rand(points, generator=generator).sqrt()
    angle = 2 * math.pi * (arm / ARMS + radius) + noise * torch.randn(points, generator=generator)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), arm
