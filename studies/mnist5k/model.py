"""A convolutional network for small pictures, which sees each a little moved while it trains."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class RandomShift(nn.Module):
    """Move each picture by whole pixels while training; what comes in at the edge is the edge's colour.

    Args:
        pixels: Farthest move in each direction; 0 leaves pictures as they are.
    """

    def __init__(self, pixels: int = 1) -> None:
        super().__init__()
        self.pixels = pixels

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures [batch, channels, height, width], moved when training."""
        if not self.training or self.pixels == 0:
            return pictures
        batch, _, height, width = pictures.shape
        padded = functional.pad(pictures, [self.pixels] * 4, mode="replicate")
        down, right = torch.randint(2 * self.pixels + 1, (2, batch, 1, 1), device=pictures.device)
        rows = down + torch.arange(height, device=pictures.device)[:, None]
        columns = right + torch.arange(width, device=pictures.device)
        picture = torch.arange(batch, device=pictures.device)[:, None, None]
        return padded.movedim(1, -1)[picture, rows, columns].movedim(-1, 1)


class CNN(nn.Sequential):
    """Blocks of a convolution (3 by 3), batch normalisation, ReLU and pooling, and one linear layer.

    Args:
        channels: Channels after the first block; each further one doubles them.
        blocks: Number of blocks, 1 to 4; each halves the picture.
        dropout: Share of the last block's activations dropped while training.
        shift: Farthest random move of a training picture, in pixels.
    """

    def __init__(self, channels: int = 8, blocks: int = 3, dropout: float = 0.2, shift: int = 1) -> None:
        widths = [1] + [channels * 2**depth for depth in range(blocks)]
        layers: list[nn.Module] = [RandomShift(shift)]
        for before, after in pairwise(widths):
            convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        side = 28 >> blocks
        super().__init__(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(widths[-1] * side * side, 10))


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the pictures [batch, 10] whose largest output is at the target's index."""
    return (outputs.argmax(dim=1) == targets).to(torch.float32).mean()
