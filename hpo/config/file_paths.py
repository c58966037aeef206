"""Reads file paths as people write them: relative to the study file or the current folder, with `~`, in URLs."""

import os
import re
from pathlib import Path
from typing import Final

#: In bytes; Linux allows 4,096, and the files of trials need some of these.
_LONGEST: Final = 3_500
_LONGEST_NAME: Final = 255
_SQLITE_FILE: Final = re.compile(r"(sqlite(?:\+\w+)?:///)(?!/|:memory:|file:)(.+)")
#: The fix of `no_text`.
RENAME: Final = "rename the file or folder"


def too_long(place: Path) -> str | None:
    """What is wrong with a path that is too long to hold files; None if it is not."""
    names = (os.fsencode(part) for part in place.parts)
    if len(os.fsencode(place)) <= _LONGEST and all(len(name) <= _LONGEST_NAME for name in names):
        return None
    return f"is too long: a path has at most {_LONGEST} bytes, and each name in it {_LONGEST_NAME}"


def no_text(place: Path) -> str | None:
    """What is wrong with a path whose bytes are not UTF-8, as no database can store it; None if they are.

    Python represents such bytes as lone surrogates.
    """
    try:
        str(place).encode()
    except UnicodeEncodeError:
        return "its path holds bytes that are no text in UTF-8"
    return None


def absolute(path: Path) -> Path:
    """A path from the current folder as an absolute one; symbolic links stay as the person wrote them."""
    return Path(normal(Path.cwd() / path))


def anchored(url: str, folder: Path) -> str:
    """The URL of a database, in which a relative SQLite file becomes absolute, from this folder."""
    match = _SQLITE_FILE.fullmatch(url)
    return f"{match[1]}{normal(quoted(folder) / home(match[2]))}" if match else url


def quoted(path: Path) -> Path:
    """The path as a URL has it, where `%` and `?` have a meaning."""
    return Path(str(path).replace("%", "%25").replace("?", "%3F"))


def home(path: str) -> Path:
    """The path with `~` replaced by the home folder; `~` of an unknown user stays, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises then


def normal(path: Path) -> str:
    """The path without `..`; unlike Path.resolve, this leaves symbolic links as the person wrote them."""
    return os.path.normpath(path)
