"""What those who write files share: files and folders that are whole or not there, and numbers in strict JSON."""

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
    """A hidden name beside ``path`` that no other process or thread writes to.

    Args:
        path: The file or folder whose place is to be taken.
        suffix: How the name ends, for a writer that looks at that.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{suffix}")


@contextmanager
def aside_of(path: Path) -> Iterator[Path]:
    """A path to write to; the file there takes the place of ``path`` when the block ends, in one step.

    Until then a reader of ``path``, or a killed process, finds the earlier file. A link stays one, to the new
    file; a pipe or a device, such as ``/dev/stdout``, is written to itself.

    Raises:
        OSError: It can't be put there; what lay there before is untouched, and nothing is left aside.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    aside = aside_name(path)  # a file that tempfile makes could be read by its owner alone
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def aside_of_folder(folder: Path) -> Iterator[Path]:
    """A path to make a folder at, which takes the place of ``folder`` and all in it when the block ends.

    Raises:
        OSError: It can't be put there; nothing is left aside.
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
    """Open a text file (UTF-8) that takes the place of ``path`` when the block ends; see `aside_of`.

    Raises:
        OSError: It can't be written; what lay there before is untouched, and nothing is left aside.
    """
    with aside_of(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        yield file


def json_number(value: float) -> float | str:
    """The number as strict JSON (RFC 8259) can hold it: ``"NaN"``, ``"Infinity"``, ``"-Infinity"`` if not finite.

    Strings, not null, so that the three stay apart; Python's ``float``, JavaScript's ``Number`` read them back.
    """
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def json_line(record: Mapping[str, float]) -> str:
    """Numbers by name as a line of strict JSON, to the last digit; see `json_number`."""
    plain = {name: json_number(value) for name, value in record.items()}
    return json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"
