"""Notifier: sends a message when training starts or ends, through any service that apprise supports."""

from __future__ import annotations

import logging
import math
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from trainer.callback import Callback, TrainerView
from trainer.checks import check_mode
from trainer.error_text import error_text
from trainer.state import DIVERGED, ERROR, INTERRUPTED, PRUNED, Mode, best_epoch

if TYPE_CHECKING:
    from apprise import Apprise

logger = logging.getLogger(__name__)

Event = Literal["fit_start", "fit_end", "exception", "diverged"]

_FROM_ENVIRONMENT: Final = "env:"
_VERBS: Final[Mapping[Event, str]] = {
    "fit_start": "started",
    "fit_end": "ended",
    "exception": "failed",
    "diverged": "diverged",
}
_LONGEST_ERROR = 1000
#: Seconds between two attempts to send.
_WAIT_S = 2.0


class Notifier(Callback):
    """Sends a message when training starts or ends, with what happened, where, the epochs and the metrics.

    The package apprise sends it (``pip install 'hpo-service[notify]'``), to any service that it knows: ``url`` is
    an address in its notation (https://appriseit.com/services/), such as ``slack://…``, ``discord://…``,
    ``mailto://…``, a Slack webhook's ``https://hooks.slack.com/…``, or ``json://host/path`` and
    ``jsons://host/path``, which post ``title``, ``message`` and ``type`` (``info``, ``success``, ``warning``
    or ``failure``) as JSON to a webhook of your own.

    That of the end is sent once, last in ``teardown``, when checkpoints are on the disk. An attempt that fails
    is repeated after 2 seconds; redirects are not followed, because they would send the message elsewhere. A
    message that can't be sent is a warning, and never ends the training.

    The address is a secret: it appears in no log (apprise's own is switched off), warning, error or ``repr``. In a
    study file, whose values are saved with each trial, name the environment variable that holds it.

    Args:
        url: The address, or ``"env:NAME"`` for the value of that environment variable.
        on: Which events to report, or ``"all"``: ``"fit_start"`` (of each fit, also one that resumes),
            ``"fit_end"`` (the run ended by itself, was stopped, interrupted or pruned), ``"exception"`` (training
            raised), ``"diverged"`` (it ended as diverged, which ``"fit_end"`` covers too).
        timeout_s: Seconds that all attempts to send may take together.
        retries: Further attempts after a failed one.
        message: Text sent along, such as a link.
        name: Name of the run.
        monitor: The metric that says which epoch is best.
        mode: ``"min"`` or ``"max"``.

    Raises:
        ImportError: apprise is not installed.
        ValueError: An argument is out of range; the message does not show the address.

    Example::

        Trainer(model, optimizer, loss, callbacks=[Notifier("env:NOTIFY", name="digits")])

        callbacks: {notifier: {url: "env:NOTIFY"}}  # in a study file
    """

    priority = 99
    rank_zero_only = True
    transient = ("_error", "_ended")

    def __init__(
        self,
        url: str,
        on: Sequence[str] | Literal["all"] = ("fit_end", "exception"),
        timeout_s: float = 60.0,
        retries: int = 3,
        message: str | None = None,
        *,
        name: str | None = None,
        monitor: str = "val_loss",
        mode: Mode = "min",
    ) -> None:
        wanted = tuple(_VERBS) if on == "all" else on
        if isinstance(wanted, str) or not wanted or not set(wanted) <= set(_VERBS):
            raise ValueError(f"on is {on!r}: give 'all', or a list of {', '.join(_VERBS)}")
        if not (math.isfinite(timeout_s) and timeout_s > 0) or retries < 0:
            raise ValueError(f"timeout_s is {timeout_s}, retries is {retries}: give above 0, and at least 0")
        check_mode(mode)
        self._sender = _sender(_address(url), retries)
        self.on = tuple(wanted)
        self.timeout_s = timeout_s
        self.retries = retries
        self.message = message
        self.run_name = name
        self.monitor = monitor
        self.mode: Mode = mode
        self._error: str | None = None
        self._ended = False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Forget an earlier error; send the message of the start if it is wanted."""
        self._error = None
        if "fit_start" in self.on:
            self._tell(trainer, "fit_start")

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Note the error of the training; pruning, and an interruption such as Ctrl-C, are no failures."""
        interrupted = trainer.state.stop_reason == INTERRUPTED or isinstance(error, KeyboardInterrupt)
        if not interrupted and trainer.state.stop_reason != PRUNED:
            self._error = error_text(error, _LONGEST_ERROR)

    def on_fit_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Note that it was a fit; how it has ended is only known after these hooks."""
        self._ended = True

    def teardown(self, trainer: TrainerView) -> None:
        """Send the message if it is wanted."""
        ended, self._ended = self._ended, False
        event = self._event(trainer)
        wanted = event in self.on or (event == DIVERGED and "fit_end" in self.on)
        if ended and wanted:
            self._tell(trainer, event)

    def _tell(self, trainer: TrainerView, event: Event) -> None:
        failure = self._send(event, *self._text(trainer, event))
        if failure:
            logger.warning("no message could be sent of %s: %s", event, failure)

    def _event(self, trainer: TrainerView) -> Event:
        if self._error is not None or trainer.state.stop_reason == ERROR:
            return "exception"
        return "diverged" if trainer.state.stop_reason == DIVERGED else "fit_end"

    def _text(self, trainer: TrainerView, event: Event) -> tuple[str, str]:
        """The message's title and body."""
        state = trainer.state
        title = (
            f"{self.run_name or 'training'} on {socket.gethostname()} {_VERBS[event]} after epoch "
            f"{state.epoch} of {state.max_epochs}"
        )
        best = best_epoch(state.history, self.monitor, self.mode, after=state.inherited)
        lines = (
            f"training on {trainer.device}" if event == "fit_start" else self._error,
            state.stop_reason if event == "fit_end" else "",
            state.metrics and f"last: {_listed(state.metrics)}",
            best and f"best (epoch {best}): {_listed(state.history[best - 1])}",
            self.message,
        )
        return title, "\n".join(line for line in lines if line)

    def _send(self, event: Event, title: str, body: str) -> str:
        """Send the message; returns what went wrong, without the address, or an empty text."""
        kind = {"fit_start": "info", "fit_end": "success", "diverged": "warning", "exception": "failure"}[event]
        try:
            sent = self._sender.notify(
                body=body, title=title, notify_type=kind, body_format="text", timeout=self.timeout_s
            )
        except Exception as error:  # noqa: BLE001 - the service must not change how training ended
            return type(error).__name__
        within = f"within {self.timeout_s:g} s and {self.retries + 1} attempts"
        return "" if sent else f"the service did not take it {within}; `apprise -vv -b test ADDRESS` says why"


