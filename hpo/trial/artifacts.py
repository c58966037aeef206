"""What a trial leaves for people to see, in Optuna's artifact store: its config and log."""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from optuna.artifacts import ArtifactMeta

from hpo.config.spec import StudySpec
from hpo.storage.optuna_private import ARTIFACTS_ATTR_PREFIX
from hpo.storage.study_storage import StudyStorage
from hpo.study.folders import flush_output
from hpo.study.open_study import OpenStudy
from trainer.files import aside_name

logger = logging.getLogger(__name__)

#: As a browser opens them in a tab, in the order in which they are listed.
_TYPES: Final = {
    "config.yaml": "text/plain; charset=utf-8",
    "log.txt": "text/plain; charset=utf-8",
}
_NAMESPACE: Final = uuid.UUID("2f4b8d7c-53a2-4e0e-8f39-6f0f2f6d9b11")


def artifact_folder(spec: StudySpec) -> Path:
    """The folder of the study's artifact store, a file for each artifact, named by its id."""
    return spec.output_dir / "artifacts"


def artifact_id(study: str, number: int, name: str) -> str:
    """The id of a trial's artifact: the same for every attempt, so that the last one's takes its place."""
    return str(uuid.uuid5(_NAMESPACE, f"{study}\n{number}\n{name}"))


def keep_artifacts(opened: OpenStudy, trial_id: int, number: int, folder: Path) -> None:
    """Put an attempt's config and log where the dashboard shows them, before the trial ends.

    They are hard links where the file system has such, so they take no room, and what is still written to the
    log is seen, too. What an earlier attempt left is replaced. A disk that is full or away costs the
    artifacts, never the trial: it is logged.

    Args:
        opened: The study; its storage runs the trial.
        trial_id: Optuna's id of the trial.
        number: The trial.
        folder: The attempt's folder.

    Raises:
        LeaseLostError: Another attempt has the trial by now; nothing is registered.
        StorageInternalError: The database failed.
    """
    spec = opened.spec
    flush_output()  # a copy of the log has to be whole
    try:
        kept = [name for name in _TYPES if _put(spec, number, folder, name)]
    except OSError as error:
        logger.warning("trial %d: its artifacts can't be kept in %s: %s", number, artifact_folder(spec), error)
        return
    metas = [
        ArtifactMeta(artifact_id(spec.study.name, number, name), name, _TYPES[name], encoding=None)
        for name in kept
    ]
    if metas:
        _register(opened.storage, trial_id, metas)


def _put(spec: StudySpec, number: int, folder: Path, name: str) -> bool:
    """Put one artifact into the store; False where there is nothing to put."""
    source = folder / name
    if not source.exists():
        return False
    target = artifact_folder(spec) / artifact_id(spec.study.name, number, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    _link(source, target)
    return True


def _link(source: Path, target: Path) -> None:
    """Make ``target`` the same file as ``source``, else a copy of it; in one step, in place of an earlier one."""
    aside = aside_name(target)
    try:
        try:
            aside.hardlink_to(source)
        except OSError:  # FAT, some network shares, and a user's limit know no links
            shutil.copyfile(source, aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)  # also where both names were one file already: replacing is nothing then


def _register(storage: StudyStorage, trial_id: int, metas: Sequence[ArtifactMeta]) -> None:
    """Store what the artifacts are, as Optuna does."""
    with storage.together(trial_id):
        for meta in metas:
            key = f"{ARTIFACTS_ATTR_PREFIX}{meta.artifact_id}"
            storage.set_trial_system_attr(trial_id, key, json.dumps(asdict(meta)))
