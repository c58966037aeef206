"""Adds a study's initial trials: those known from another study, and the base config as the first trial."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any, Final

import optuna
import sqlalchemy as sa
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import IntegrityError

from hpo.config.file_paths import home
from hpo.config.paths import join_path, lookup, show, split_path
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec, load_spec
from hpo.errors import InputError, StudyError
from hpo.storage.attributes import (
    BASELINE_ATTR,
    BEGUN_ATTR,
    BEST_ATTR,
    CONSTRAINT_ATTR,
    INITIAL_TRIALS_ATTR,
    ORIGIN_ATTR,
    OUTCOME_ATTR,
)
from hpo.storage.budget import count_trials
from hpo.storage.engines import display_url
from hpo.storage.ledger import Owner
from hpo.storage.lineage import forked_from
from hpo.storage.machine import is_alive
from hpo.storage.opening import open_storage
from hpo.storage.optuna_private import STUDY_SYSTEM_ATTRS, id_of_study
from hpo.storage.study_storage import StudyStorage
from hpo.study.outcome import Outcome, outcome_of
from hpo.wording import are

#: Seconds without a new initial trial after which a process on another machine counts as dead.
_PATIENCE: Final = 30.0
_LOOK: Final = 0.2
#: Held by the thread that adds initial trials: the storage records only which process adds them.
_ALONE: Final = threading.Lock()


def check_initial_trials(spec: StudySpec, space: SearchSpace) -> None:
    """Refuse a base config outside of the search space, and a study to start from that does not fit.

    Nothing is checked in a study that already has its initial trials: the other study may be gone by now.

    Raises:
        InputError: The base config is outside of the search space, or the other study does not fit.
        StudyError: The other study or its storage does not exist.
    """
    if not (spec.study.baseline or spec.study.warm_start) or _has_begun(spec):
        return
    if spec.study.baseline:
        base_point(spec, space)
    if spec.study.warm_start is not None:
        known_trials(spec, space)


def _has_begun(spec: StudySpec) -> bool:
    try:
        storage = open_storage(spec.storage_url, create=False)
    except (InputError, StudyError):  # there is no storage yet; other problems are reported where it is opened
        return False
    try:
        study_id = storage.get_study_id_from_name(spec.study.name)
        return BEGUN_ATTR in storage.get_study_system_attrs(study_id)
    except KeyError:
        return False
    finally:
        storage.close()


def begin(spec: StudySpec, space: SearchSpace, storage: StudyStorage, study: optuna.Study) -> list[str]:
    """Give a new study its initial trials, exactly once, even if several processes start the study.

    Returns:
        Notes for the user, one line each.
    """
    if not (spec.study.baseline or spec.study.warm_start):
        return []
    with _ALONE:
        return _begun(spec, space, storage, study)


def _begun(spec: StudySpec, space: SearchSpace, storage: StudyStorage, study: optuna.Study) -> list[str]:
    study_id = id_of_study(study)
    if not _is_ours_to_do(storage, study_id):
        return []
    # Each step skips what exists already: an earlier process may have died in the middle.
    notes = _warm_start(spec, space, study) if spec.study.warm_start is not None else []
    trials = study.get_trials(deepcopy=False)
    if spec.study.baseline and not any(BASELINE_ATTR in trial.user_attrs for trial in trials):
        study.enqueue_trial(base_point(spec, space), user_attrs={BASELINE_ATTR: True})
    storage.set_study_system_attr(study_id, BEGUN_ATTR, True)
    return notes


def base_point(spec: StudySpec, space: SearchSpace) -> dict[str, Any]:
    """The base config as a point of the search space.

    Raises:
        InputError: It has no value for a searched path, or a value outside of the search space.
    """
    config, absent = spec.base_config(), object()
    values = {path: lookup(config, split_path(path), absent) for path in space.params}
    known = {path: value for path, value in values.items() if value is not absent}
    point: dict[str, Any] = {}
    for path in space.active(known):
        if path not in known:
            fix = f"write `{path}` in the config, or leave `study.baseline` out"
            raise spec.error("the base config has no value of it", path=join_path(("search_space", path)), fix=fix)
        found = space.problem(path, known[path])
        if found is not None:
            fix = f"{found}; or leave `study.baseline` out"
            problem = "the base config can't be the first trial: its value is not in the search space"
            raise spec.error(problem, path=path, value=known[path], fix=fix)
        point[path] = space.as_stored(path, known[path])
    if (violated := space.violated(point)) is not None:
        listed = ", ".join(f"{name} = {show(point[name])}" for name in sorted(violated.names))
        fix = "change these values in the config, or leave `study.baseline` out"
        problem = f"the base config can't be the first trial: it violates this with {listed}"
        raise spec.error(problem, path=violated.place, value=violated.text, fix=fix)
    return point


def known_trials(spec: StudySpec, space: SearchSpace) -> tuple[list[FrozenTrial], int]:
    """The finished trials of ``study.warm_start`` as trials of this study, and how many do not fit its space.

    Raises:
        InputError: The other study optimises something else, or is this study.
        StudyError: The other study does not exist.
    """
    other = load_spec(_other_file(spec))
    same_place = other.path == spec.path or other.storage_url == spec.storage_url
    if same_place and other.study.name == spec.study.name:
        raise spec.error(
            "names this study itself", path="study.warm_start", value=str(other.path), fix="name another one"
        )
    if list(other.study.goals.items()) != list(spec.study.goals.items()):
        goals = ", ".join(f"{metric} ({direction})" for metric, direction in other.study.goals.items())
        fix = "start from a study with the same metrics and directions, in the same order"
        raise spec.error(f"that study optimises {goals}", path="study.warm_start", value=str(other.path), fix=fix)
    try:
        storage = open_storage(other.storage_url, create=False)
    except StudyError as error:
        raise StudyError(f"study.warm_start, {other.path}: {error}") from error
    try:
        source = optuna.load_study(study_name=other.study.name, storage=storage)
        finished = [trial for trial in source.get_trials(deepcopy=False) if _tells_something(trial)]
    except KeyError as error:
        raise StudyError(
            f"study.warm_start: no study named {other.study.name} in {display_url(other.storage_url)}\n"
            f"  fix: run it first with `hpo run {other.path}`, or leave `study.warm_start` out"
        ) from error
    finally:
        storage.close()
    fitting = [trial for trial in finished if spec.defines_by_run or space.contains(trial.params)]
    return [_as_ours(trial, spec, space, other) for trial in fitting], len(finished) - len(fitting)


def _other_file(spec: StudySpec) -> Path:
    path = spec.folder / home(str(spec.study.warm_start))
    if not path.is_file():
        raise spec.error(
            "is a folder" if path.is_dir() else "there is no such file",
            path="study.warm_start",
            value=str(path),
            fix="write the path of another study's YAML file, relative to this file's folder",
        )
    return path


def _tells_something(trial: FrozenTrial) -> bool:
    alone = forked_from(trial) is None  # a fork's result does not depend on its parameters alone
    return alone and trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and bool(trial.values)


def _as_ours(trial: FrozenTrial, spec: StudySpec, space: SearchSpace, other: StudySpec) -> FrozenTrial:
    """A copy with this study's ranges, since samplers ignore trials with other ranges than the search space's."""
    distributions = {path: space.distributions.get(path, trial.distributions[path]) for path in trial.params}
    attrs = {OUTCOME_ATTR: Outcome.DIVERGED} if outcome_of(trial) == Outcome.DIVERGED else {}
    return create_trial(
        state=trial.state,
        values=trial.values,
        params=trial.params,
        distributions=distributions,
        intermediate_values=trial.intermediate_values,
        user_attrs=attrs,
        system_attrs={**_constraints(trial, spec, other), ORIGIN_ATTR: _origin(trial, other)},
    )


def _origin(trial: FrozenTrial, other: StudySpec) -> list[Any]:
    """The study that trained a trial, which need not be ``other`` itself, and the trial's number there."""
    known: list[Any] | None = trial.system_attrs.get(ORIGIN_ATTR)
    return known or [other.study.name, trial.number]


