"""Notifier with apprise against real servers on the loopback: what they get, and what if they don't take it."""

import json
import logging
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import PATIENCE
from tests.unit.trainer.support import (
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
        return f"json://127.0.0.1:{self.http.server_address[1]}"

    @property
    def url(self) -> str:
        return self.root + SECRET

    def hang(self, handler: Any) -> None:
        """Say nothing until the test is over."""
        self.released.wait(PATIENCE)

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


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.callbacks.notifier._WAIT_S", 0.0)


@pytest.fixture(autouse=True)
def _no_secret_is_told(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    caplog.set_level(logging.DEBUG)
    yield
    sent = [record.getMessage() + str(record.exc_info) for record in caplog.get_records("call")]
    assert "SECRET" not in "".join([*sent, *capfd.readouterr()])


def titles(server: Server) -> list[str]:
    """What the messages begin with, without the machine they come from."""
    return [body["title"].replace(f" on {socket.gethostname()}", "") for body in server.bodies]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def fail(trainer: Any) -> None:
    raise ZeroDivisionError("no <way>")


FAIL_IN_EPOCH_3 = At("on_train_batch_end", fail, lambda trainer: trainer.state.epoch == 2)


class TestWhatIsSent:
    def test_the_end_of_a_run_with_its_last_and_best_metrics(self, server: Server) -> None:
        run_scripted([Notifier(server.url, name="trial 3", message="see the page")], [3.0, 1.0, 2.5])
        (body,) = server.bodies
        assert body["title"] == f"trial 3 on {socket.gethostname()} ended after epoch 3 of 3"
        assert body["message"].splitlines() == [
            "last: train_loss 1, val_loss 2.5, lr 0.05",
            "best (epoch 2): train_loss 1, val_loss 1, lr 0.05",
            "see the page",
        ]
        assert body["type"] == "success"
        ((method, path, headers),) = server.requests
        assert (method, path, headers["Content-Type"]) == ("POST", SECRET.partition("?")[0], "application/json")

    def test_best_is_by_the_metric_and_the_direction_asked_for(self, server: Server) -> None:
        run_scripted([Notifier(server.url, monitor="train_loss", mode="max")], [3.0, 1.0], train=[5.0, 4.0])
        run_scripted([Notifier(server.url, monitor="absent")], [3.0, 1.0])
        assert "best (epoch 1)" in server.bodies[0]["message"]
        assert "best" not in server.bodies[1]["message"]

    def test_all_has_the_start_too_also_of_a_run_that_resumes(self, server: Server) -> None:
        trainer = run_scripted([Notifier(server.url, on="all")], [3.0, 1.0])
        trainer.plan = Plan(max_epochs=2)
        trainer.fit(one_batch(), one_batch())
        ended = "training ended after epoch 2 of 2"
        started = ["training started after epoch 0 of 2", "training started after epoch 2 of 2"]
        assert titles(server) == [started[0], ended, started[1], ended]
        assert [body["type"] for body in server.bodies] == ["info", "success"] * 2
        assert server.bodies[0]["message"] == "training on cpu"

    def test_an_exception_with_its_type_and_text_once(self, server: Server) -> None:
        with pytest.raises(ZeroDivisionError, match="no <way>"):
            run_scripted([Notifier(server.url), FAIL_IN_EPOCH_3], [3.0, 2.0, 1.0])
        assert titles(server) == ["training failed after epoch 2 of 3"]
        (body,) = server.bodies
        assert body["type"] == "failure"
        first, last, _ = body["message"].splitlines()
        assert first == "ZeroDivisionError: no <way>"
        assert "val_loss 2," in last

    def test_an_exception_before_the_first_epoch_has_no_metrics(self, server: Server) -> None:
        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url), At("on_fit_start", fail)], [3.0])
        assert titles(server) == ["training failed after epoch 0 of 1"]
        assert server.bodies[0]["message"] == "ZeroDivisionError: no <way>"

    def test_an_exception_of_a_run_that_was_about_to_stop_is_one(self, server: Server) -> None:
        failing = At("on_epoch_end", fail, lambda trainer: trainer.state.stop_reason is not None, priority=95)
        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url), EarlyStopping(patience=1), failing], [1.0, 2.0])
        assert titles(server) == ["training failed after epoch 2 of 2"]

    def test_a_very_long_error_is_cut(self, server: Server) -> None:
        def fail_at_length(trainer: Any) -> None:
            raise RuntimeError("x" * 100_000)

        with pytest.raises(RuntimeError):
            run_scripted([Notifier(server.url), At("on_fit_start", fail_at_length)], [3.0])
        assert len(server.bodies[0]["message"]) == 1000

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_diverged_run(self, bad: float, server: Server) -> None:
        run_scripted([Notifier(server.url), NaNDetection()], [3.0, bad])
        assert titles(server) == ["training diverged after epoch 2 of 2"]
        last, best = server.bodies[0]["message"].splitlines()
        assert f"val_loss {bad}," in last
        assert best.startswith("best (epoch 1)")
        assert server.bodies[0]["type"] == "warning"

    def test_a_pruned_run_has_ended_and_not_failed(self, server: Server) -> None:
        def prune(trainer: Any) -> None:
            trainer.state.stop("pruned")
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url), At("on_epoch_end", prune, priority=85)], [3.0, 2.0])
        assert titles(server) == ["training ended after epoch 1 of 2"]
        assert server.bodies[0]["message"].startswith("pruned\n")

    def test_an_interrupted_run_says_so(self, server: Server) -> None:
        make_trainer([Notifier(server.url), interrupt_at(4)]).fit(regression(), regression())
        assert server.bodies[0]["message"].startswith("interrupted\n")

    def test_a_run_that_ctrl_c_has_ended_has_not_failed(self, server: Server) -> None:
        def interrupt(trainer: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_scripted([Notifier(server.url), At("on_train_epoch_end", interrupt)], [3.0, 2.0])
        assert titles(server) == ["training ended after epoch 0 of 2"]
        assert server.bodies[0]["message"] == "interrupted"

    def test_two_fits_are_two_messages_and_an_error_is_not_carried_over(self, server: Server) -> None:
        trainer = scripted_trainer([Notifier(server.url), FAIL_IN_EPOCH_3], [3.0, 2.0, 1.0], [1.0] * 4)
        with pytest.raises(ZeroDivisionError):
            trainer.fit(one_batch(), one_batch())
        trainer.plan = Plan(max_epochs=2)
        trainer.fit(one_batch(), one_batch())
        assert [body["type"] for body in server.bodies] == ["failure", "success"]

    def test_it_comes_after_the_checkpoint_of_the_end(self, server: Server) -> None:
        seen: list[int] = []
        watch = At("on_fit_end", lambda trainer: seen.append(len(server.bodies)), priority=95)
        run_scripted([Notifier(server.url), watch], [3.0])
        assert (seen, len(server.bodies)) == ([0], 1)

    @pytest.mark.parametrize(("error", "sent"), [(OSError(), "failed"), (KeyboardInterrupt(), "ended")])
    def test_an_end_that_failed_is_said(self, error: BaseException, sent: str, server: Server) -> None:
        def fail(trainer: Any) -> None:
            raise error

        with pytest.raises(type(error)):
            run_scripted([Notifier(server.url), At("on_fit_end", fail, priority=99)], [3.0])
        assert titles(server) == [f"training {sent} after epoch 1 of 1"]
        assert server.bodies[0]["message"].startswith("interrupted\n") == (sent == "ended")

    def test_a_test_alone_sends_nothing(self, server: Server) -> None:
        notifier = Notifier(server.url)
        trainer = make_trainer([notifier])
        trainer.test(regression())
        notifier.teardown(trainer)
        assert server.bodies == []


class TestOn:
    def endings(self, server: Server, on: tuple[str, ...]) -> list[str]:
        run_scripted([Notifier(server.url, on=on)], [3.0])
        run_scripted([Notifier(server.url, on=on), NaNDetection()], [math.nan])
        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url, on=on), FAIL_IN_EPOCH_3], [3.0, 2.0, 1.0])
        return [title.split()[1] for title in titles(server)]

    @pytest.mark.parametrize(
        ("on", "sent"),
        [
            (("fit_end", "exception"), ["ended", "diverged", "failed"]),
            (("fit_end",), ["ended", "diverged"]),
            (("exception",), ["failed"]),
            (("diverged",), ["diverged"]),
            (("diverged", "exception"), ["diverged", "failed"]),
        ],
    )
    def test_only_what_was_asked_for_is_told(self, on: tuple[str, ...], sent: list[str], server: Server) -> None:
        assert self.endings(server, on) == sent


