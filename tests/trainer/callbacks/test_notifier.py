"""Notifier against real servers on the loopback: what they get, and what happens when they don't take it."""

import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    one_batch,
    regression,
    run_scripted,
    scripted_trainer,
)
from trainer import Callback
from trainer.callbacks.checkpoint import Checkpoint
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.callbacks.nan_detection import NaNDetection
from trainer.callbacks.notifier import Notifier
from trainer.data.plan import Plan

SECRET = "/services/T000/SECRET?token=SECRET"

#: A status and its headers, or something to do with the request in place of an answer.
Answer = tuple[int, dict[str, str]] | Callable[[Any], None]


class Server:
    """A webhook that gives scripted answers, 200 after them, and keeps what it was sent."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.bodies: list[Any] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.released = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.bodies.append(json.loads(body, parse_constant=_refuse))
                server.requests.append((self.command, self.path, dict(self.headers)))
                answer = server.answers.pop(0) if server.answers else (200, {})
                if callable(answer):
                    answer(self)
                    return
                self.send_response(answer[0])
                for name, value in answer[1].items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"ok")

            def do_GET(self) -> None:
                server.requests.append((self.command, self.path, {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    @property
    def url(self) -> str:
        return self.root + SECRET

    def hang(self, handler: Any) -> None:
        """Say nothing until the test is over."""
        self.released.wait(30)

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def hang_up(handler: Any) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def talk_nonsense(handler: Any) -> None:
    handler.wfile.write(b"nonsense\r\n\r\n")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server()
    yield server
    server.close()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was waited for, without waiting."""
    waits: list[float] = []
    monkeypatch.setattr("trainer.callbacks.notifier.sleep", waits.append)
    return waits


