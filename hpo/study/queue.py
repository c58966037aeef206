"""Enqueues trials with given parameters, and computes the budget of a study whose sampler walks a grid."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.config.marks import COMMAND_LINE
from hpo.config.paths import same, show, suggest_name
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.errors import BudgetExhaustedError, InputError, StudyError
from hpo.search.distinct import point_key
from hpo.search.samplers import ExhaustiveSampler
from hpo.search.valid_points import ValidPoints
from hpo.storage.attributes import BUDGET_ATTR, IMPORTED_ATTR
from hpo.storage.budget import Room
from hpo.storage.optuna_private import FIXED_PARAMS_ATTR, fixed_params, id_of_study
from hpo.storage.study_storage import StudyStorage


def enqueue(
    spec: StudySpec, storage: StudyStorage, study: optuna.Study, point: dict[str, Any]
) -> tuple[int, list[int]]:
    """Put a trial with these parameters in the queue; parameters that are not given are drawn when it starts.

    If all trials of the stored budget are claimed but the study file allows more, the budget grows by one.

    Args:
        spec: The study file.
        storage: The study's storage.
        study: The study.
        point: The parameters, from `checked_point`.

    Returns:
        The trial's number, and the numbers of earlier trials with the same parameters.

    Raises:
        BudgetExhaustedError: All of the study's trials have been claimed.
        StudyError: All points of its grid have been claimed.
    """
    trials = study.get_trials(deepcopy=False)
    # Read after the trials: another process that enqueues at the same time may have raised it meanwhile.
    budget = int(study.user_attrs.get(BUDGET_ATTR, spec.study.n_trials))
    own = [trial for trial in trials if IMPORTED_ATTR not in trial.system_attrs]
    space = SearchSpace.from_spec(spec).distributions
    key = point_key(point, space)
    earlier = [trial.number for trial in own if point_key(trial.params or fixed_params(trial), space) == key]
    # Like Optuna's enqueue_trial, which does not return the trial's number; a worker may take it immediately.
    template = create_trial(state=TrialState.WAITING, system_attrs={FIXED_PARAMS_ATTR: point})
    sampler = study.sampler
    of_grid = _trials_of_grid(sampler, trials) if isinstance(sampler, ExhaustiveSampler) else None
    is_through = of_grid is not None and len(own) >= of_grid
    beside = of_grid is not None and budget >= of_grid
    room = Room(most=0 if is_through else spec.study.n_trials, beside=beside)
    try:
        trial_id = storage.enqueue(id_of_study(study), template, room)
    except BudgetExhaustedError as error:
        if is_through:
            raise _no_point_left(earlier) from error
        raise
    return storage.get_trial_number_from_id(trial_id), earlier


def _no_point_left(earlier: Sequence[int]) -> StudyError:
    text = "the grid has no point left: every trial of it has been claimed"
    if not earlier:
        return StudyError(f"{text}\n  fix: queue the trial in a new study, before its grid is through")
    number = earlier[0]
    return StudyError(
        f"{text}, and trial {number} has these parameters\n"
        f"  fix: train them again with `hpo train --trial {number} --from-scratch`; "
        f"if that trial has failed, `hpo retry --trial {number}`"
    )


def budget_of(spec: StudySpec, study: optuna.Study) -> int:
    """How many trials the study may have; with a grid at most its points and the enqueued trials."""
    sampler = study.sampler
    if not isinstance(sampler, ExhaustiveSampler):
        return spec.study.n_trials
    return min(spec.study.n_trials, _trials_of_grid(sampler, study.get_trials(deepcopy=False)))


def _trials_of_grid(sampler: ExhaustiveSampler, trials: Sequence[FrozenTrial]) -> int:
    """The number of a grid's points, the baseline's included, and of the other enqueued trials."""
    return sampler.left(trials) + sum(FIXED_PARAMS_ATTR in trial.system_attrs for trial in trials)


def checked_point(space: SearchSpace, sampler: BaseSampler, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted path, in the form in which a queued trial stores them.

    Raises:
        InputError: A value is not in the space, or will never be used.
    """
    for path in given:
        if path not in space.params:
            fix = suggest_name(path, list(space.params), what="searched are")
            raise InputError("is not searched", file=COMMAND_LINE, path=path, value=show(given[path]), fix=fix)
    given = {path: space.as_stored(path, value) for path, value in given.items()}
    for path, value in given.items():
        if (instead := space.problem(path, value)) is not None:
            problem = "is not in the search space"
            raise InputError(problem, file=COMMAND_LINE, path=path, value=show(value), fix=instead)
        for other, wanted in space.params[path].when.items():
            if other in space.params and not any(same(given.get(other), each) for each in wanted):
                fix = f"give `{other}` too: {', '.join(map(show, wanted))}"
                problem = f"is searched only under a condition on `{other}`"
                raise InputError(problem, file=COMMAND_LINE, path=path, value=show(value), fix=fix)
    missing = [path for path in space.active(given) if path not in given]
    if isinstance(sampler, ExhaustiveSampler) and missing:
        fix = f"give {', '.join(missing)} too"
        raise InputError("a grid draws no single values", file=COMMAND_LINE, path="enqueue", fix=fix)
    _check_where(space, given, missing)
    return given


def _check_where(space: SearchSpace, given: Mapping[str, Any], missing: Sequence[str]) -> None:
    """Refuse values that violate the study's conditions, or that leave no point which satisfies them."""
    violated = None if missing else space.violated(given)
    if violated is not None:
        values = ", ".join(f"{name} = {show(given[name])}" for name in sorted(violated.names))
        raise InputError(
            f"violates a condition of the search space with {values}",
            file=COMMAND_LINE,
            path=violated.place,
            value=violated.text,
            fix="give values that satisfy it",
        )
    if missing and space.where:
        try:
            ValidPoints(space, random.Random(0)).any(given)
        except StudyError as error:
            values = ", ".join(f"{path}={show(value)}" for path, value in given.items())
            problem = f"no point with {values} satisfies `where`"
            raise InputError(problem, file=COMMAND_LINE, path="where", fix="give other values") from error
