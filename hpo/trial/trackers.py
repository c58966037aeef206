"""The arguments that hpo gives to callbacks for W&B, MLflow, Comet, TensorBoard, and other files of a run."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hpo.config.hidden import hidden
from hpo.config.spec import StudySpec
from hpo.study.folders import CHECKPOINTS, is_attempt
from hpo.trial.place import RunPlace
from trainer.callbacks.mirror import flat

#: The file in a trial's folder with the key of its run in trackers, the same for each attempt.
_KEY_FILE: Final = "run_key"
_SQLITE: Final = "sqlite:///"
#: Sections of a config whose values are shown as a run's parameters where nothing is searched.
_SECTIONS: Final = ("model", "loss", "optimizer", "lr_scheduler", "loader", "trainer", "data")


@dataclass(frozen=True)
class Shown:
    """A training run as trackers show it.

    Attributes:
        spec: The study file.
        place: The attempt's folder, the run's name, and the trial's parameters.
        config: The config from which the trainer is built.
    """

    spec: StudySpec
    place: RunPlace
    config: Mapping[str, Any]

    @property
    def _is_trial(self) -> bool:
        return is_attempt(self.place.folder.name)

    @property
    def _parameters(self) -> dict[str, Any]:
        if self.place.params:
            return dict(self.place.params)
        return flat(hidden({key: self.config[key] for key in _SECTIONS if key in self.config}))

    @property
    def followed(self) -> dict[str, str]:
        """The study's metric and its direction, as arguments of a callback that monitors it."""
        return {"monitor": self.spec.study.metric, "mode": self.spec.study.mode}

    def wandb(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of the callback for W&B, from those that the study file gives."""
        study = self.spec.study.name
        defaults = {
            "project": study,
            "group": study,
            "name": self.place.name,
            "job_type": "trial" if self._is_trial else "final",
        }
        return {
            **defaults,
            **written,
            **self._places(),
            "checkpoints": [folder / CHECKPOINTS for folder in self._attempts()],
            "run_id": self._key(),
            "config": self._parameters,
            **self.followed,
        }

    def mlflow(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of the callback for MLflow."""
        study = self.spec.study.name
        tags = {"group": study, "job_type": "trial" if self._is_trial else "final"}
        given = written.get("tags") or {}
        return {
            "experiment": study,
            "name": self.place.name,
            **written,
            "tracking_uri": _from_folder(written.get("tracking_uri"), self.spec.folder),
            "tags": tags | dict(given) if isinstance(given, Mapping) else given,
            "folder": self.spec.output_dir,
            "run_key": self._key(),
            "params": self._parameters,
            **self.followed,
        }

    def comet(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of the callback for Comet."""
        return {
            "project": self.spec.study.name,
            "name": self.place.name,
            **written,
            "folder": self.place.folder / "comet",
            "run_key": self._key(),
            "params": self._parameters,
            **self.followed,
        }

    def tensorboard(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of the callback for TensorBoard."""
        # One folder for all attempts, which each attempt makes equal to the history: to TensorBoard it is one run.
        return {**written, "folder": self._of_all_attempts / "tensorboard", "hparams": self._parameters}

    def merging(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of the callback that saves merged weights."""
        return {**written, "folder": self._of_all_attempts / "merged"}

    @property
    def _of_all_attempts(self) -> Path:
        return self.place.folder.parent if self._is_trial else self.place.folder

    def step_metrics(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments of the callback that records single steps."""
        return {**written, **self._places()}

    def _places(self) -> dict[str, Any]:
        """The folder of this attempt, and those of the others."""
        own = self.place.folder
        return {"folder": own, "earlier": [other for other in self._attempts() if other != own]}

    def _attempts(self) -> list[Path]:
        """Folders of all attempts at this run."""
        if not self._is_trial:
            return [self.place.folder]
        return [folder for folder in self.place.folder.parent.glob("attempt-*") if is_attempt(folder.name)]

    def _key(self) -> str:
        """The run's key in trackers; random, so that a study that was deleted and started again gets new runs."""
        token = secrets.token_hex(4)
        if not self._is_trial:
            return f"{self.place.name}-{token}"
        file = self.place.folder.parent / _KEY_FILE
        key = file.read_text(encoding="ascii") if file.exists() else ""
        if not key:  # only one attempt at a time gets here
            key = f"{self.place.name}-{token}"
            file.write_text(key, encoding="ascii")
        return key


def _from_folder(uri: Any, folder: Path) -> Any:
    """A tracking URI, in which a relative path of a SQLite file is made relative to the folder."""
    if isinstance(uri, str) and uri.startswith(_SQLITE):
        return f"{_SQLITE}{folder / uri.removeprefix(_SQLITE)}"
    return uri
