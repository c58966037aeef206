"""The dashboard's login: a token, the form that asks for it, and the sessions that it opens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from html import escape
from typing import Final

#: The length of a session in seconds.
SESSION_SECONDS: Final = 7 * 24 * 3600
#: The fewest characters of a token; shorter ones can be guessed.
SHORTEST_TOKEN: Final = 8
#: This many wrong guesses in a row are free; each further one has to wait.
_FREE_GUESSES: Final = 10
_SECONDS_A_GUESS: Final = 6.0

_Clock = Callable[[], float]

_STYLE: Final = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;margin:0;min-height:100vh;display:grid;place-items:center}"
    "main{box-sizing:border-box;width:min(24rem,100vw);padding:1.5rem}h1{font-size:1.25rem}"
    "input,button{box-sizing:border-box;width:100%;font:inherit;padding:.6rem;margin-top:.5rem;"
    "border:1px solid #8888;border-radius:.4rem}"
    "button{background:#1668b8;border-color:#1668b8;color:#fff;cursor:pointer}"
    ".wrong{color:#c62828}@media(prefers-color-scheme:dark){.wrong{color:#ff8a80}}"
)
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
#: The policy of these pages: they may only show their own style and send their own form.
PAGE_POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)


class Login:
    """The token and the sessions that it has opened, in memory only; they end with the process.

    Args:
        token: The token that visitors need.
        clock: Returns seconds from any starting point.
    """

    def __init__(self, token: str, clock: _Clock = time.monotonic) -> None:
        self._token = token.encode()
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[str, float] = {}
        self._guesses, self._counted = float(_FREE_GUESSES), clock()

    def open(self, token: str) -> str | None:
        """A new session's id for the right token; None for another.

        Raises:
            TooManyGuessesError: After too many wrong guesses even the right token has to wait.
        """
        self._take_guess()
        if not hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._token):
            return None
        session, now = secrets.token_urlsafe(32), self._clock()
        with self._lock:
            self._guesses = min(self._guesses + 1, _FREE_GUESSES)
            self._sessions = {key: end for key, end in self._sessions.items() if end > now}
            self._sessions[session] = now + SESSION_SECONDS
        return session

    def knows(self, session: str) -> bool:
        """Whether a session is open."""
        with self._lock:
            return self._sessions.get(session, float("-inf")) > self._clock()

    def close(self, session: str) -> None:
        """End a session, if there is one."""
        with self._lock:
            self._sessions.pop(session, None)

    def _take_guess(self) -> None:
        with self._lock:
            now = self._clock()
            self._guesses = min(self._guesses + (now - self._counted) / _SECONDS_A_GUESS, _FREE_GUESSES)
            self._counted = now
            if self._guesses < 1:
                raise TooManyGuessesError(int(_SECONDS_A_GUESS))
            self._guesses -= 1


class TooManyGuessesError(Exception):
    """Too many wrong tokens lately.

    Args:
        seconds: The time in seconds until the next try.
    """

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        super().__init__(f"Too many wrong tokens. Try again in {seconds} seconds.")


def login_page(target: str, wrong: str = "") -> str:
    """The form that asks for the token.

    Args:
        target: The path to go to afterwards.
        wrong: Why it asks again; empty at first.
    """
    said = f'<p class="wrong" role="alert">{escape(wrong)}</p>' if wrong else ""
    return _page(
        "Log in",
        "<p>The token is where <code>hpo dashboard</code> was started.</p>"
        f'{said}<form method="post" action="/login"><input type="hidden" name="next" value="{escape(target)}">'
        '<label>Token<input type="password" name="token" autocomplete="current-password" required autofocus>'
        "</label><button>Log in</button></form>",
    )


def logout_page() -> str:
    """The form that ends the session."""
    return _page("Log out", '<form method="post" action="/logout"><button>Log out</button></form>')


def welcome_page(target: str) -> str:
    """A page that redirects to another one."""
    path = escape(target)
    refresh = f'<meta http-equiv="refresh" content="0;url={path}">'
    return _page("Logged in", f'<p><a href="{path}">Continue</a></p>', refresh)


def _page(title: str, body: str, head: str = "") -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title>{head}<style>{_STYLE}</style></head>'
        f"<body><main><h1>{title}</h1>{body}</main></body></html>"
    )
