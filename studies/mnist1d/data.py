"""Ten digits as short signals, after MNIST-1D (Greydanus & Kobak 2024, ICML; arXiv:2011.14439).

As the paper describes it, each sample is the template of a digit, stretched, scaled and put somewhere into a
longer signal, the rest of which is smooth noise; fine noise and a slope lie over all of it. The templates are
this study's own, so its accuracies are not those of the paper.
"""

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import TensorDataset

#: How far right of the middle the pen is, from a digit's top to its bottom; it starts and ends in the middle.
TEMPLATES = torch.tensor(
    [
        [0, 2, 3, 4, 4, 4, 4, 4, 4, 3, 2, 0],
        [0, -3, -2, -1, 0, 1, 1, 1, 1, 1, 1, 0],
        [0, 3, 4, 4, 2, 0, -2, -4, -4, 2, 4, 0],
        [0, 3, 4, 3, 0, -1, 0, 3, 4, 4, 3, 0],
        [0, -1, -2, -3, -4, -4, 4, 1, 1, 1, 1, 0],
        [0, 4, -3, -3, -3, 0, 3, 4, 4, 3, 2, 0],
        [0, -2, -3, -4, -4, -4, -4, 2, 3, 2, -2, 0],
        [0, 4, 4, 3, 2, 1, 0, -1, -2, -3, -3, 0],
        [0, -3, -4, -3, 0, 3, 4, 4, 0, -3, -4, 0],
        [0, -4, -2, 2, 3, 3, 3, 2, 1, 0, -1, 0],
    ],
    dtype=torch.float32,
)

#: Points of a signal while it is made, and as it is given out.
FINE, POINTS = 72, 40


def load_signals(
    train: int = 3000, held_out: int = 1000, noise: float = 0.25, seed: int = 0
) -> dict[str, TensorDataset]:
    """Draw signals for each set by itself, and standardise them by those of ``train``.

    Args:
        train: Signals to learn from.
        held_out: Signals in each of the sets ``val`` and ``test``.
        noise: Strength of the smooth noise around the digit.
        seed: Seed of the draw.

    Returns:
        ``train``, ``val`` and ``test``: signals as float32 [samples, 40], and the digit as int64.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = {"train": train, "val": held_out, "test": held_out}
    digits = {name: torch.randint(10, (size,), generator=generator) for name, size in sizes.items()}
    signals = {name: draw(labels, noise, generator) for name, labels in digits.items()}
    mean, std = signals["train"].mean(), signals["train"].std()
    return {name: TensorDataset((signals[name] - mean) / std, digits[name]) for name in sizes}


def draw(digits: Tensor, noise: float, generator: torch.Generator) -> Tensor:
    """One signal for each digit.

    Args:
        digits: The digits as int64 [samples].
        noise: Strength of the smooth noise around the digit.
        generator: Where the randomness comes from.

    Returns:
        The signals, float32 [samples, 40].
    """
    uniform = torch.rand(4, len(digits), 1, generator=generator)
    length = 12 / (12 + 36 + 24 * uniform[0])  # the template's share of the signal
    start = uniform[1] * (1 - length)
    height = 0.8 + 0.4 * uniform[2]
    slope = 0.75 * (uniform[3] - 0.5)
    time = torch.linspace(0, 1, FINE)
    place = (time - start) / length * (TEMPLATES.shape[1] - 1)
    inside = (place >= 0) & (place <= TEMPLATES.shape[1] - 1)
    signal = torch.where(inside, height * _read(digits, place), _smooth_noise(len(digits), generator) * noise)
    signal = signal + 0.02 * torch.randn(signal.shape, generator=generator) - slope * (time - 0.5)
    return functional.interpolate(signal[:, None], POINTS, mode="linear", align_corners=True)[:, 0]


def _read(digits: Tensor, place: Tensor) -> Tensor:
    """The digits' templates between their points [samples, FINE], all of one standard deviation."""
    templates = TEMPLATES / TEMPLATES.std(dim=1, keepdim=True) / 6
    before = place.floor().clamp(0, TEMPLATES.shape[1] - 2)
    left = templates[digits].gather(1, before.long())
    right = templates[digits].gather(1, before.long() + 1)
    return torch.lerp(left, right, place - before)


def _smooth_noise(samples: int, generator: torch.Generator) -> Tensor:
    """White noise after a Gaussian filter of two points' width [samples, FINE]."""
    offsets = torch.arange(-8, 9)
    weights = torch.exp(-0.5 * (offsets / 2) ** 2)
    white = torch.randn(samples, 1, FINE + len(offsets) - 1, generator=generator)
    return functional.conv1d(white, (weights / weights.sum())[None, None])[:, 0]
