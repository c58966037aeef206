"""A table of ten columns, of which five matter: Friedman's first problem (1991, Annals of Statistics 19, p. 37).

y = 10 sin(π x₁ x₂) + 20 (x₃ - ½)² + 10 x₄ + 5 x₅ + noise,    each x uniform in [0, 1]
"""

import torch
from sklearn.datasets import make_friedman1
from torch import Tensor
from torch.utils.data import TensorDataset


def load_table(
    train: int = 1000, held_out: int = 500, noise: float = 1.0, seed: int = 0
) -> dict[str, TensorDataset]:
    """Draw the rows, and standardise all columns by those of ``train``.

    Args:
        train: Rows to learn from.
        held_out: Rows in each of the sets ``val`` and ``test``.
        noise: Standard deviation of the noise; the rest of y has one of about 4.9.
        seed: Seed of the draw.

    Returns:
        ``train``, ``val`` and ``test``: inputs as float32 [rows, 10], and y as float32 [rows, 1].
    """
    inputs, outputs = make_friedman1(train + 2 * held_out, noise=noise, random_state=seed)
    columns = torch.from_numpy(inputs), torch.from_numpy(outputs)[:, None]
    scaled = [_standardised(column, train).split([train, held_out, held_out]) for column in columns]
    return {name: TensorDataset(*pair) for name, *pair in zip(("train", "val", "test"), *scaled, strict=True)}


def _standardised(columns: Tensor, train: int) -> Tensor:
    known = columns[:train]
    return ((columns - known.mean(dim=0)) / known.std(dim=0)).float()
