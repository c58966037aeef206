"""From a linear model to a network of three hidden layers, and how much of the target it explains."""

from itertools import pairwise

from torch import Tensor, nn


class Network(nn.Sequential):
    """Hidden layers of equal width with SiLU; a linear model with none.

    Args:
        inputs: Columns of the table.
        width: Width of a hidden layer.
        layers: Number of hidden layers.
    """

    def __init__(self, inputs: int = 10, width: int = 16, layers: int = 1) -> None:
        widths = [inputs] + [width] * layers
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), nn.SiLU()]
        super().__init__(*blocks, nn.Linear(widths[-1], 1))


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the variance of a set's targets [samples, 1] that the outputs explain."""
    return 1 - (outputs - targets).square().mean() / targets.var(correction=0)
