"""TrainStream: the training batches of a run, pass after pass, from wherever it stands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from trainer.data.batches import Batches, close_batches, pass_length
from trainer.data.random_state import seed_all, set_rng_state
from trainer.data.seeding import derive_seed
from trainer.state import TrainState

# Keeps the random streams of epochs that begin inside a pass apart from those of passes.
_EPOCH_STREAM = 0xE90C


class TrainStream:
    """Batches in an order that depends on (seed, pass) alone, with the random generators that go with it.

    Each pass seeds the global generators anew, and so does each epoch that starts inside a pass; resuming anywhere
    can then first repeat the data order of the pass, and put the generators where they were.

    Args:
        batches: Where the batches come from.
        state: Says which pass and which batch are next; ``data_epoch`` and ``data_batch`` are kept up here.
        seed: The run's seed.
    """

    def __init__(self, batches: Batches, state: TrainState, seed: int) -> None:
        self._batches = batches
        self._state = state
        self._seed = seed
        self._iterator: Iterator[Any] | None = None
        #: Batches of the running or next pass; None if unknown.
        self.length = pass_length(batches)

    def start_epoch(self, rng: dict[str, Any] | None = None) -> None:
        """Bring order and generators to where the state stands; ``rng`` are those of an epoch that resumes."""
        if self._state.data_batch or not self._state.batch_index:  # else a pass is over, and the next not begun
            self._open()
        if rng is not None:
            set_rng_state(rng)
        elif self._state.data_batch:
            seed_all(derive_seed(self._seed, _EPOCH_STREAM, self._state.epoch))
            if self.length is None and not self._has_more():
                self.end_pass()
                self._open()

    @property
    def is_open(self) -> bool:
        """Whether batches of the running pass have been asked for."""
        return self._iterator is not None

    def rest_of_pass(self) -> Iterator[Any]:
        """The batches that are left of this pass."""
        return self._open()

    def end_pass(self) -> None:
        """Count a pass as finished, and let the next one begin.

        Raises:
            ValueError: It had no batch.
        """
        if not self._state.data_batch:
            raise ValueError("the training data gave no batch")
        self._state.data_epoch += 1
        self._state.data_batch = 0
        self._iterator = None

    def replace(self, batches: Batches) -> None:
        """Take the batches from elsewhere, from the next pass that begins."""
        self._batches = batches
        if self._iterator is None:
            self.length = pass_length(batches)

    def close(self) -> None:
        """Free what the batches hold."""
        self._iterator = None
        close_batches(self._batches)

    def _has_more(self) -> bool:
        iterator = self._open()
        for batch in iterator:
            self._iterator = chain((batch,), iterator)
            return True
        return False

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            state = self._state
            self.length = pass_length(self._batches)
            seed_all(derive_seed(self._seed, state.data_epoch))
            self._iterator = iter(self._batches.epoch(state.data_epoch, skip=state.data_batch))
        return self._iterator
