"""Reader of the `.wandb` file that an offline run leaves: LevelDB-style records of protocol buffers."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_BLOCK = 32 * 1024
_FILE_HEADER, _RECORD_HEADER = 7, 7
_FULL, _LAST = 1, 4


def read_records(path: Path) -> Iterator[Record]:
    """Every record of the file, its checksums verified."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, parts = _FILE_HEADER, []
    while position + _RECORD_HEADER <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _RECORD_HEADER:
            position += left
            continue
        checksum = int.from_bytes(data[position : position + 4], "little")
        length = int.from_bytes(data[position + 4 : position + 6], "little")
        kind = data[position + 6]
        payload = data[position + _RECORD_HEADER : position + _RECORD_HEADER + length]
        assert checksum == zlib.crc32(payload, zlib.crc32(bytes([kind])))
        position += _RECORD_HEADER + length
        parts.append(payload)
        if kind in {_FULL, _LAST}:
            yield Record.FromString(b"".join(parts))
            parts = []


def history(path: Path) -> list[dict[str, Any]]:
    """What was logged, one mapping a call, without W&B's own keys but the step."""
    rows = []
    for record in read_records(path):
        if record.HasField("history"):
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append({key: value for key, value in items.items() if key == "_step" or key[0] != "_"})
    return rows


def run_record(path: Path) -> Any:
    """The record that opens the run: project, group, name, id, config, tags."""
    return next(record.run for record in read_records(path) if record.HasField("run"))


def config(path: Path) -> dict[str, Any]:
    """The run's configuration, without W&B's own."""
    update = run_record(path).config.update
    return {item.key: json.loads(item.value_json) for item in update if not item.key.startswith("_")}
