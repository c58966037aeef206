"""A gate in front of optuna-dashboard, which has no login and checks neither Host nor Origin.

optuna-dashboard writes only in requests other than GET, HEAD and OPTIONS.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, parse_qsl, quote, urlencode, urlsplit

import psutil

from hpo.dashboard.login import (
    PAGE_POLICY,
    SESSION_SECONDS,
    Login,
    TooManyGuessesError,
    login_page,
    logout_page,
    welcome_page,
)

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_LONGEST_FORM: Final = 4096
_HTML: Final = "text/html; charset=utf-8"

#: The policy of answers that aren't pages: an uploaded artifact that is opened in a tab can't run anything.
_DATA_POLICY: Final = (
    "default-src 'none'; img-src 'self' data:; style-src 'unsafe-inline'; sandbox allow-same-origin; "
    "frame-ancestors 'none'"
)
#: Added to optuna-dashboard's own policy of its page.
_FRAME_POLICY: Final = "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
_HEADERS: Final = (
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    # Not no-referrer, which would make the Origin of the dashboard's own writes null.
    ("Referrer-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
_OURS: Final = frozenset(
    {
        "content-security-policy",
        "cache-control",
        "access-control-allow-origin",
        *(name.lower() for name, _ in _HEADERS),
    }
)


@dataclass(frozen=True)
class _Answer:
    """An answer of the gate itself."""

    status: str
    body: str
    kind: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Gate:
    """A WSGI application that lets allowed requests through to another one, and answers the rest.

    In this order: the Host header must name this server (421), a write must come from the dashboard's own pages
    (403), a visitor must have logged in (where there is a token), and a read-only dashboard refuses writes
    (403). Every answer gets headers that keep browsers from sharing it with other pages.

    Attributes:
        app: The application behind the gate.
        hosts: Names and addresses that the Host header may have, without the port.
        proxied: Names under which a proxy offers the server; they are among ``hosts``.
        login: The token and the open sessions; None if no login is needed.
        read_only: Refuse every write.
        home: The path to go to after a login without another target.
    """

    app: WSGIApplication
    hosts: frozenset[str]
    proxied: frozenset[str] = frozenset()
    login: Login | None = None
    read_only: bool = False
    home: str = "/"

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request, or let it through."""
        answer = self._refused(environ) or (self._asked(environ, self.login) if self.login else None)
        if answer is None and self.read_only and environ["REQUEST_METHOD"] not in _READING:
            answer = _said("403 Forbidden", "Nothing was changed: this dashboard was started with --read-only.")
        if answer is None:
            return self.app(environ, _secured(environ, start_response))
        body = answer.body.encode()
        policy = PAGE_POLICY if answer.kind == _HTML else _DATA_POLICY
        own = [("Content-Type", answer.kind), ("Content-Length", str(len(body))), *answer.headers]
        start_response(answer.status, [*own, *_safe(policy)])
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]

    # ------------------------------------------------------------------ where a request comes from

    def _refused(self, environ: WSGIEnvironment) -> _Answer | None:
        """The refusal of a request for its Host or its origin, whoever sends it; None if it is allowed."""
        name = host_name(environ.get("HTTP_HOST", ""))
        if name not in self.hosts:
            shown = name if name and name.isprintable() else "without a name"
            return _Answer(
                "421 Misdirected Request",
                f"This dashboard doesn't answer to the host {shown}.\n"
                "fix: use the address that `hpo dashboard` printed, or start it with `--allow-host NAME`\n",
            )
        if environ["REQUEST_METHOD"] in _READING or self._is_own(environ):
            return None
        return _said("403 Forbidden", "A page of another site may not change anything here.")

    def _is_own(self, environ: WSGIEnvironment) -> bool:
        """Whether a write comes from the dashboard's pages, or from a program that is no page."""
        if environ.get("HTTP_SEC_FETCH_SITE", "same-origin") not in ("same-origin", "none"):
            return False
        # Browsers send one of the two with every write; a script sends neither, which another site can't imitate.
        origin = environ.get("HTTP_ORIGIN") or environ.get("HTTP_REFERER")
        if origin is None:
            return True
        place, here = _netloc(origin), str(environ["HTTP_HOST"]).lower()
        if host_name(place) == host_name(here):
            return place == here  # another port of this machine is another program
        return host_name(place) in self.proxied  # a proxy has replaced Host by its own name for this server

    # ------------------------------------------------------------------ who sends it

    def _asked(self, environ: WSGIEnvironment, login: Login) -> _Answer | None:
        """The gate's own pages, and the answer to visitors without a login; None lets the request through."""
        path, method = environ.get("PATH_INFO", "") or "/", environ["REQUEST_METHOD"]
        query = parse_qsl(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        session = _cookie(environ)
        if path == "/login" and method == "POST":
            return self._log_in(environ, login)
        if path == "/login":
            return _Answer("200 OK", login_page(self._target(dict(query).get("next", ""))), _HTML)
        if method == "GET" and "token" in dict(query):
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            return self._opened(environ, login, dict(query)["token"], _path(path, rest))
        if not login.knows(session):
            return _turned_away(environ, path)
        if path == "/logout" and method == "POST":
            login.close(session)
            gone = f"{_cookie_name(environ)}=; Path=/; Max-Age=0; HttpOnly; SameSite=Strict"
            return _Answer("303 See Other", "", headers=(("Location", "/login"), ("Set-Cookie", gone)))
        return _Answer("200 OK", logout_page(), _HTML) if path == "/logout" else None

    def _log_in(self, environ: WSGIEnvironment, login: Login) -> _Answer:
        length = environ.get("CONTENT_LENGTH") or "0"
        if not length.isdecimal() or int(length) > _LONGEST_FORM:
            return _Answer("413 Content Too Large", "That is no token.\n")
        form = parse_qs(environ["wsgi.input"].read(int(length)).decode("utf-8", "replace"))
        return self._opened(environ, login, form.get("token", [""])[0], form.get("next", [""])[0])

    def _opened(self, environ: WSGIEnvironment, login: Login, token: str, target: str) -> _Answer:
        target = self._target(target)
        try:
            session = login.open(token)
        except TooManyGuessesError as error:
            after = (("Retry-After", str(error.seconds)),)
            return _Answer("429 Too Many Requests", login_page(target, str(error)), _HTML, after)
        if session is None:
            return _Answer("403 Forbidden", login_page(target, "This is not the token."), _HTML)
        cookie = f"{_cookie_name(environ)}={session}; Path=/; Max-Age={SESSION_SECONDS}; HttpOnly; SameSite=Strict"
        if environ.get("HTTP_X_FORWARDED_PROTO", environ["wsgi.url_scheme"]) == "https":
            cookie += "; Secure"
        # Not a redirect: after a link in a mail, browsers send a strict cookie only if one of our pages asks.
        return _Answer("200 OK", welcome_page(target), _HTML, (("Set-Cookie", cookie),))

    def _target(self, path: str) -> str:
        """The path itself if it is a path of this server, else `home`."""
        sound = path.startswith("/") and not path.startswith(("//", "/login", "/logout")) and path.isprintable()
        return path if sound and "\\" not in path and path != "/" else self.home


def allowed_hosts(host: str, more: Iterable[str] = ()) -> frozenset[str]:
    """The names and addresses that the Host header may have.

    Args:
        host: The interface that the server listens on.
        more: Further names, such as a proxy's.
    """
    names = {host.lower(), *(name.lower() for name in more)}
    if is_loopback(host):
        return frozenset(names | LOOPBACK)
    names.add(socket.gethostname().lower())
    if _is_every(host):
        names |= LOOPBACK | {socket.getfqdn().lower()}
        names |= {each.address.partition("%")[0] for link in psutil.net_if_addrs().values() for each in link}
    return frozenset(names)


def is_loopback(host: str) -> bool:
    """Whether an interface can be reached only from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def link_host(host: str, more: Iterable[str] = ()) -> str:
    """The host name for a link: the first of `more`, else the interface's, else this machine's."""
    name = next(iter(more), socket.gethostname() if _is_every(host) else host)
    return f"[{name}]" if ":" in name else name


def host_name(place: str) -> str:
    """The name or address in ``name:port``, in lower case; empty if the text is not one."""
    try:
        return (urlsplit(f"//{place}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_every(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def _netloc(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _turned_away(environ: WSGIEnvironment, path: str) -> _Answer:
    if environ["REQUEST_METHOD"] == "GET" and "text/html" in environ.get("HTTP_ACCEPT", ""):
        target = quote(_path(path, environ.get("QUERY_STRING", "")), safe="")
        return _Answer("303 See Other", "", headers=(("Location", f"/login?next={target}"),))
    return _said("401 Unauthorized", "Log in first: reload the page.")


def _said(status: str, reason: str) -> _Answer:
    """An answer in the form of which the dashboard's pages show the reason."""
    return _Answer(status, json.dumps({"reason": reason}), "application/json")


def _path(path: str, query: str) -> str:
    # A WSGI path is bytes in Latin-1.
    return quote(path.encode("latin-1", "replace")) + (f"?{query}" if query else "")


def _cookie_name(environ: WSGIEnvironment) -> str:
    # Browsers share cookies between the ports of a host.
    return f"hpo_session_{environ['SERVER_PORT']}"


def _cookie(environ: WSGIEnvironment) -> str:
    pairs = (pair.strip().partition("=") for pair in environ.get("HTTP_COOKIE", "").split(";"))
    return next((value for name, _, value in pairs if name == _cookie_name(environ)), "")


def _safe(policy: str, cache: str = "no-store") -> list[tuple[str, str]]:
    return [*_HEADERS, ("Content-Security-Policy", policy), ("Cache-Control", cache)]


def _secured(environ: WSGIEnvironment, start_response: StartResponse) -> StartResponse:
    """Add our headers to the answer of the application behind the gate."""
    static = environ.get("PATH_INFO", "").startswith("/static/")

    def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:
        own = next((value for name, value in headers if name.lower() == "content-security-policy"), None)
        policy = _DATA_POLICY if own is None else f"{own};{_FRAME_POLICY}"
        kept = [(name, value) for name, value in headers if name.lower() not in _OURS]
        # no-cache: the bundle of 8 MB is kept, but the browser asks each time whether it has changed.
        return start_response(
            status, [*kept, *_safe(policy, "private, no-cache" if static else "no-store")], exc_info
        )

    return start