def _address(url: str) -> str:
    """The address, read from the environment if ``url`` names a variable."""
    if not isinstance(url, str) or not url.startswith(_FROM_ENVIRONMENT):
        return url
    variable = url.removeprefix(_FROM_ENVIRONMENT)
    if not os.environ.get(variable):
        raise ValueError(f"url is {url!r}, but the environment variable {variable} is not set")
    return os.environ[variable]


def _sender(address: Any, retries: int) -> Apprise:
    """The object that sends to the address; no error or log may show the address."""
    try:
        from apprise import Apprise, AppriseAsset
    except ImportError as error:
        raise ImportError("Notifier needs the apprise package: pip install 'hpo-service[notify]'") from error
    asset = AppriseAsset(default_service_retry=retries, default_service_wait=_WAIT_S, http_redirects=False)
    sender = Apprise(asset=asset)
    # Both log the address at some level; apprise's threads do so even after the timeout.
    logging.getLogger("apprise").disabled = True
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # raised by imports of apprise's services
        sound = isinstance(address, str) and sender.add(address)
    if not sound:
        problem = "url is no address that apprise knows (it is not shown here)"
        raise ValueError(
            f"{problem}: see https://appriseit.com/services/; jsons://HOST/PATH is a webhook of your own"
        )
    return sender


def _listed(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
