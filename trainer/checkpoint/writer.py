"""CheckpointWriter: writes checkpoints one after another, in the caller or in a thread."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.files import Progress
from trainer.checkpoint.manager import CheckpointManager


@dataclass(frozen=True)
class Save:
    """One checkpoint to be written.

    Attributes:
        progress: Its epoch and batch.
        checkpoint: What is written; with a thread, a copy that training leaves alone.
        permanent: Whether its file is to stay for ever.
    """

    progress: Progress
    checkpoint: Mapping[str, Any]
    permanent: bool = False


@dataclass(frozen=True)
class Written:
    """What became of some saves.

    Attributes:
        saves: All of them.
        paths: Files of those that are on disk: the first so many.
        error: What kept the next one from it; None: all are on disk.
    """

    saves: Sequence[Save]
    paths: Sequence[Path]
    error: OSError | None


class CheckpointWriter:
    """Writes to one folder; never two things at the same time.

    It belongs to the process that made it. A fork of that has no thread, and its files would be the other's.

    Args:
        manager: Of that folder.
        background: Whether a thread writes, so that ``start`` returns before the files are there.
    """

    def __init__(self, manager: CheckpointManager, *, background: bool) -> None:
        self._manager = manager
        self._background = background
        self._running: Future[Written] | None = None
        self._process = os.getpid()

    @property
    def done(self) -> bool:
        """Whether there is a result that can be had without waiting."""
        return self._running is not None and self._running.done()

    def start(self, saves: Sequence[Save]) -> None:
        """Write these, in this order, up to the first error; the result of those before must have been taken.

        Raises:
            RuntimeError: This is a fork of the process that writes.
            Exception: Without a thread, what is no OSError: something in a checkpoint that can't be saved.
        """
        self._refuse_forks()
        assert self._running is None
        if self._background:
            executor = ThreadPoolExecutor(1, "checkpoint")
            self._running = executor.submit(self._write, saves)
            executor.shutdown(wait=False)  # the thread ends with its work, and the process not before it
            return
        done: Future[Written] = Future()
        done.set_result(self._write(saves))
        self._running = done

    def result(self) -> Written | None:
        """Wait for what is being written; each result can be had once, and there may be none.

        Raises:
            RuntimeError: This is a fork of the process that writes.
            Exception: From the thread, what is no OSError.
        """
        if self._running is None:
            return None
        self._refuse_forks()
        wait([self._running])  # interrupted here, it can be waited for again
        running, self._running = self._running, None
        return running.result()

    def _refuse_forks(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} was forked from the one that trains, {self._process}, and can't write its "
                "checkpoints: let a fork that your code makes end by itself, with os._exit()"
            )

    def _write(self, saves: Sequence[Save]) -> Written:
        paths: list[Path] = []
        try:
            for save in saves:
                paths.append(self._manager.write(save.checkpoint, *save.progress))  # noqa: PERF401 - needed below
        except OSError as error:
            return Written(saves, paths, error)
        return Written(saves, paths, None)