@pytest.fixture(autouse=True)
def _no_secret_is_told(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    told = [record.getMessage() + str(record.exc_info) for record in caplog.get_records("call")]
    assert "SECRET" not in "".join([*told, *capfd.readouterr()])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def fail(trainer: Any) -> None:
    raise ZeroDivisionError("no <way>")


FAIL_IN_EPOCH_3 = At("on_train_batch_end", fail, lambda trainer: trainer.state.epoch == 2)


class TestWhatIsSent:
    def test_the_end_of_a_run_with_its_last_and_best_metrics(self, server: Server) -> None:
        notifier = Notifier(server.url, name="trial 3", message="see the page")
        trainer = run_scripted([notifier], [3.0, 1.0, 2.0])
        history = trainer.state.history
        assert server.bodies == [
            {
                "event": "fit_end",
                "run": "trial 3",
                "host": socket.gethostname(),
                "epoch": 3,
                "max_epochs": 3,
                "reason": None,
                "error": None,
                "metrics": history[2],
                "best": {"epoch": 2, "metrics": history[1]},
                "message": "see the page",
            }
        ]
        ((method, path, headers),) = server.requests
        assert (method, path, headers["Content-Type"]) == ("POST", SECRET, "application/json")

    def test_best_is_by_the_metric_and_the_direction_asked_for(self, server: Server) -> None:
        run_scripted([Notifier(server.url, monitor="train_loss", mode="max")], [3.0, 1.0], train=[5.0, 4.0])
        run_scripted([Notifier(server.url, monitor="absent")], [3.0, 1.0])
        assert server.bodies[0]["best"]["epoch"] == 1
        assert server.bodies[1]["best"] is None

    def test_an_exception_with_its_type_and_text_once(self, server: Server) -> None:
        with pytest.raises(ZeroDivisionError, match="no <way>"):
            run_scripted([Notifier(server.url), FAIL_IN_EPOCH_3], [3.0, 2.0, 1.0])
        (body,) = server.bodies
        assert (body["event"], body["reason"], body["epoch"]) == ("exception", "error", 2)
        assert body["error"] == "ZeroDivisionError: no <way>"
        assert body["metrics"]["val_loss"] == 2.0

    def test_an_exception_before_the_first_epoch_has_no_metrics(self, server: Server) -> None:
        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url), At("on_fit_start", fail)], [3.0])
        (body,) = server.bodies
        assert (body["event"], body["epoch"], body["metrics"], body["best"]) == ("exception", 0, {}, None)

    def test_an_exception_of_a_run_that_was_about_to_stop_is_one(self, server: Server) -> None:
        failing = At("on_epoch_end", fail, lambda trainer: trainer.state.stop_reason is not None, priority=95)
        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url), EarlyStopping(patience=1), failing], [1.0, 2.0])
        assert [(body["event"], body["reason"]) for body in server.bodies] == [("exception", "error")]

    def test_a_very_long_error_is_cut(self, server: Server) -> None:
        def fail_at_length(trainer: Any) -> None:
            raise RuntimeError("x" * 100_000)

        with pytest.raises(RuntimeError):
            run_scripted([Notifier(server.url), At("on_fit_start", fail_at_length)], [3.0])
        assert len(server.bodies[0]["error"]) == 1000

    @pytest.mark.parametrize(
        ("bad", "told"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")]
    )
    def test_a_diverged_run_in_strict_json(self, bad: float, told: str, server: Server) -> None:
        run_scripted([Notifier(server.url), NaNDetection()], [3.0, bad])
        (body,) = server.bodies
        assert (body["event"], body["reason"], body["epoch"]) == ("diverged", "diverged", 2)
        assert body["metrics"]["val_loss"] == told
        assert body["best"]["epoch"] == 1

    def test_a_pruned_run_has_ended_and_not_failed(self, server: Server) -> None:
        def prune(trainer: Any) -> None:
            trainer.state.stop("pruned")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url), At("on_epoch_end", prune, priority=85)], [3.0, 2.0])
        assert [(body["event"], body["reason"], body["error"]) for body in server.bodies] == [
            ("fit_end", "pruned", None)
        ]

    def test_an_interrupted_run_says_so(self, server: Server) -> None:
        make_trainer([Notifier(server.url), interrupt_at(4)]).fit(regression(), regression())
        assert [(body["event"], body["reason"], body["epoch"]) for body in server.bodies] == [
            ("fit_end", "interrupted", 1)
        ]

    def test_two_fits_are_two_messages_and_an_error_is_not_carried_over(self, server: Server) -> None:
        trainer = scripted_trainer([Notifier(server.url), FAIL_IN_EPOCH_3], [3.0, 2.0, 1.0], [1.0] * 4)
        with pytest.raises(ZeroDivisionError):
            trainer.fit(one_batch(), one_batch())
        trainer.plan = Plan(max_epochs=2)
        trainer.fit(one_batch(), one_batch())
        assert [body["event"] for body in server.bodies] == ["exception", "fit_end"]

    def test_it_comes_after_the_checkpoint_of_the_end(self, server: Server) -> None:
        seen: list[int] = []
        watch = At("on_fit_end", lambda trainer: seen.append(len(server.bodies)), priority=95)
        run_scripted([Notifier(server.url), watch], [3.0])
        assert (seen, len(server.bodies)) == ([0], 1)

    def test_a_test_alone_sends_nothing(self, server: Server) -> None:
        notifier = Notifier(server.url)
        trainer = make_trainer([notifier])
        trainer.test(regression())
        notifier.teardown(trainer)
        assert server.bodies == []


class TestOn:
    def events(self, server: Server, on: tuple[str, ...]) -> list[str]:
        run_scripted([Notifier(server.url, on=on)], [3.0])
        run_scripted([Notifier(server.url, on=on), NaNDetection()], [math.nan])
        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url, on=on), FAIL_IN_EPOCH_3], [3.0, 2.0, 1.0])
        return [body["event"] for body in server.bodies]

    @pytest.mark.parametrize(
        ("on", "told"),
        [
            (("fit_end", "exception"), ["fit_end", "diverged", "exception"]),
            (("fit_end",), ["fit_end", "diverged"]),
            (("exception",), ["exception"]),
            (("diverged",), ["diverged"]),
            (("diverged", "exception"), ["diverged", "exception"]),
        ],
    )
    def test_only_what_was_asked_for_is_told(self, on: tuple[str, ...], told: list[str], server: Server) -> None:
        assert self.events(server, on) == told


