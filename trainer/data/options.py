"""BatchOptions: the options by which data sets are batched, and how much of them is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: A number of batches, or a fraction of them; None: all.
Limit = int | float | None


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How data sets are batched, and how much of them is used.

    Attributes:
        batch_size: Samples per training batch.
        eval_batch_size: Samples per validation or test batch. It does not follow ``batch_size``, so that a search
            of ``batch_size`` changes neither the memory nor the result of validation.
        shuffle: Whether the training data has a new order in each pass.
        drop_last: Whether to leave out a last, smaller training batch.
        num_workers: Worker processes of the DataLoader. This argument and the next ones, up to
            ``multiprocessing_context``, are those of DataLoader; they have no effect on tensors in memory.
        persistent_workers: Whether workers live from pass to pass. Their random numbers depend only on (seed,
            pass, batch).
        prefetch_factor: Batches that each worker loads ahead; None: two.
        pin_memory: Whether to load into pinned memory; None: if the device is a CUDA device.
        timeout: Seconds to wait for a batch of a worker; 0: no limit.
        collate_fn: Makes a batch of a list of samples; with it, tensors in memory go through a DataLoader, too.
        worker_init_fn: Called in each worker with the worker's number.
        multiprocessing_context: How workers are started, such as ``"spawn"``.
        limit_train_batches: Use only this number of batches, or fraction of them, in each pass over the training
            data; a shuffled pass has other batches each time. None: all batches, here and in the next two.
        limit_val_batches: Use only the first batches of each validation set: a number, or a fraction.
        limit_test_batches: Use only the first batches of each test set: a number, or a fraction.
        overfit_batches: Train and validate on this number of training batches only, chosen once, to see whether
            the loss comes close to 0. None: use all data.

    Raises:
        ValueError: A number is out of range, or an option needs workers and there are none.
    """

    batch_size: int = 32
    eval_batch_size: int = 256
    shuffle: bool = True
    drop_last: bool = False
    num_workers: int = 0
    persistent_workers: bool = False
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    timeout: float = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: str | None = None
    limit_train_batches: Limit = None
    limit_val_batches: Limit = None
    limit_test_batches: Limit = None
    overfit_batches: int | None = None

    def __post_init__(self) -> None:
        lowest = {"batch_size": 1, "eval_batch_size": 1, "num_workers": 0}
        lowest |= {name: 1 for name in ("overfit_batches", "prefetch_factor") if getattr(self, name) is not None}
        for name, least in lowest.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")
        for name in ("persistent_workers", "prefetch_factor", "timeout", "worker_init_fn"):
            if getattr(self, name) and not self.num_workers:
                raise ValueError(f"{name} needs worker processes: give num_workers too, or leave it out")
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not (value is None or whole or (isinstance(value, float) and 0 < value < 1)):
                raise ValueError(
                    f"{name} is {value!r}: give batches (an integer of at least 1), or a fraction in (0, 1)"
                )


def fraction_of(length: int, share: float) -> int:
    """The number of whole batches in a share of ``length``; at least one."""
    # Rounded first, as 0.29 * 100 is 28.999999999999996.
    return max(1, int(round(length * share, 6)))


def batch_count(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """The number of batches that ``samples`` make."""
    return samples // batch_size if drop_last else -(-samples // batch_size)
