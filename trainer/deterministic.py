"""Deterministic mode: torch's algorithms that give the same bits each time, while a trainer runs."""

from __future__ import annotations

import os
from typing import Final

import torch

from trainer.callback import Callback, TrainerView

#: What cuBLAS reads once a process, when it is first used; without it torch refuses its products in this mode.
_CUBLAS: Final = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class DeterministicMode(Callback):
    """Lets torch use deterministic algorithms only, from ``setup`` to ``teardown``; then all is as before.

    On the CPU a run is the same to the last bit without it. On a GPU some operations add up in any order: this
    mode takes others, slower ones, and an operation that has none raises torch's RuntimeError, which names it.
    """

    priority = -100
    transient = ("_before",)

    def __init__(self) -> None:
        os.environ.setdefault(*_CUBLAS)
        self._before: tuple[bool, bool, bool] | None = None

    def setup(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """Switch it on."""
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
        )
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False  # else the fastest algorithm of the moment is taken

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """Put everything back."""
        if self._before is None:
            return
        enabled, warn_only, torch.backends.cudnn.benchmark = self._before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        self._before = None