class TestSlack:
    def test_the_end_is_told_in_its_form(self, server: Server) -> None:
        options: dict[str, Any] = {"format": "slack", "name": "a<b", "message": "<!channel> look"}
        run_scripted([Notifier(server.url, **options), EarlyStopping(patience=1)], [1.0, 2.5, 3.0])
        assert server.bodies == [
            {
                "text": f"a&lt;b on {socket.gethostname()} ended after epoch 2 of 3: early_stopping\n"
                "last: train_loss 1, val_loss 2.5, lr 0.05\n"
                "best (epoch 1): train_loss 1, val_loss 1, lr 0.05\n"
                "<!channel> look"
            }
        ]

    def test_an_exception_is_told_with_its_text(self, server: Server) -> None:
        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url, "slack"), FAIL_IN_EPOCH_3], [3.0, 2.0, 1.0])
        first, *_ = server.bodies[0]["text"].splitlines()
        ending = "failed after epoch 2 of 3: ZeroDivisionError: no &lt;way&gt;"
        assert first == f"training on {socket.gethostname()} {ending}"

    def test_a_diverged_run_without_a_best_epoch(self, server: Server) -> None:
        run_scripted([Notifier(server.url, "slack"), NaNDetection()], [math.nan, 1.0])
        assert server.bodies[0]["text"].splitlines() == [
            f"training on {socket.gethostname()} diverged after epoch 1 of 2",
            "last: train_loss 1, val_loss NaN, lr 0.05",
        ]


