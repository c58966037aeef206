"""TrainStream: gives the training batches of a run, pass after pass, from any position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainer.data.batches import Batches, TensorBatches, close_batches, is_batched, known_length
from trainer.data.limits import FirstBatches, LatestBatches, SameBatches, train_batches
from trainer.data.loader_batches import LoaderBatches
from trainer.data.loading import with_own_workers
from trainer.data.options import BatchOptions
from trainer.data.plan import Plan, no_batch
from trainer.data.random_state import seed_all, set_rng_state
from trainer.data.seeding import derive_seed
from trainer.data.sets import each_set
from trainer.data.shard import Shard
from trainer.state import TrainState

# Separates the seeds of epochs that begin inside a pass from those of passes.
_EPOCH_STREAM = 0xE90C
# Separates the seeds of processes.
_RANK_STREAM = 0x4A7B


class TrainStream:
    """Gives batches in an order that depends only on (seed, pass), and seeds the random generators for them.

    Each pass seeds the global generators anew, and so does each epoch that starts inside a pass. A run can thus
    resume anywhere: it repeats the data order of the pass, then restores the saved states of the generators.

    Args:
        data: The training data, see `trainer.data.batches.make_batches`.
        options: How to batch it.
        device: The device of the batches.
        state: The run's state, with the next pass, the next batch and its size; the stream updates ``data_epoch``
            and ``pass_batch_size``, and sets ``data_batch`` to 0 at the end of a pass.
        seed: The run's seed.
        shard: With several processes, this process's part of each batch; each process draws its own random
            numbers.
    """

    def __init__(
        self,
        data: Any,
        options: BatchOptions,
        device: torch.device,
        state: TrainState,
        seed: int,
        shard: Shard | None,
    ) -> None:
        self._data = data
        self._device = device
        self._state = state
        self._seed = seed
        self._shard = shard
        self._iterator: Iterator[Any] | None = None
        self._options = options
        self._handed: int | None = None  # ``data_batch`` when the latest batch was handed out
        self._size = state.pass_batch_size or options.batch_size
        self._batches = self._made()
        #: Batches of the running or next pass; None if unknown.
        self.length = self._length()

    def start_epoch(self, rng: dict[str, Any] | None) -> None:
        """Set data order and generators for the state's position; ``rng`` has the states of a resumed epoch."""
        if self._state.data_batch or not self._state.batch_index:  # else a pass has ended, and the next not begun
            self._open()
        if rng is not None:
            set_rng_state(rng)
        elif self._state.data_batch:
            self._seed_all(_EPOCH_STREAM, self._state.epoch)
            if (self.length is None or self._is_iterable()) and not self._has_more():
                self.end_pass()
                self._open()

    def start_pass(self) -> None:
        """Begin a pass inside an epoch."""
        self._open()

    def rest_of_pass(self) -> Iterator[Any]:
        """The remaining batches of this pass; reopens the pass if a change of the batch size has cut it."""
        reopened = True
        while reopened:
            reopened = False
            for batch in self._open():
                self._handed = self._state.data_batch
                yield batch
                if self._iterator is None:
                    reopened = True
                    break

    def end_pass(self) -> None:
        """Count the pass as finished, so that the next one can begin.

        Raises:
            ValueError: The pass had no batch.
        """
        if not self._state.data_batch:
            raise no_batch()
        self._state.data_epoch += 1
        self._state.data_batch = self._state.cut_batches = self._state.cut_samples = 0
        self._state.pass_batch_size = 0
        self._iterator = self._handed = None

    def skip_pass(self, plan: Plan) -> None:
        """Count a pass as finished without training on any of its batches.

        Raises:
            ValueError: Epochs are not whole passes (``validate_every``).
        """
        if plan.validate_every is not None:
            raise ValueError("skip('epoch') leaves out a whole pass, which with validate_every an epoch is not")
        self._state.data_epoch += 1
        self._state.pass_batch_size = 0
        self._iterator = None

    def rebatch(self, options: BatchOptions, *, now: bool) -> None:
        """Use other batch options from the next pass on; with ``now``, from the next batch on.

        A fit that resumes inside a pass keeps the batch size of this pass, unless ``now`` is set.

        Raises:
            ValueError: The data comes in batches of its own; or ``now`` is set and the data is iterable, a limit
                counts batches, or a batch is in progress; or ``now`` is not set and a pass is in progress.
        """
        state, opened = self._state, self._iterator is not None
        if opened and state.data_batch > 0 and not now:
            raise ValueError("the batch size can't change inside a pass: set it in on_fit_start or on_epoch_end")
        if is_batched(self._data):
            raise ValueError("the training data comes in batches of its own: hand over its Dataset instead")
        if now:
            self._check_change()
            if state.pass_batch_size not in (0, options.batch_size):
                self._cut(options.batch_size)
        elif not opened and not state.data_batch:
            state.pass_batch_size = 0
        self._options = options
        if self._iterator is None:
            self._resize()
            self.length = self._length()

    def validated(self, val: Any) -> Any:
        """The data that the fit validates: ``val``; with ``overfit_batches``, those batches in place of each set.

        A DataLoader that is also the training data gets other workers, as its own may be inside a training pass.
        """
        if val is None:
            return None
        if isinstance(self._batches, SameBatches):
            return each_set(lambda _: LatestBatches(lambda: self._batches), val)
        return each_set(lambda one: with_own_workers(one) if one is self._data else one, val)

    def close(self) -> None:
        """Free what the batches hold."""
        self._iterator = self._handed = None
        close_batches(self._batches)

    def _check_change(self) -> None:
        if self._handed == self._state.data_batch:  # the batch that was handed out is not yet counted
            raise ValueError(
                "the batch size can't change while a batch is under way, whose samples would come twice or be "
                "left out: set it in on_train_batch_end"
            )
        limited = isinstance(self._batches, FirstBatches | SameBatches)
        if limited:
            raise ValueError(
                "the batch size can't change inside a pass that a limit cuts, since limits count batches: leave "
                "limit_train_batches and overfit_batches out, or let the size change by passes"
            )
        if isinstance(self._batches, LoaderBatches):
            self._batches.remaining(0)

    def _cut(self, size: int) -> None:
        """Note the position in the pass, so that the next batch reopens the pass there with another size."""
        state = self._state
        state.cut_samples += (state.data_batch - state.cut_batches) * state.pass_batch_size
        state.cut_batches, state.pass_batch_size = state.data_batch, size
        self._iterator = None

    def _resize(self) -> None:
        """Make the batches anew if the size of the next batch differs from theirs."""
        size = self._state.pass_batch_size or self._options.batch_size
        if size != self._size and not is_batched(self._data):
            close_batches(self._batches)
            self._size = size
            self._batches = self._made()

    def _length(self) -> int | None:
        batches, samples = self._batches, self._state.cut_samples
        if samples and (
            isinstance(batches, TensorBatches) or (isinstance(batches, LoaderBatches) and batches.cuttable)
        ):
            return self._state.cut_batches + batches.remaining(samples)
        return known_length(batches)

    def _made(self) -> Batches:
        options = replace(self._options, batch_size=self._size)
        return train_batches(self._data, options, self._device, seed=self._seed, shard=self._shard)

    def _seed_all(self, *parts: int) -> None:
        """Seed the global generators; rank 0 gets the same seeds as a run with one process."""
        rank = () if self._shard is None or not self._shard.rank else (_RANK_STREAM, self._shard.rank)
        seed_all(derive_seed(self._seed, *parts, *rank))

    def _is_iterable(self) -> bool:
        """Whether the data is iterable, and so may end before its stated length."""
        data = self._data.dataset if isinstance(self._data, DataLoader) else self._data
        return isinstance(data, IterableDataset)

    def _has_more(self) -> bool:
        iterator = self._open()
        for batch in iterator:
            self._iterator = chain((batch,), iterator)
            return True
        return False

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._resize()
            state, batches = self._state, self._batches
            state.absent = False  # a Shard sets it for each batch; a ready DataLoader never does
            self.length, state.pass_batch_size = self._length(), self._size
            skip = state.data_batch - state.cut_batches
            if skip or not state.cut_batches:  # else the pass is exactly at a cut: its random numbers continue
                self._seed_all(state.data_epoch)
            if isinstance(batches, LoaderBatches | TensorBatches):
                self._iterator = iter(batches.epoch(state.data_epoch, skip, state.cut_samples))
            else:
                self._iterator = iter(batches.epoch(state.data_epoch, skip))
        return self._iterator
