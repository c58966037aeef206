"""Two networks that say which character comes next: one with a memory, and one that looks back."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class GRU(nn.Module):
    """A gated recurrent network over embedded characters.

    Args:
        classes: Characters of the alphabet.
        width: Size of the embedding and of the memory.
        layers: Number of recurrent layers.
        dropout: Share of activations dropped before each layer and before the output, while training.
    """

    def __init__(self, classes: int = 97, width: int = 96, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, classes)

    def forward(self, characters: Tensor) -> Tensor:
        """From characters [batch, context] to the logits of each next one [batch, classes, context]."""
        hidden = self.embedding(characters)
        for layer in self.layers:
            hidden = layer(self.dropout(hidden))[0]
        logits: Tensor = self.output(self.dropout(hidden))
        return logits.transpose(1, 2)


class Transformer(nn.Module):
    """Causal self-attention over embedded characters and places; layers normalise before they act.

    Args:
        classes: Characters of the alphabet.
        context: Longest window, in characters.
        width: Size of the embedding, a multiple of ``heads``.
        layers: Number of layers, each of attention and a network four times as wide.
        heads: Attention heads of a layer.
        dropout: Share of activations dropped while training.
    """

    def __init__(
        self,
        classes: int = 97,
        context: int = 64,
        width: int = 96,
        layers: int = 1,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, width)
        self.places = nn.Parameter(torch.randn(context, width) / math.sqrt(width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.output = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, characters: Tensor) -> Tensor:
        """From characters [batch, context] to the logits of each next one [batch, classes, context]."""
        length = characters.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length, device=characters.device)
        hidden = self.embedding(characters) + self.places[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=later, is_causal=True)
        logits: Tensor = self.output(hidden)
        return logits.transpose(1, 2)


def bits_per_character(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean -log2 of the probability given to the character that came; 6.6 for a guess among 97."""
    return functional.cross_entropy(outputs, targets) / math.log(2)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Share of the characters [batch, context] whose logit [batch, classes, context] is the largest."""
    return (outputs.argmax(dim=1) == targets).to(torch.float32).mean()
