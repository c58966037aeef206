"""CheckpointWriter: writes checkpoints one after another, in the calling thread or in a background thread."""

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
        checkpoint: The content; for a background thread, a copy that training does not change.
        permanent: Whether its file is never removed.
    """

    progress: Progress
    checkpoint: Mapping[str, Any]
    permanent: bool = False


@dataclass(frozen=True)
class Written:
    """The result of some saves.

    Attributes:
        saves: All of them, in order.
        paths: The files of those that are on disk; they are the first ones.
        error: Why the next one could not be written; None if all are on disk.
    """

    saves: Sequence[Save]
    paths: Sequence[Path]
    error: OSError | None


class CheckpointWriter:
    """Writes checkpoints to one folder, one at a time.

    Only the process that made it may use it: a forked process has no such thread, and would write to the files of
    its parent.

    Args:
        manager: The manager of that folder.
        background: Whether a thread writes, so that ``start`` returns before the files are written.
    """

    def __init__(self, manager: CheckpointManager, *, background: bool) -> None:
        self._manager = manager
        self._background = background
        self._running: Future[Written] | None = None
        self._process = os.getpid()

    @property
    def done(self) -> bool:
        """Whether `result` would return a result without waiting."""
        return self._running is not None and self._running.done()

    def start(self, saves: Sequence[Save]) -> None:
        """Write these in this order, up to the first error; the caller must have taken the previous `result`.

        Raises:
            RuntimeError: This process is a fork of the one that made the writer.
            Exception: Without a thread, any error but OSError: something in a checkpoint can't be saved.
        """
        self._refuse_forks()
        assert self._running is None
        if self._background:
            executor = ThreadPoolExecutor(1, "checkpoint")
            self._running = executor.submit(self._write, saves)
            executor.shutdown(wait=False)  # the thread ends after its work, and the process waits for it at exit
            return
        done: Future[Written] = Future()
        done.set_result(self._write(saves))
        self._running = done

    def result(self) -> Written | None:
        """Wait for the running saves and return their result, once; None if nothing was started since.

        Raises:
            RuntimeError: This process is a fork of the one that made the writer.
            Exception: Any error of the thread but OSError.
        """
        if self._running is None:
            return None
        self._refuse_forks()
        wait([self._running])  # if an interrupt ends this wait, the caller can wait again
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
