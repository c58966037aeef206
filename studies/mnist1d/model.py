"""Two networks for signals: one that knows what neighbours are, and one that does not."""

from itertools import pairwise

import torch
from torch import Tensor, nn


class CNN(nn.Sequential):
    """Convolutions with batch normalisation, each halving the signal; then an average over its length.

    Args:
        points: Length of a signal; any will do.
        channels: Channels after the first convolution; each further one doubles them.
        layers: Number of convolutions.
        kernel: Width of a convolution in points, odd.
        dropout: Share of the averages dropped while training.
    """

    def __init__(
        self, points: int = 40, channels: int = 16, layers: int = 3, kernel: int = 5, dropout: float = 0.0
    ) -> None:
        if points < 2 or kernel % 2 == 0:
            raise ValueError("a signal has two points or more, and a kernel an odd number of them")
        widths = [1] + [channels * 2**depth for depth in range(layers)]
        blocks: list[nn.Module] = [nn.Unflatten(1, (1, points))]
        for before, after in pairwise(widths):
            convolution = nn.Conv1d(before, after, kernel, stride=2, padding=kernel // 2, bias=False)
            blocks += [convolution, nn.BatchNorm1d(after), nn.ReLU()]
        head = [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(widths[-1], 10)]
        super().__init__(*blocks, *head)


class MLP(nn.Sequential):
    """Hidden layers of equal width with batch normalisation.

    Args:
        points: Length of a signal.
        hidden: Width of a hidden layer.
        layers: Number of hidden layers.
        dropout: Share of activations dropped while training.
    """

    def __init__(self, points: int = 40, hidden: int = 128, layers: int = 3, dropout: float = 0.0) -> None:
        blocks: list[nn.Module] = []
        for before, after in pairwise([points] + [hidden] * layers):
            blocks += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(dropout)]
        super().__init__(*blocks, nn.Linear(hidden, 10))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the samples [batch, 10] whose largest output is at the target's index."""
    return (outputs.argmax(dim=1) == targets).to(torch.float32).mean()