def _constraints(trial: FrozenTrial, spec: StudySpec, other: StudySpec) -> dict[str, float]:
    """How far a trial of another study violates this study's bounds, as Optuna stores it."""
    theirs = {bound.metric: bound for bound in other.study.bounds}
    measured = (trial.user_attrs.get(BEST_ATTR) or {}).get("metrics", {})
    if outcome_of(trial) != Outcome.COMPLETE:
        measured = {}
    found = {}
    for bound in spec.study.bounds:
        value = measured.get(bound.metric)
        if value is None and bound.metric in theirs and bound.metric in trial.constraints:
            value = theirs[bound.metric].value(trial.constraints[bound.metric])
        found[f"{CONSTRAINT_ATTR}{bound.metric}"] = bound.violation(math.nan if value is None else value)
    return found


def _warm_start(spec: StudySpec, space: SearchSpace, study: optuna.Study) -> list[str]:
    trials, unfit = known_trials(spec, space)
    have = [trial.system_attrs.get(ORIGIN_ATTR) for trial in study.get_trials(deepcopy=False)]
    study.add_trials(trial for trial in trials if trial.system_attrs[ORIGIN_ATTR] not in have)
    left = f"; {unfit} more lie outside this search space" if unfit else ""
    return [f"{are(len(trials), 'trial')} known from {spec.study.warm_start}{left}"]


def _is_ours_to_do(storage: StudyStorage, study_id: int) -> bool:
    """Wait until this process is the one that adds the initial trials, or until they have been added."""
    owner = Owner.current()
    ours = [owner.host, owner.boot_id, owner.pid, owner.start_time]
    last: object = None
    end = 0.0
    while BEGUN_ATTR not in (attrs := storage.get_study_system_attrs(study_id)):
        theirs, now = attrs.get(INITIAL_TRIALS_ATTR), time.monotonic()
        with storage.engine.connect() as conn:
            seen = (theirs, count_trials(conn, study_id, tuple(TrialState)))
        if seen != last:  # the other process makes progress
            last, end = seen, now + _PATIENCE
        # If it names this process, an earlier call here was broken off: `_ALONE` keeps out other threads.
        is_dead = theirs == ours or (isinstance(theirs, list) and is_alive(*theirs) is False)
        if (theirs is None or is_dead or now >= end) and _take_over(storage, study_id, theirs, ours):
            return True
        time.sleep(_LOOK)
    return False


def _take_over(storage: StudyStorage, study_id: int, theirs: object, ours: object) -> bool:
    """Record who adds the initial trials, in place of an earlier process (or None); False if too late."""
    table = STUDY_SYSTEM_ATTRS
    row = {"study_id": study_id, "key": INITIAL_TRIALS_ATTR, "value_json": json.dumps(ours)}
    mine = (
        table.c.study_id == study_id,
        table.c.key == INITIAL_TRIALS_ATTR,
        table.c.value_json == json.dumps(theirs),
    )
    with storage.engine.begin() as conn:
        if theirs is not None:
            return conn.execute(sa.update(table).where(*mine).values(row)).rowcount == 1
    try:
        with storage.engine.begin() as conn:
            conn.execute(sa.insert(table), row)
    except IntegrityError:
        return False
    return True
