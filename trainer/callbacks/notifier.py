"""Notifier: a message to a webhook when training ends."""

from __future__ import annotations

import email.utils
import http.client
import json
import logging
import math
import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Any, Final, Literal

from trainer.callback import Callback, TrainerView
from trainer.error_text import error_text
from trainer.files import json_number
from trainer.state import DIVERGED, PRUNED, Mode, best_epoch

logger = logging.getLogger(__name__)

_FROM_ENVIRONMENT: Final = "env:"
EVENTS: Final = ("fit_end", "exception", "diverged")

_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_LONGEST_WAIT_S = 60.0
_LONGEST_ERROR = 1000


class Notifier(Callback):
    """Tells a webhook that training has ended: what happened, where, after how many epochs, with which metrics.

    ``"json"`` posts an object with ``event``, ``run``, ``host``, ``epoch``, ``max_epochs``, ``reason`` (why the
    run ended, null after all its epochs), ``error`` (type and text of the exception, or null), ``metrics`` (of
    the latest epoch), ``best`` (``epoch`` and ``metrics`` of the best one, or null) and ``message``. Numbers that
    are not finite are ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``. ``"slack"`` posts the same as text in the
    form of Slack's incoming webhooks, ``{"text": …}`` (https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks).

    It is sent once, last in ``on_fit_end``, when checkpoints are on the disk. A connection that fails, status 429
    and 5xx are tried again, after 1, 2, 4, … seconds or what ``Retry-After`` says (up to 60). Any other status
    is final, redirects included: they would lose the message, or send it elsewhere. A notification that fails
    is a warning and never ends the training; with the defaults it has failed within about a minute, unless the
    server asks for longer waits.

    The URL is a secret: it appears in no warning, error or ``repr``. In a study file, whose values are saved with
    each trial, name the environment variable that holds it.

    Args:
        url: The webhook, ``http`` or ``https``; or ``"env:NAME"``: what that environment variable holds.
        format: ``"json"`` or ``"slack"``.
        on: What to tell: ``"fit_end"`` (the run ended by itself, was stopped or pruned), ``"exception"``
            (training raised), ``"diverged"`` (it ended as diverged, which ``"fit_end"`` covers too).
        timeout_s: Seconds that connecting, and each answer, may take.
        retries: Further attempts.
        message: Text sent along, such as a link; in Slack's markup, so that it can mention somebody.
        name: Name of the run.
        monitor: The metric that says which epoch is best.
        mode: ``"min"`` or ``"max"``.

    Raises:
        ValueError: An argument is out of range; the message does not show the URL.

    Example::

        Trainer(model, optimizer, loss, callbacks=[Notifier("env:WEBHOOK", "slack", name="digits")])

        callbacks: {notifier: {url: "env:WEBHOOK", format: slack}}  # in a study file
    """

    priority = 99
    rank_zero_only = True
    transient = ("_error",)

    def __init__(
        self,
        url: str,
        format: Literal["json", "slack"] = "json",  # noqa: A002 - what it is called everywhere
        on: Sequence[str] = ("fit_end", "exception"),
        timeout_s: float = 5.0,
        retries: int = 3,
        message: str | None = None,
        *,
        name: str | None = None,
        monitor: str = "val_loss",
        mode: Mode = "min",
    ) -> None:
        address = _address(url)
        _check_url(address)
        if format not in {"json", "slack"}:
            raise ValueError(f"format is {format!r}: give 'json' or 'slack'")
        if isinstance(on, str) or not on or not set(on) <= set(EVENTS):
            raise ValueError(f"on is {on!r}: give a list of {', '.join(EVENTS)}")
        if not (math.isfinite(timeout_s) and timeout_s > 0) or retries < 0:
            raise ValueError(f"timeout_s is {timeout_s}, retries is {retries}: give above 0, and at least 0")
        if mode not in {"min", "max"}:
            raise ValueError(f"mode is {mode!r}: give 'min' or 'max'")
        self._url = address
        self.format = format
        self.on = tuple(on)
        self.timeout_s = timeout_s
        self.retries = retries
        self.message = message
        self.run_name = name
        self.monitor = monitor
        self.mode: Mode = mode
        self._error: str | None = None

    def on_fit_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Nothing has gone wrong in this fit yet."""
        self._error = None

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Note what training died of; to prune a run, it is raised too, and is no failure."""
        if trainer.state.stop_reason != PRUNED:
            self._error = error_text(error, _LONGEST_ERROR)

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Send the message if it is wanted."""
        event = self._event(trainer)
        if event not in self.on and not (event == DIVERGED and "fit_end" in self.on):
            return
        report = self._report(trainer, event)
        content = {"text": _text(report)} if self.format == "slack" else report
        failure = self._send(json.dumps(content, allow_nan=False).encode())
        if failure is not None:
            logger.warning("the webhook was not told of %s: %s", event, failure)

    def _event(self, trainer: TrainerView) -> str:
        if self._error is not None:
            return "exception"
        return DIVERGED if trainer.state.stop_reason == DIVERGED else "fit_end"

    def _report(self, trainer: TrainerView, event: str) -> dict[str, Any]:
        state = trainer.state
        best = best_epoch(state.history, self.monitor, self.mode)
        return {
            "event": event,
            "run": self.run_name,
            "host": socket.gethostname(),
            "epoch": state.epoch,
            "max_epochs": state.max_epochs,
            "reason": state.stop_reason,
            "error": self._error,
            "metrics": _numbers(state.metrics),
            "best": None if best is None else {"epoch": best, "metrics": _numbers(state.history[best - 1])},
            "message": self.message,
        }

    def _send(self, body: bytes) -> str | None:
        """Post until it is taken; returns what went wrong at last."""
        failure, attempts = self._post(body), 1
        while failure is not None and failure.again and attempts <= self.retries:
            wait = min(2.0 ** (attempts - 1), _LONGEST_WAIT_S) if failure.wait_s is None else failure.wait_s
            if wait > _LONGEST_WAIT_S:
                break
            sleep(wait)
            failure, attempts = self._post(body), attempts + 1
        return None if failure is None else f"{failure.what} (attempt {attempts})"

    def _post(self, body: bytes) -> _Failure | None:
        headers = {"Content-Type": "application/json", "User-Agent": "trainer-notifier"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        try:
            with _opener().open(request, timeout=self.timeout_s):
                return None
        except urllib.error.HTTPError as error:
            with error:
                again = error.code == _TOO_MANY_REQUESTS or error.code >= _SERVER_ERROR
                return _Failure(f"HTTP status {error.code}", again, _retry_after(error.headers.get("Retry-After")))
        except (OSError, http.client.HTTPException) as error:
            # Their types only: texts of the libraries can hold parts of the URL.
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            return _Failure(type(cause).__name__ if isinstance(cause, Exception) else "no connection", again=True)


@dataclass(frozen=True)
class _Failure:
    what: str
    again: bool
    wait_s: float | None = None


def _address(url: str) -> str:
    """The webhook itself, where an environment variable is named."""
    if not isinstance(url, str) or not url.startswith(_FROM_ENVIRONMENT):
        return url
    variable = url.removeprefix(_FROM_ENVIRONMENT)
    if not os.environ.get(variable):
        raise ValueError(f"url is {url!r}, but the environment variable {variable} is not set")
    return os.environ[variable]


def _check_url(url: str) -> None:
    """Refuse what is no webhook; nothing of it may be shown."""
    try:
        parts = urllib.parse.urlsplit(url)
        sound = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except (ValueError, AttributeError, TypeError):
        sound = False
    if not sound or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(
            "url is no webhook (it is not shown here): give a URL that begins with https:// or http://"
        )
    if parts.username is not None:
        raise ValueError("url holds a user name (it is not shown here), which is not supported: leave it out")


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS, through the environment's proxies; no other scheme, and no redirects."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def _retry_after(header: str | None) -> float | None:
    """Seconds, from a number of them or a date (RFC 9110, 10.2.3); None where the server says nothing usable."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None


def _numbers(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: json_number(float(value)) for name, value in metrics.items()}


_ENDINGS: Final = {"exception": "failed", DIVERGED: "diverged", "fit_end": "ended"}


def _text(report: Mapping[str, Any]) -> str:
    """The report for people, in Slack's markup."""
    cause = report["error"] or ("" if report["event"] == DIVERGED else report["reason"])
    lines = [
        _escaped(
            f"{report['run'] or 'training'} on {report['host']} {_ENDINGS[report['event']]} after epoch "
            f"{report['epoch']} of {report['max_epochs']}" + (f": {cause}" if cause else "")
        )
    ]
    if report["metrics"]:
        lines.append(_escaped(f"last: {_listed(report['metrics'])}"))
    if report["best"]:
        lines.append(_escaped(f"best (epoch {report['best']['epoch']}): {_listed(report['best']['metrics'])}"))
    if report["message"]:
        lines.append(report["message"])
    return "\n".join(lines)


def _listed(metrics: Mapping[str, float | str]) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str) else format(value, '.4g')}" for name, value in metrics.items()
    )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
