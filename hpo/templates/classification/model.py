"""A small network and its accuracy; replace `Network` by your own model."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class Network(nn.Sequential):
    """Hidden layers of equal width with ReLU and dropout, from positions [batch, 2] to scores [batch, classes].

    Args:
        hidden: Width of a hidden layer.
        layers: Number of hidden layers.
        dropout: Probability of dropping an activation while training.
        classes: Number of classes.
    """

    def __init__(self, hidden: int = 32, layers: int = 2, dropout: float = 0.0, classes: int = 3) -> None:
        widths = [2] + [hidden] * layers
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*blocks, nn.Linear(widths[-1], classes))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the points whose class has the largest score."""
    return (outputs.argmax(dim=1) == targets).to(torch.float32).mean()
