"""A network for functions that oscillate, and the error that physicists quote."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn


class Sine(nn.Module):
    """The sine as an activation.

    Args:
        frequency: Factor on what comes in.
    """

    def __init__(self, frequency: float = 1.0) -> None:
        super().__init__()
        self.frequency = frequency

    def forward(self, inputs: Tensor) -> Tensor:
        """The sine of each value."""
        return torch.sin(self.frequency * inputs)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "silu": nn.SiLU, "sine": Sine}


class Network(nn.Sequential):
    """Hidden layers of equal width, from time, damping and frequency ratio to the displacement.

    Args:
        hidden: Width of a hidden layer.
        layers: Number of hidden layers.
        activation: ``tanh``, ``silu`` or ``sine``.
        frequency: With ``sine``, its factor in the first layer. Networks learn slow variations first, and
            this makes several periods of the motion slow (Sitzmann et al., 2020, arXiv:2006.09661).
    """

    def __init__(
        self, hidden: int = 64, layers: int = 3, activation: str = "sine", frequency: float = 5.0
    ) -> None:
        widths = [3] + [hidden] * layers
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), ACTIVATIONS[activation]()]
        if activation == "sine":
            blocks[1] = Sine(frequency)
        super().__init__(*blocks, nn.Linear(widths[-1], 1))


def relative_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """L2 norm of the error over the L2 norm of the exact displacements, both taken over a batch [samples, 1]."""
    return torch.linalg.vector_norm(outputs - targets) / torch.linalg.vector_norm(targets)