class TestRetries:
    def run(self, url: str, **options: Any) -> None:
        trainer = run_scripted([Notifier(url, **options)], [3.0, 2.0])
        assert (trainer.state.epoch, trainer.state.stop_reason) == (2, None)

    @pytest.mark.parametrize("answer", [(500, {}), (503, {}), (429, {}), hang_up, talk_nonsense])
    def test_a_failure_that_may_pass_is_tried_again(
        self, answer: Answer, server: Server, slept: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        server.answers = [answer]
        self.run(server.url)
        assert (len(server.bodies), slept, warnings(caplog)) == (2, [1.0], [])
        assert server.bodies[0] == server.bodies[1]

    def test_waits_double_until_the_attempts_are_used_up(
        self, server: Server, slept: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        server.answers = [(500, {})] * 20
        self.run(server.url)
        assert (len(server.bodies), slept) == (4, [1.0, 2.0, 4.0])
        assert warnings(caplog) == ["the webhook was not told of fit_end: HTTP status 500 (attempt 4)"]
        self.run(server.url, retries=8)
        assert slept[3:] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
    def test_a_refusal_is_final(
        self, status: int, server: Server, slept: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        server.answers = [(status, {})]
        self.run(server.url)
        assert (len(server.bodies), slept) == (1, [])
        assert warnings(caplog) == [f"the webhook was not told of fit_end: HTTP status {status} (attempt 1)"]

    @pytest.mark.parametrize(
        ("header", "waits"),
        [("7", [7.0]), ("0", [0.0]), ("61", []), ("soon", [1.0]), ("-3", [1.0]), ("", [1.0])],
    )
    @pytest.mark.parametrize("status", [429, 503])
    def test_the_server_may_say_how_long_to_wait(
        self, status: int, header: str, waits: list[float], server: Server, slept: list[float]
    ) -> None:
        server.answers = [(status, {"Retry-After": header})]
        self.run(server.url)
        assert slept == waits
        assert len(server.bodies) == 1 + len(waits)

    def test_it_may_say_until_when(self, server: Server, slept: list[float]) -> None:
        server.answers = [
            (429, {"Retry-After": formatdate(time.time() + 30, usegmt=True)}),
            (429, {"Retry-After": formatdate(time.time() - 30, usegmt=True)}),
        ]
        self.run(server.url)
        assert 20 < slept[0] <= 30
        assert slept[1:] == [0.0]

    def test_a_server_that_says_nothing_is_given_up(
        self, server: Server, slept: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        server.answers = [server.hang, server.hang]
        self.run(server.url, timeout_s=0.05, retries=1)
        assert (len(server.bodies), slept) == (2, [1.0])
        assert warnings(caplog) == ["the webhook was not told of fit_end: TimeoutError (attempt 2)"]

    def test_a_refused_connection_is_tried_again_and_told(
        self, slept: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        with socket.socket() as taken:  # bound, but nobody listens
            taken.bind(("127.0.0.1", 0))
            self.run(f"http://127.0.0.1:{taken.getsockname()[1]}{SECRET}")
        assert slept == [1.0, 2.0, 4.0]
        assert warnings(caplog) == ["the webhook was not told of fit_end: ConnectionRefusedError (attempt 4)"]

    def test_a_host_that_is_not_found_is_told(
        self, slept: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def not_found(*arguments: Any, **options: Any) -> None:
            raise socket.gaierror(-2, "Name or service not known: SECRET")

        monkeypatch.setattr(socket, "getaddrinfo", not_found)
        self.run("https://SECRET.example/", retries=0)
        assert warnings(caplog) == ["the webhook was not told of fit_end: gaierror (attempt 1)"]

    def test_no_encrypted_connection_to_a_server_without_one(
        self, server: Server, slept: list[float], caplog: pytest.LogCaptureFixture
    ) -> None:
        self.run(server.url.replace("http:", "https:"), retries=0)
        (warning,) = warnings(caplog)
        assert warning == "the webhook was not told of fit_end: SSLError (attempt 1)"

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    @pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/x", "{root}/elsewhere"])
    def test_redirects_are_not_followed(
        self, status: int, target: str, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.answers = [(status, {"Location": target.format(root=server.root)})]
        self.run(server.url)
        assert [path for _, path, _ in server.requests] == [SECRET]
        assert warnings(caplog) == [f"the webhook was not told of fit_end: HTTP status {status} (attempt 1)"]

    def test_a_failed_message_leaves_the_error_of_training_as_it_is(
        self, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.answers = [(404, {})]
        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url), FAIL_IN_EPOCH_3], [3.0, 2.0, 1.0])
        assert warnings(caplog) == ["the webhook was not told of exception: HTTP status 404 (attempt 1)"]


def test_training_is_the_same_with_it(server: Server, tmp_path: Path) -> None:
    def trained(*callbacks: Callback) -> Any:
        trainer = make_trainer([*callbacks, Checkpoint(tmp_path)])
        trainer.fit(regression(), regression())
        return frozen(trainer)

    assert_same(trained(Notifier(server.url)), trained())


class TestArguments:
    @pytest.mark.parametrize(
        "url",
        [
            "ftp://host/SECRET",
            "file:///SECRET",
            "SECRET",
            "",
            "https:///SECRET",
            "https://host:port/SECRET",
            "https://host:0/SECRET",
            "https://host:99999/SECRET",
            "https://user:SECRET@host/",
            "https://[host/SECRET",
            "https://host/SE CRET",
            "https://host/SECRET\n",
            "https://host/SECRET\u00e9",
            None,
            b"https://host/SECRET",
        ],
    )
    def test_what_is_no_webhook_is_refused_without_being_shown(self, url: Any) -> None:
        with pytest.raises(ValueError, match="not shown here") as caught:
            Notifier(url)
        assert "CRET" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None

    @pytest.mark.parametrize(
        "options",
        [
            {"format": "xml"},
            {"on": ()},
            {"on": "exception"},
            {"on": ("exceptions",)},
            {"timeout_s": 0.0},
            {"timeout_s": math.nan},
            {"timeout_s": math.inf},
            {"retries": -1},
            {"mode": "up"},
        ],
        ids=str,
    )
    def test_settings_that_make_no_sense_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(options))) as caught:
            Notifier("https://host" + SECRET, **options)
        assert "SECRET" not in str(caught.value)

    def test_its_repr_and_name_do_not_show_the_url(self) -> None:
        notifier = Notifier("https://host" + SECRET)
        assert "SECRET" not in f"{notifier!r} {notifier} {notifier.name} {notifier.state_dict()}"


def test_the_url_may_lie_in_an_environment_variable(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_WEBHOOK", server.url)
    run_scripted([Notifier("env:MY_WEBHOOK")], [3.0])
    assert len(server.requests) == 1


@pytest.mark.parametrize("value", [None, ""])
def test_an_environment_variable_that_is_not_set_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("MY_WEBHOOK", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_WEBHOOK", value)
    with pytest.raises(ValueError, match="the environment variable MY_WEBHOOK is not set"):
        Notifier("env:MY_WEBHOOK")
