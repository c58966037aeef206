"""ConfigSaver: writes the configuration and the environment of a run to a file."""

from __future__ import annotations

import json
import logging
import numbers
import platform
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from trainer.callback import Callback, TrainerView
from trainer.files import json_number, replacing
from trainer.git_state import git_state

logger = logging.getLogger(__name__)

_SUFFIXES = (".json", ".yaml", ".yml")


class ConfigSaver(Callback):
    """Writes the run's configuration and its environment when a fit starts, as JSON or YAML.

    The file holds ``config`` and ``environment``: versions of Python and torch, the platform, the device, the
    CUDA version that torch was built for, the names of the CUDA devices (where the run uses them), the time of
    the start (UTC), and the git commit of the working directory and whether tracked files were changed since
    (null where there is no repository or no git).

    A run that starts from scratch writes the file anew. A resumed one leaves it as it is if the configuration is
    the same; with another configuration it keeps the file, writes its own beside it (``config-2.json``), and
    warns.

    Each checkpoint holds the configuration too, as ``config``. Other callbacks find it in ``state.config``: those
    for W&B, MLflow and TensorBoard show it where they were given none.

    Mappings, sequences and sets (sorted) are kept as such, paths as text, numbers that are not finite as
    ``"NaN"``, ``"Infinity"``, ``"-Infinity"``, and every other value that is not plain as its ``repr``, without
    the address in memory. It is written as it is given: keep passwords and tokens out of it.

    Args:
        path: The file; ``.json``, ``.yaml`` or ``.yml``. Its folder is made if needed.
        config: The configuration, as it is when this is called.

    Raises:
        ValueError: ``path`` ends in none of these.
        OSError: The file can't be written.

    Example::

        Trainer(model, optimizer, loss, callbacks=[ConfigSaver("run/config.yaml", {"lr": 0.1, "seed": 3})])
    """

    rank_zero_only = True

    def __init__(self, path: Path | str, config: Mapping[str, Any]) -> None:
        self.path = Path(path)
        if self.path.suffix not in _SUFFIXES:
            raise ValueError(f"path is {str(path)!r}: give a file that ends in {', '.join(_SUFFIXES)}")
        self.config = _plain(config)

    def setup(self, trainer: TrainerView) -> None:
        """Give the configuration to the other callbacks."""
        trainer.state.config = self.config

    def on_save_checkpoint(self, trainer: TrainerView, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Put the configuration into the checkpoint."""
        checkpoint["config"] = self.config

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Write the file, unless a resumed run already has one with this configuration."""
        state = trainer.state
        target: Path | None = self.path
        if state.epoch or state.batch_index:
            target = self._free_path()
        if target is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as file:
            file.write(_dump({"config": self.config, "environment": _environment(trainer)}, target))
        if target != self.path:
            logger.warning(
                "%s holds another configuration than that of this run, which is in %s",
                self.path,
                target.name,
            )

    def _free_path(self) -> Path | None:
        """The first free path; None if an earlier file holds the same configuration."""
        path, number = self.path, 1
        while path.exists():
            if self._is_in(path):
                return None
            number += 1
            path = self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}")
        return path

    def _is_in(self, path: Path) -> bool:
        content = _load(path)
        return isinstance(content, dict) and _canonical(content.get("config")) == _canonical(self.config)


def _plain(value: Any) -> Any:
    """The value in types that both JSON and YAML support."""
    # Converted by abstract types, as YAML supports no subclasses of int, float or str, such as NumPy's and enums.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return json_number(float(value))
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item) for item in value]
    if isinstance(value, AbstractSet):
        return sorted(map(_plain, value), key=repr)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _key(key: Any) -> str:
    plain = _plain(key)
    return plain if isinstance(plain, str) else str(plain)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)


def _dump(content: dict[str, Any], path: Path) -> str:
    if path.suffix == ".json":
        return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    import yaml

    text: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return text


def _load(path: Path) -> Any:
    """The content of the file; None, with a warning, if it can't be parsed."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        logger.warning("%s can't be read as a configuration, and is kept: %s", path, error)
        return None


def _environment(trainer: TrainerView) -> dict[str, Any]:
    on_cuda = trainer.device.type == "cuda"  # asking for names starts CUDA, which a run on the CPU does not need
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "device": str(trainer.device),
        "cuda": torch.version.cuda,
        "cuda_devices": [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count() if on_cuda else 0)
        ],
        "git": git_state(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
