"""Puts a trial's config and log into Optuna's artifact store, where the dashboard shows them."""

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

#: The artifacts with MIME types that a browser opens in a tab, in the order in which they are listed.
_TYPES: Final = {
    "config.yaml": "text/plain; charset=utf-8",
    "log.txt": "text/plain; charset=utf-8",
}
_NAMESPACE: Final = uuid.UUID("2f4b8d7c-53a2-4e0e-8f39-6f0f2f6d9b11")


def artifact_folder(spec: StudySpec) -> Path:
    """The folder of the study's artifact store, with one file for each artifact, named by its id."""
    return spec.output_dir / "artifacts"


def artifact_id(study: str, number: int, name: str) -> str:
    """The id of a trial's artifact; equal for all attempts, so that a later one replaces it."""
    return str(uuid.uuid5(_NAMESPACE, f"{study}\n{number}\n{name}"))


def keep_artifacts(opened: OpenStudy, trial_id: int, number: int, folder: Path) -> None:
    """Put an attempt's config and log where the dashboard shows them, before the trial ends.

    They are hard links where the file system supports these, so they take no space and show what is still written
    to the log. Those of an earlier attempt are replaced. If the disk is full or unavailable, the artifacts are
    lost and a warning is logged, but the trial is not affected.

    Args:
        opened: The study; its storage holds the trial's lease.
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
    """Make ``target`` a hard link to ``source``, or else a copy; it replaces an earlier file in one step."""
    aside = aside_name(target)
    try:
        try:
            aside.hardlink_to(source)
        except OSError:  # no hard links, as on FAT and some network shares, or a limit on them
            shutil.copyfile(source, aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)  # it stays if both names are the same file: then `replace` does nothing


def _register(storage: StudyStorage, trial_id: int, metas: Sequence[ArtifactMeta]) -> None:
    """Store the artifacts' metadata, in Optuna's format."""
    with storage.together(trial_id):
        for meta in metas:
            key = f"{ARTIFACTS_ATTR_PREFIX}{meta.artifact_id}"
            storage.set_trial_system_attr(trial_id, key, json.dumps(asdict(meta)))
