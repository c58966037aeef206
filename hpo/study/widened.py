"""Widens the search space of a study that has already begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import optuna
from optuna.trial import TrialState

from hpo.config.spec import StudySpec
from hpo.search.by_name import known_class
from hpo.search.samplers import SAMPLERS, drawing_sampler
from hpo.storage.attributes import CONFIG_ATTR, HASH_ATTR, WIDENED_ATTR
from hpo.storage.budget import count_trials
from hpo.storage.optuna_private import id_of_study
from hpo.storage.study_attrs import replace_study_attrs
from hpo.storage.study_storage import StudyStorage

#: Samplers whose points or stored state are tied to the search space that the study begins with.
_OF_ONE_SPACE: Final = tuple(SAMPLERS[name] for name in ("grid", "brute_force", "cmaes"))


@dataclass(frozen=True)
class Widening:
    """A search space that is wider than the stored one.

    Attributes:
        before: Hash of the config with which it was compared.
        changes: What has become wider, a line each.
    """

    before: str
    changes: Sequence[str]


def refuse_narrower(spec: StudySpec, problems: Sequence[str]) -> None:
    """Refuse a search space that is not wider, or a sampler that can't use a wider one.

    Args:
        spec: The study file.
        problems: Why the search space is not wider; see `hpo.config.widening`.

    Raises:
        InputError: There are problems, or the study's sampler keeps to its first space.
    """
    _, name = drawing_sampler(spec)
    if known_class(name, SAMPLERS) in _OF_ONE_SPACE:
        problems = [*problems, f"study.sampler: {name} keeps to the space that it began with"]
    if problems:
        fix = (
            "keep every value that was allowed; or begin a study of another name, which knows the trials of this "
            "one by `study.warm_start`"
        )
        problem = "is no wider version of the study's search space:\n    " + "\n    ".join(problems)
        raise spec.error(problem, path="search_space", fix=fix)


def store_wider(
    spec: StudySpec, study: optuna.Study, storage: StudyStorage, config: Mapping[str, Any], wider: Widening
) -> str:
    """Store a config with a wider search space, all of it or nothing; returns a note for the user.

    Args:
        spec: The study file.
        study: The study.
        storage: Its storage.
        config: The config to store.
        wider: What has become wider than in the stored config.

    Raises:
        StudyError: Another process has just changed the config.
    """
    attrs = study.user_attrs
    with storage.engine.connect() as conn:  # no trial is read: pruned ones may be paused again next
        count = count_trials(conn, id_of_study(study), tuple(TrialState))
    entry = {"trials": count, "changes": list(wider.changes), "hash": spec.config_hash()}
    new = {
        CONFIG_ATTR: dict(config),
        HASH_ATTR: entry["hash"],
        WIDENED_ATTR: [*attrs.get(WIDENED_ATTR, ()), entry],
    }
    replace_study_attrs(storage.engine, id_of_study(study), new, (HASH_ATTR, wider.before))
    return f"search space {said(entry)}"


def said(entry: Mapping[str, Any]) -> str:
    """One widening as text for people: at which trial, and what became wider."""
    return f"widened at trial {entry['trials']}: {'; '.join(entry['changes'])}"


def has_older_space(attrs: Mapping[str, Any], spec: StudySpec) -> bool:
    """Whether a study with these user attributes was widened, and the study file is from before that."""
    widened = attrs.get(WIDENED_ATTR)
    return widened is not None and widened[-1]["hash"] != spec.config_hash()
