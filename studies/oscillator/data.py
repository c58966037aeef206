"""A damped oscillator that a periodic force sets in motion from rest: exact curves of many such oscillators.

In units of the undamped oscillator (time in 1/ω₀, length in F/(m ω₀²)) the motion has two parameters, the
damping ratio ζ < 1 and the ratio r of the driving frequency to ω₀:

    x'' + 2 ζ x' + x = cos(r t),    x(0) = x'(0) = 0
"""

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

#: Time, damping ratio ζ, frequency ratio r: the box in which oscillators are drawn.
LOW = torch.tensor([0.0, 0.05, 0.5])
HIGH = torch.tensor([20.0, 0.5, 2.0])


def displacement(time: Tensor, damping: Tensor, ratio: Tensor) -> Tensor:
    """The exact solution x(t): the steady state and the transient that makes it start from rest."""
    detuning, friction = 1 - ratio**2, 2 * damping * ratio
    resonance = detuning**2 + friction**2
    cos_part, sin_part = detuning / resonance, friction / resonance
    steady = cos_part * torch.cos(ratio * time) + sin_part * torch.sin(ratio * time)
    natural = torch.sqrt(1 - damping**2)
    sin_transient = -(damping * cos_part + ratio * sin_part) / natural
    transient = -cos_part * torch.cos(natural * time) + sin_transient * torch.sin(natural * time)
    return steady + torch.exp(-damping * time) * transient


def load_oscillators(
    train: int = 512, held_out: int = 128, times: int = 16, seed: int = 0
) -> dict[str, TensorDataset]:
    """Draw oscillators and look at each at random times; no oscillator is in two sets.

    Args:
        train: Oscillators to learn from.
        held_out: Oscillators in each of the sets ``val`` and ``test``.
        times: Moments at which each oscillator is seen.
        seed: Seed of the draw.

    Returns:
        ``train``, ``val`` and ``test``: (t, ζ, r) scaled to [-1, 1] as float32 [samples, 3], and the
        displacement as float32 [samples, 1].
    """
    generator = torch.Generator().manual_seed(seed)
    sets = {"train": train, "val": held_out, "test": held_out}
    return {name: _observed(count, times, generator) for name, count in sets.items()}


def _observed(oscillators: int, times: int, generator: torch.Generator) -> TensorDataset:
    unit = torch.rand(oscillators, times, 3, generator=generator, dtype=torch.float64)
    unit[..., 1:] = unit[:, :1, 1:]  # one ζ and one r for all times of an oscillator
    time, damping, ratio = (LOW + (HIGH - LOW) * unit).unbind(dim=-1)
    inputs = (2 * unit - 1).reshape(-1, 3).float()
    return TensorDataset(inputs, displacement(time, damping, ratio).reshape(-1, 1).float())
