"""Helpers for writing files: atomic replacement of files and folders, and numbers in strict JSON."""

from __future__ import annotations

import json
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def aside_name(path: Path, suffix: str = "") -> Path:
    """A hidden path beside ``path`` that no other process or thread uses.

    Args:
        path: The file or folder to be replaced.
        suffix: The end of the name, for a writer that depends on it.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


@contextmanager
def aside_of(path: Path) -> Iterator[Path]:
    """A temporary path to write to; the file there replaces ``path`` atomically at the end of the block.

    Until then, and if the process is killed, ``path`` is the earlier file. If ``path`` is a link, the file that it
    points to is replaced; a pipe or a device, such as ``/dev/stdout``, is written directly.

    Raises:
        OSError: The file can't be replaced; it is unchanged, and the temporary file is removed.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    aside = aside_name(path)  # not from tempfile, whose files only their owner can read
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def aside_of_folder(folder: Path) -> Iterator[Path]:
    """A temporary path to make a folder at, which replaces ``folder`` and its content at the end of the block.

    Raises:
        OSError: The folder can't be replaced; the temporary folder is removed.
    """
    aside = aside_name(folder)
    try:
        yield aside
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a text file (UTF-8) that replaces ``path`` at the end of the block; see `aside_of`.

    Raises:
        OSError: The file can't be written or replaced; it is unchanged, and the temporary file is removed.
    """
    with aside_of(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        yield file


def json_number(value: float) -> float | str:
    """The number for strict JSON (RFC 8259): ``"NaN"``, ``"Infinity"`` or ``"-Infinity"`` if it is not finite.

    They are strings rather than null so that the three stay distinct; Python's ``float`` and JavaScript's
    ``Number`` read them back.
    """
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def json_line(record: Mapping[str, float]) -> str:
    """Numbers by name as a line of strict JSON, with all digits; see `json_number`."""
    plain = {name: json_number(value) for name, value in record.items()}
    return json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"
