"""What an offline W&B run has on disk: the records of its `.wandb` file.

A file is 7 bytes of header, then blocks of 32 KiB that hold LevelDB-style records: checksum, length, kind,
payload. The payloads, put together, are protocol buffers. W&B 0.31 has no reader of its own that can be imported.
"""

from __future__ import annotations

import glob
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_MAGIC = b":W&B"
_BLOCK = 32 * 1024
_FILE_HEADER, _RECORD_HEADER = 7, 7
_FULL, _LAST = 1, 4


def read_records(path: Path) -> Iterator[Any]:
    """The records of a file (``wandb_internal_pb2.Record``), up to the first that is not whole.

    A process that was killed leaves such a tail.

    Raises:
        OSError: The file can't be read.
    """
    from wandb.proto import wandb_internal_pb2

    messages: Any = wandb_internal_pb2  # whose types are made when it is imported
    parts: list[bytes] = []
    for kind, payload in _chunks(path.read_bytes()):
        parts.append(payload)
        if kind in {_FULL, _LAST}:
            yield messages.Record.FromString(b"".join(parts))
            parts = []


def _chunks(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and payload of each sound piece."""
    position = _FILE_HEADER if data.startswith(_MAGIC) else len(data)
    while position + _RECORD_HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER:
            position += left
            continue
        start = position + _RECORD_HEADER
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind, payload = data[position + 6], data[start : start + length]
        if int.from_bytes(data[position : position + 4], "little") != zlib.crc32(
            payload, zlib.crc32(bytes([kind]))
        ):
            return
        yield kind, payload
        position = start + length


def logged_steps(folders: Iterable[Path], run_id: str) -> set[int]:
    """The steps that offline files of a run hold.

    Args:
        folders: Folders that were given to W&B.
        run_id: The run.
    """
    steps: set[int] = set()
    for folder in folders:
        for file in folder.glob(f"wandb/offline-run-*/run-{glob.escape(run_id)}.wandb"):
            for record in read_records(file):
                if record.HasField("history"):
                    steps.update(_steps(record))
    return steps


def _steps(record: Any) -> Iterator[int]:
    for item in record.history.item:
        if "_step" in {item.key, *item.nested_key}:
            yield int(json.loads(item.value_json))
