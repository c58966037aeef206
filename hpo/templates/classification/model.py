"""A small network, and how often it is right; put your own model in the place of `Network`."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class Network(nn.Sequential):
    """Hidden layers of equal width with ReLU and dropout, from positions [batch, 2] to scores [batch, classes].

    Args:
        hidden: Width of a hidden layer.
        layers: Number of hidden layers.
        dropout: Share of activations dropped while training.
        classes: Number of classes.
    """

    def __init__(self, hidden: int = 32, layers: int = 2, dropout: float = 0.0, classes: int = 3) -> None:
        widths = [2] + [hidden] * layers
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*blocks, nn.Linear(widths[-1], classes))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the points whose largest score is that of their class."""
    return (outputs.argmax(dim=1) == targets).to(torch.float32).mean()
