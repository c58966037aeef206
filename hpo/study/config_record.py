"""Stores the config that a study is started with, and compares the config of each later run with it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import optuna

from hpo.config.code import code_identity
from hpo.config.identity import identity, stored_identity
from hpo.config.marks import COMMAND_LINE
from hpo.config.paths import diff_configs
from hpo.config.spec import StudySpec
from hpo.config.widening import not_wider, widenings
from hpo.errors import InputError
from hpo.storage.attributes import CONFIG_ATTR, HASH_ATTR
from hpo.storage.engines import display_url
from hpo.storage.optuna_private import METRIC_NAMES_ATTR, id_of_study, storage_of
from hpo.study.code_record import keep_code
from hpo.study.widened import Widening, refuse_narrower

#: Keys that must be equal in two studies for one to start from the other's trials.
_GOAL_KEYS: Final = ("metric", "direction", "objectives")


def keep_code_and_config(spec: StudySpec, study: optuna.Study) -> None:
    """Store with a new study the hashes of its code, its config, and the names of its metrics."""
    keep_code(study, code_identity(spec))  # first, so that a process that sees the config's hash sees the code
    study.set_user_attr(CONFIG_ATTR, stored_config(spec))
    # As `Study.set_metric_names` does, for the axes of Optuna's plots and of the dashboard.
    storage_of(study).set_study_system_attr(id_of_study(study), METRIC_NAMES_ATTR, list(spec.study.goals))
    study.set_user_attr(HASH_ATTR, spec.config_hash())


def wider_config(spec: StudySpec, study: optuna.Study, *, widen: bool) -> Widening | None:
    """Compare the config with the stored one; returns how its search space is wider, None for an equal config.

    Args:
        spec: The study file as it is now.
        study: The existing study.
        widen: Whether a wider search space is accepted.

    Raises:
        InputError: The config differs (with ``widen``: in more than a wider search space), or hpo did not start
            the study.
    """
    stored: dict[str, Any] = _stored_attrs(study)
    if HASH_ATTR not in stored and not study.get_trials(deepcopy=False):
        keep_code_and_config(spec, study)  # its creator died before this
        return None
    if HASH_ATTR not in stored:
        raise not_ours(spec)
    before, now = stored_identity(stored[CONFIG_ATTR]), identity(spec.base_config())
    changes = diff_configs(before, now)
    if not changes:
        return None
    if widen:
        refuse_narrower(spec, not_wider(spec, before, now))
        return Widening(stored[HASH_ATTR], widenings(before, now))
    raise _other_config(spec, before, now, changes)


def refused_config(spec: StudySpec, stored: Mapping[str, Any]) -> InputError | None:
    """The error if a study with these user attributes would be refused for its config; None where it would not.

    A wider search space counts as different here.
    """
    if HASH_ATTR not in stored:  # hpo did not start the study, or its creator died before any trial
        return None
    before, now = stored_identity(stored[CONFIG_ATTR]), identity(spec.base_config())
    changes = diff_configs(before, now)
    return _other_config(spec, before, now, changes) if changes else None


def _other_config(
    spec: StudySpec, before: Mapping[str, Any], now: Mapping[str, Any], changes: Sequence[str]
) -> InputError:
    keep = "keep what was learnt with `hpo run --widen` (in Python `widen=True`), "
    name = f"`study.name={spec.study.name}-2`"
    if _is_found_by_file(spec) and all(before["study"].get(key) == now["study"].get(key) for key in _GOAL_KEYS):
        name += f", with `study.warm_start={spec.path.name}` to give it this study's trials"
    return spec.error(
        f"the study {spec.study.name} was started with another config:\n    " + "\n    ".join(changes),
        path="study.name",
        fix=f"{'' if not_wider(spec, before, now) else keep}undo the change, give the new study its own name "
        f"({name}), or start over after `{_delete_command(spec)}`",
    )


def stored_config(spec: StudySpec) -> dict[str, Any]:
    """The base config as it is stored: without the password in the storage's URL."""
    config = spec.base_config()
    if config["run"]["storage"] is not None:  # the dashboard shows attributes, and a URL may contain a password
        config["run"]["storage"] = display_url(config["run"]["storage"])
    return config


def not_ours(spec: StudySpec) -> InputError:
    """The error for a study of this name that another tool has created."""
    file, line = spec.location("study.name")
    return InputError(
        f"the storage has a study named {spec.study.name} that was not started by `hpo run`",
        file=file,
        line=line,
        path="study.name",
        fix="give this one another name with `study.name=…`",
    )


def _is_found_by_file(spec: StudySpec) -> bool:
    """Whether the study's file alone says where the study is, as ``study.warm_start`` reads it."""
    return all(spec.location(path)[0] != COMMAND_LINE for path in ("study.name", "run.storage", "run.output_dir"))


def _delete_command(spec: StudySpec) -> str:
    """The shell command that deletes this study."""
    given = {"run.storage": display_url(spec.storage_url), "run.output_dir": str(spec.output_dir)}
    words = ["hpo", "delete", str(spec.path), f"study.name={spec.study.name}"]
    words += [f"{path}={value}" for path, value in given.items() if spec.location(path)[0] == COMMAND_LINE]
    return shlex.join(words)


def _stored_attrs(study: optuna.Study) -> dict[str, Any]:
    """The study's attributes; waits up to 2 s if another process is just creating the study."""
    for _ in range(20):
        attrs = study.user_attrs
        if HASH_ATTR in attrs:
            break
        time.sleep(0.1)
    return attrs