class TestRetries:
    def run(self, url: str, **options: Any) -> None:
        trainer = run_scripted([Notifier(url, **options)], [3.0, 2.0])
        assert (trainer.state.epoch, trainer.state.stop_reason) == (2, None)

    @pytest.mark.parametrize("answer", [(500, {}), (503, {}), (429, {}), hang_up, talk_nonsense])
    def test_a_failure_is_tried_again(
        self, answer: Answer, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.answers = [answer]
        self.run(server.url)
        assert (len(server.bodies), warnings(caplog)) == (2, [])
        assert server.bodies[0] == server.bodies[1]

    def test_attempts_are_bounded_and_what_fails_is_said_once(
        self, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.answers = [(500, {})] * 20
        self.run(server.url, retries=2)
        assert len(server.bodies) == 3
        (warning,) = warnings(caplog)
        problem = "no message could be sent of fit_end: the service did not take it within 60 s and 3 attempts"
        assert warning == f"{problem}; `apprise -vv -b test ADDRESS` says why"

    def test_the_time_of_all_attempts_is_bounded(self, server: Server, caplog: pytest.LogCaptureFixture) -> None:
        server.answers = [server.hang] * 20
        self.run(server.url, timeout_s=0.2)  # a hanging server is given up after seconds by the attempt itself
        assert len(server.bodies) == 1
        assert "within 0.2 s" in warnings(caplog)[0]

    def test_a_refused_connection_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        with socket.socket() as taken:  # bound, but not listening
            taken.bind(("127.0.0.1", 0))
            self.run(f"json://127.0.0.1:{taken.getsockname()[1]}{SECRET}")
        assert len(warnings(caplog)) == 1

    def test_an_error_of_the_service_s_own_is_said_by_its_type(
        self, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(*arguments: Any, **options: Any) -> None:
            raise RuntimeError("SECRET")

        monkeypatch.setattr("apprise.Apprise.notify", broken)
        self.run(server.url)
        assert warnings(caplog) == ["no message could be sent of fit_end: RuntimeError"]

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    def test_redirects_are_not_followed(
        self, status: int, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.answers = [(status, {"Location": server.root.replace("json:", "http:") + "/elsewhere"})]
        self.run(server.url, retries=0)
        assert [path for _, path, _ in server.requests] == [SECRET.partition("?")[0]]
        assert len(warnings(caplog)) == 1

    def test_a_failed_message_leaves_the_error_of_training_as_it_is(
        self, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        server.answers = [(404, {})]
        with pytest.raises(ZeroDivisionError):
            run_scripted([Notifier(server.url, retries=0), FAIL_IN_EPOCH_3], [3.0, 2.0, 1.0])
        assert warnings(caplog)[0].startswith("no message could be sent of exception: ")


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
            "SECRET",
            "",
            "https://host/SECRET",
            "json://",
            "nonsense://user:SECRET@host/",
            None,
            b"json://host/SECRET",
        ],
    )
    def test_what_is_no_address_is_refused_without_being_shown(self, url: Any) -> None:
        with pytest.raises(ValueError, match="not shown here") as caught:
            Notifier(url)
        assert "CRET" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__context__ is None

    @pytest.mark.parametrize(
        "options",
        [
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
            Notifier("jsons://host" + SECRET, **options)
        assert "SECRET" not in str(caught.value)

    def test_its_repr_and_name_do_not_show_the_url(self) -> None:
        notifier = Notifier("jsons://host" + SECRET)
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


def test_without_apprise_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ImportError, match=r"pip install 'hpo-service\[notify\]'"):
        Notifier("jsons://host")
