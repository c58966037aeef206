"""Deterministic mode: while a trainer runs, torch uses only algorithms that give the same bits each time."""

from __future__ import annotations

import os
from typing import Final

import torch

from trainer.callback import Callback, TrainerView

#: cuBLAS reads this once per process, at its first use; without it, torch refuses matrix products in this mode.
_CUBLAS: Final = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


class DeterministicMode(Callback):
    """Makes torch use only deterministic algorithms from ``setup`` to ``teardown``, then restores its settings.

    On the CPU, a run has the same bits without it. On a GPU, some operations sum in varying order: this mode uses
    slower algorithms for them, and an operation without one raises torch's RuntimeError, which names it.
    """

    priority = -100
    transient = ("_before",)

    def __init__(self) -> None:
        os.environ.setdefault(*_CUBLAS)
        self._before: tuple[bool, bool, bool] | None = None

    def setup(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """Switch the mode on."""
        self._before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
        )
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False  # else cuDNN picks the algorithm by timings

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002 - the hook's signature
        """Restore torch's settings."""
        if self._before is None:
            return
        enabled, warn_only, torch.backends.cudnn.benchmark = self._before
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        self._before = None
