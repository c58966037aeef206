"""A multilayer perceptron, and the accuracy of what it says."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Sequential):
    """Hidden layers of equal width with ReLU and dropout.

    Args:
        inputs: Features of a sample.
        outputs: Classes.
        hidden: Width of a hidden layer.
        layers: Number of hidden layers.
        dropout: Share of activations dropped while training.
    """

    def __init__(
        self, inputs: int = 64, outputs: int = 10, hidden: int = 64, layers: int = 1, dropout: float = 0.1
    ) -> None:
        widths = [inputs] + [hidden] * layers
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*blocks, nn.Linear(widths[-1], outputs))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the samples [batch, classes] whose largest output is at the target's index."""
    return (outputs.argmax(dim=1) == targets).to(torch.float32).mean()
