"""Reads the whole answer of a WSGI application."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication, WSGIEnvironment

#: Headers about the exact bytes of a body.
_OF_THE_BYTES: Final = frozenset({"content-length", "etag", "last-modified", "accept-ranges"})


def whole_answer(app: WSGIApplication, environ: WSGIEnvironment) -> tuple[str, list[tuple[str, str]], bytes]:
    """The status, headers and body of an answer whose body will be changed, without headers about its bytes."""
    begun: list[tuple[str, list[tuple[str, str]]]] = []

    def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:  # noqa: ARG001
        begun.append((status, headers))
        return None

    found = app(environ, start)
    try:
        body = b"".join(found)
    finally:
        close = getattr(found, "close", None)
        if close is not None:
            close()
    status, headers = begun[-1]
    return status, [(name, value) for name, value in headers if name.lower() not in _OF_THE_BYTES], body
