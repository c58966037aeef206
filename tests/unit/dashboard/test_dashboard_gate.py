"""The dashboard's gate: who gets in, from where, and what browsers are sent; without a server in between."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPMessage
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest

from hpo.dashboard.gate import Gate, allowed_hosts, is_loopback, link_host
from hpo.dashboard.login import SESSION_SECONDS, Login
from tests.support.commands import hpo
from tests.support.studies import Studies

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

TOKEN = "a-token-of-some-length"
HOME = "/dashboard/studies/7"


@dataclass
class Clock:
    """Time that passes only on request."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: HTTPMessage
    text: str

    @property
    def cookie(self) -> str:
        """The cookie to send from then on."""
        return self.headers["Set-Cookie"].partition(";")[0]


class Behind:
    """An application that keeps what reaches it."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        self.reached.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        headers = [
            ("Content-Type", "text/plain"),
            ("Access-Control-Allow-Origin", "*"),
            ("Cache-Control", "public"),
        ]
        if environ["PATH_INFO"].startswith("/dashboard"):
            headers.append(("Content-Security-Policy", "script-src 'self' 'unsafe-eval'"))
        start_response("200 OK", headers)
        return [b"behind"]


@dataclass
class Visitor:
    """Sends requests to a gate."""

    gate: Gate

    def __call__(self, method: str, path: str, form: dict[str, str] | None = None, /, **headers: str) -> Answer:
        body = urlencode(form or {}).encode()
        path, _, query = path.partition("?")
        environ: dict[str, Any] = {
            "REQUEST_METHOD": method,
            "SCRIPT_NAME": "",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "SERVER_PORT": "8080",
            "HTTP_HOST": "localhost:8080",
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
        }
        environ |= {f"HTTP_{name.upper()}": value for name, value in headers.items()}
        setup_testing_defaults(environ)
        got: dict[str, Any] = {}

        def start(status: str, pairs: list[tuple[str, str]], exc_info: Any = None) -> Any:
            got["status"], got["headers"] = int(status[:3]), HTTPMessage()
            for name, value in pairs:
                got["headers"][name] = value
            return None

        parts = validator(self.gate)(environ, start)
        text = b"".join(parts).decode()
        parts.close()  # type: ignore[attr-defined]
        return Answer(got["status"], got["headers"], text)


def visitor(token: str | None = TOKEN, clock: Clock | None = None, **options: Any) -> tuple[Visitor, Behind]:
    behind = Behind()
    login = None if token is None else Login(token, clock or Clock())
    hosts = allowed_hosts("127.0.0.1", ["hpo.example"])
    gate = Gate(behind, hosts, frozenset({"hpo.example"}), login, home=HOME, **options)
    return Visitor(gate), behind


def logged_in(visit: Visitor) -> str:
    return visit("POST", "/login", {"token": TOKEN}).cookie


# ---- the token


def test_nothing_is_reached_without_logging_in() -> None:
    visit, behind = visitor()
    page = visit("GET", "/dashboard/studies/1?x=1&y=a%20b", accept="text/html")
    assert page.status == 303
    assert page.headers["Location"] == "/login?next=" + quote("/dashboard/studies/1?x=1&y=a%20b", safe="")
    for method, path in (("GET", "/api/studies"), ("DELETE", "/api/studies/1"), ("GET", "/static/bundle.js")):
        refused = visit(method, path, cookie="hpo_session_8080=made-up")
        assert refused.status == 401
        assert json.loads(refused.text)["reason"].startswith("Log in first")
    assert visit("HEAD", "/").text == ""
    assert behind.reached == []


def test_the_form_lets_in_who_knows_the_token_and_leads_on() -> None:
    visit, behind = visitor()
    form = visit("GET", "/login?next=%2Fdashboard%2Fstudies%2F1%3Fx%3D%22%3E")
    assert 'name="next" value="/dashboard/studies/1?x=&quot;&gt;"' in form.text
    wrong = visit("POST", "/login", {"token": TOKEN + "x", "next": "/dashboard"})
    assert (wrong.status, wrong.headers["Set-Cookie"]) == (403, None)
    assert "This is not the token" in wrong.text
    right = visit("POST", "/login", {"token": TOKEN, "next": "/dashboard/studies/1"})
    assert right.status == 200
    assert 'content="0;url=/dashboard/studies/1"' in right.text
    attributes = right.headers["Set-Cookie"].split("; ")
    assert attributes[1:] == ["Path=/", f"Max-Age={SESSION_SECONDS}", "HttpOnly", "SameSite=Strict"]
    assert TOKEN not in right.text + right.cookie
    assert visit("GET", "/api/studies", cookie=f"other=1; {right.cookie}").text == "behind"
    assert behind.reached == ["GET /api/studies"]


def test_the_link_lets_in_and_leads_to_where_no_token_is_in_the_address() -> None:
    visit, _ = visitor()
    page = visit("GET", f"/?token={TOKEN}")
    assert f'content="0;url={HOME}"' in page.text
    assert visit("GET", "/api/studies", cookie=page.cookie).status == 200
    assert 'content="0;url=/dashboard?a=1"' in visit("GET", f"/dashboard?a=1&token={TOKEN}").text
    assert visit("GET", "/?token=wrong-token").status == 403
    assert visit("GET", "/?token=%C3%A4%00").status == 403


def test_behind_a_proxy_that_encrypts_the_cookie_stays_encrypted() -> None:
    visit, _ = visitor()
    assert visit("GET", f"/?token={TOKEN}", x_forwarded_proto="https").headers["Set-Cookie"].endswith("; Secure")


@pytest.mark.parametrize(
    "target", ["https://evil.example/", "//evil.example", "/\\evil.example", "/login", "/a\nb", "", "/"]
)
def test_a_log_in_leads_nowhere_else(target: str) -> None:
    visit, _ = visitor()
    assert f'content="0;url={HOME}"' in visit("POST", "/login", {"token": TOKEN, "next": target}).text


def test_a_session_ends_by_time_and_by_logging_out() -> None:
    clock = Clock()
    visit, _ = visitor(clock=clock)
    first, second = logged_in(visit), logged_in(visit)
    assert first != second
    assert "Log out" in visit("GET", "/logout", cookie=first).text
    out = visit("POST", "/logout", cookie=first)
    assert (out.status, out.headers["Location"]) == (303, "/login")
    assert "Max-Age=0" in out.headers["Set-Cookie"]
    assert visit("GET", "/api/studies", cookie=first).status == 401
    assert visit("GET", "/api/studies", cookie=second).status == 200
    clock.now += SESSION_SECONDS
    assert visit("GET", "/api/studies", cookie=second).status == 401


def test_guesses_are_slowed_down_for_all_visitors() -> None:
    clock = Clock()
    visit, _ = visitor(clock=clock)
    assert [visit("POST", "/login", {"token": f"guess-{n}"}).status for n in range(12)] == [403] * 10 + [429] * 2
    # It is not looked at, right or wrong.
    refused = visit("POST", "/login", {"token": TOKEN})
    assert (refused.status, refused.headers["Retry-After"]) == (429, "6")
    assert "Try again in 6 seconds" in refused.text
    clock.now += 6
    assert visit("GET", "/?token=guess").status == 403
    assert visit("GET", f"/?token={TOKEN}").status == 429
    clock.now += 6
    assert [logged_in(visit) != "" for _ in range(30)] == [True] * 30  # right ones cost nothing


def test_a_token_of_a_megabyte_is_not_read() -> None:
    visit, _ = visitor()
    assert visit("POST", "/login", {"token": "x" * 10**6}).status == 413


# ---- where a request comes from


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "", "[", "127.0.0.2"]
)
def test_a_wrong_host_is_refused_with_the_fix(host: str) -> None:
    visit, behind = visitor(token=None)
    refused = visit("GET", "/api/studies", host=host)
    assert refused.status == 421
    assert "--allow-host NAME" in refused.text
    assert behind.reached == []


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "localhost.", "127.0.0.1:1", "[::1]:8080", "hpo.example"]
)
def test_a_right_host_is_let_through(host: str) -> None:
    visit, _ = visitor(token=None)
    assert visit("GET", "/api/studies", host=host).text == "behind"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:3000"},  # another program of this machine
        {"origin": "https://hpo.example:3000", "host": "hpo.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"referer": "http://evil.example/localhost:8080"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "origin": "http://localhost:8080"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_a_foreign_pages_write_is_refused(method: str, headers: dict[str, str]) -> None:
    visit, behind = visitor(token=None)
    refused = visit(method, "/api/studies/1", **headers)
    assert refused.status == 403
    assert "another site" in json.loads(refused.text)["reason"]
    assert behind.reached == []
    assert visit("GET", "/api/studies/1", **headers).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:8080", "sec_fetch_site": "same-origin"},
        {"origin": "http://LOCALHOST:8080"},
        {"referer": "http://localhost:8080/dashboard"},
        # A proxy that has put its own name for the server into Host.
        {"origin": "https://hpo.example", "sec_fetch_site": "same-origin"},
    ],
)
def test_the_dashboards_own_write_is_let_through(headers: dict[str, str]) -> None:
    visit, behind = visitor(token=None)
    assert visit("PUT", "/api/studies/1/note", **headers).text == "behind"
    assert behind.reached == ["PUT /api/studies/1/note"]


# ---- read-only, headers


def test_read_only_refuses_every_write_and_still_lets_people_in_and_out() -> None:
    visit, behind = visitor(read_only=True)
    cookie = logged_in(visit)
    for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE"):
        refused = visit(method, "/api/studies", cookie=cookie)
        assert refused.status == 403
        assert "--read-only" in json.loads(refused.text)["reason"]
    assert behind.reached == []
    for method in ("GET", "HEAD", "OPTIONS"):
        assert visit(method, "/api/studies", cookie=cookie).status == 200
    assert visit("POST", "/logout", cookie=cookie).status == 303


def test_every_answer_is_kept_from_other_pages() -> None:
    visit, _ = visitor()
    cookie = logged_in(visit)
    answers = [
        visit("GET", "/dashboard", cookie=cookie),
        visit("GET", "/artifacts/1/2", cookie=cookie),
        visit("GET", "/login"),
        visit("GET", "/api/studies"),
        visit("GET", "/", host="evil.example"),
    ]
    for answer in answers:
        headers = answer.headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Referrer-Policy"] == "same-origin"
        assert headers.get_all("Cache-Control") == ["no-store"]
        assert headers["Access-Control-Allow-Origin"] is None
        (policy,) = headers.get_all("Content-Security-Policy") or []
        assert "frame-ancestors 'none'" in policy
    dashboard, artifact, *_ = (answer.headers["Content-Security-Policy"] for answer in answers)
    assert dashboard.startswith("script-src 'self' 'unsafe-eval';")
    assert "sandbox allow-same-origin;" in artifact  # an SVG that a visitor uploads has no script that runs
    assert visit("GET", "/static/bundle.js", cookie=cookie).headers["Cache-Control"] == "private, no-cache"


# ---- names


def test_hosts_follow_from_the_interface() -> None:
    assert allowed_hosts("localhost") == {"localhost", "127.0.0.1", "::1"}
    assert allowed_hosts("192.0.2.7", ["HPO.example"]) == {
        "192.0.2.7",
        "hpo.example",
        socket.gethostname().lower(),
    }
    every = allowed_hosts("0.0.0.0")
    assert {"localhost", "127.0.0.1", socket.gethostname().lower()} <= every
    assert [is_loopback(host) for host in ("127.0.0.9", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1")] == [
        *[True] * 3,
        *[False] * 3,
    ]


def test_a_link_holds_a_name_that_can_be_reached() -> None:
    assert link_host("127.0.0.1") == "127.0.0.1"
    assert link_host("::1") == "[::1]"
    assert link_host("0.0.0.0") == link_host("::") == socket.gethostname()
    assert link_host("0.0.0.0", ["hpo.example", "other"]) == "hpo.example"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--token", "short"], r"--token: is too easy to guess: fewer than 8 characters\n  fix: leave it out"),
        (
            ["--allow-host", "http://a"],
            r"--allow-host: is no host's name\n  value: http://a\n  fix: give the name",
        ),
        (["--allow-host", "a:8080"], "without http:// and port"),
        (["--allow-host", ""], "is no host's name"),
    ],
)
def test_options_that_make_no_sense_are_said(studies: Studies, options: list[str], said: str) -> None:
    with studies.open():
        assert re.search(said, hpo("dashboard", studies.folder / "study.yaml", *options, code=2).stderr)
