"""Packs the study's folder into a ConfigMap, for agents on machines that do not share the folder."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hpo.errors import StudyError
from hpo.execution.engines.engine import AgentOrder
from hpo.execution.engines.kubernetes_manifest import Object, metadata
from hpo.execution.engines.kubernetes_settings import Settings

#: The most bytes of files that a ConfigMap may hold; encoded, they take four thirds of that.
_MOST: Final = 750_000


def files_object(order: AgentOrder, settings: Settings) -> tuple[Object, dict[str, str]]:
    """A ConfigMap with the files of the study's folder, and the path of the file for each of its keys.

    Its name contains a hash of the files. Hidden files, compiled files and the output folder are left out.

    Raises:
        StudyError: The files are too large for a ConfigMap, or can't be read.
    """
    folder = order.study.parent
    content, items = dict[str, str](), dict[str, str]()
    size = 0
    try:
        for index, path in enumerate(sorted(_files(folder, order.logs.parent))):
            key = f"file-{index}"
            items[key] = path.relative_to(folder).as_posix()
            size += path.stat().st_size
            if size > _MOST:
                raise _too_large(folder, path)
            content[key] = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise StudyError(f"{error.filename or folder}: can't read it: {error.strerror or error}") from error
    digest = hashlib.sha256(repr((content, items)).encode()).hexdigest()[:10]
    config_map: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(order, settings, f"hpo-{order.key}-{digest}", "files"),
        "immutable": True,
        "binaryData": content,
    }
    return config_map, items


def _files(folder: Path, output: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith(".") or path.name == "__pycache__" or output.is_relative_to(path):
            continue
        if path.is_dir():
            yield from _files(path, output)
        elif path.is_file() and path.suffix != ".pyc":
            yield path


def _too_large(folder: Path, path: Path) -> StudyError:
    return StudyError(
        f"{folder} is too large for a ConfigMap, which holds {_MOST:,} bytes; {path.name} passes that\n"
        "  fix: put the folder on the volume claim and leave `files` out, or into the image: `files=image`"
    )
