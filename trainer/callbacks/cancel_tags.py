"""CancelTags: ends a run when a user adds a cancel tag to it in its tracker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Final

from trainer.callback import TrainerView

#: Tags that end a run unless others are given.
CANCEL_TAGS: Final = ("cancel", "canceled", "cancelled")
#: The stop reason of such a run.
CANCELLED: Final = "cancelled"

logger = logging.getLogger(__name__)


class CancelTags:
    """Asks a tracker for a run's tags in a thread, so that training never waits for the answer.

    Args:
        tags: Any of these tags ends the run; if there are none, the tracker is not asked.
        every_s: Seconds between two requests, above 0.

    Raises:
        ValueError: ``tags`` is one text, or ``every_s`` is not above 0.
    """

    def __init__(self, tags: Sequence[str], every_s: float) -> None:
        if isinstance(tags, str):
            raise ValueError(f"cancel_tags is {tags!r}: give a list, [{tags}]")  # noqa: TRY004 - as for other arguments
        if not every_s > 0:
            raise ValueError(f"cancel_every_s is {every_s}: give seconds above 0")
        self._tags = frozenset(tags)
        self._every_s = every_s
        self._found: str | None = None
        self._over = threading.Event()

    def watch(self, ask: Callable[[], Collection[str]]) -> None:
        """Start asking; the first time after ``every_s`` seconds.

        Args:
            ask: Called in the thread; returns the present tags of the run.
        """
        self.close()
        if self._tags:
            self._over = threading.Event()
            threading.Thread(target=self._run, args=(ask, self._over), name="cancel-tags", daemon=True).start()

    def obey(self, trainer: TrainerView) -> None:
        """If a tag was found, end the epoch, which is still validated, and the run."""
        if self._found is not None:
            logger.warning("the run is tagged %r in its tracker: it ends with this epoch", self._found)
            self._found = None
            trainer.state.stop_epoch()
            trainer.state.stop(CANCELLED)

    def close(self) -> None:
        """Stop asking, and forget a found tag, which was for this run."""
        self._over.set()  # a thread that waits for an answer ends after it, and ignores it
        self._found = None

    def _run(self, ask: Callable[[], Collection[str]], over: threading.Event) -> None:
        said = False
        while not over.wait(self._every_s):
            try:
                found = sorted(self._tags & set(ask()))
            except Exception as error:  # noqa: BLE001 - a tracker that is away does not change the training
                logger.log(logging.INFO if said else logging.WARNING, "can't ask for the run's tags: %s", error)
                said = True
                continue
            if found and not over.is_set():
                self._found = found[0]
                return
