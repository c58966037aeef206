"""A small network and its mean absolute error; replace `Network` by your own model."""

from itertools import pairwise

from torch import Tensor, nn

ACTIVATIONS = {"relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


class Network(nn.Sequential):
    """Hidden layers of equal width, from features [batch, 10] to one number [batch, 1].

    Args:
        hidden: Width of a hidden layer.
        layers: Number of hidden layers.
        activation: `relu`, `silu` or `tanh`.
        features: Number of features.
    """

    def __init__(self, hidden: int = 32, layers: int = 2, activation: str = "silu", features: int = 10) -> None:
        widths = [features] + [hidden] * layers
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), ACTIVATIONS[activation]()]
        super().__init__(*blocks, nn.Linear(widths[-1], 1))


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean absolute error over a batch [samples, 1]."""
    return (outputs - targets).abs().mean()
