"""Trials read without their curves count, rank and show as whole ones do."""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial

from hpo.config.spec import load_spec
from hpo.storage.attributes import IMPORTED_ATTR
from hpo.storage.optuna_private import TRIAL_SYSTEM_ATTRS, TRIALS
from hpo.storage.outlines import outlined_trials, trials_without_curves
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.status import own_trials, study_best, study_status, study_trials, trial_value
from tests.support.big_study import make_big_study

NAN, INF = math.nan, math.inf
COMPLETE, PRUNED, RUNNING, FAIL = TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.FAIL
#: State, value, curve, user attributes, system attributes.
ODD: list[tuple[TrialState, float | None, list[float], dict[str, Any], dict[str, Any]]] = [
    (COMPLETE, 0.001, [0.5, 0.001], {"hpo:best": {"epoch": 2, "metrics": {"val_loss": 0.001}}}, {}),
    (COMPLETE, 0.0001, [0.1], {}, {}),  # imported
    (COMPLETE, 0.0002, [0.1], {}, {"constraints:size": 1.0}),
    (COMPLETE, INF, [0.3, NAN], {"hpo:outcome": "diverged"}, {}),
    (RUNNING, None, [NAN, -INF, 0.2, INF], {}, {}),
    (RUNNING, None, [0.4, 0.3], {"hpo:paused": 2, "hpo:best": {"epoch": 2, "metrics": {"val_loss": 0.3}}}, {}),
    (PRUNED, 0.3, [0.3, 0.7], {"hpo:paused": 2, "hpo:best": {"epoch": 1, "metrics": {"val_loss": 0.0005}}}, {}),
    (PRUNED, None, [0.9], {"hpo:fork": {"parent": 0, "epoch": 7, "replaces": 2}}, {}),
    (FAIL, None, [], {"hpo:outcome": "error", "hpo:reason": "no", "hpo:traceback": "line 1"}, {}),
]


def opened_study(folder: Path, url: str) -> OpenStudy:
    opened = load_study(load_spec(make_big_study(folder, 30, epochs=10, storage=url)))
    for place, (state, value, curve, user, system) in enumerate(ODD):
        trial = create_trial(
            state=state,
            value=value,
            params={"optimizer.lr": 0.002 + 0.001 * place},
            distributions={"optimizer.lr": FloatDistribution(1e-3, 1e-1, log=True)},
            intermediate_values=dict(enumerate(curve, start=1)),
            user_attrs=user,
            system_attrs=system,
        )
        optuna.Study("big", opened.storage).add_trial(trial)
    with opened.storage.engine.begin() as conn:  # what is added as finished counts as imported
        marks, own = TRIAL_SYSTEM_ATTRS, sa.select(TRIALS.c.trial_id).where(TRIALS.c.number != 31)
        conn.execute(sa.delete(marks).where(marks.c.key == IMPORTED_ATTR, marks.c.trial_id.in_(own)))
    opened.forget_looks()
    return opened


def test_outlines_count_rank_and_show_as_whole_trials_do(tmp_path: Path, ready_url: str) -> None:
    opened = opened_study(tmp_path, ready_url)
    with closing(opened.storage):
        whole, study = own_trials(opened), opened.study_id
        assert study_status(opened) == study_status(opened, whole)
        best = study_best(opened)
        assert isinstance(best, dict)
        assert best["trial"] == 36  # pruned when the study ended, and the best until it paused
        assert best["params"] == {"optimizer.lr": 0.008}
        entries = study_trials(opened)
        assert study_trials(opened, last=5) == entries[-5:]
        assert study_trials(opened, last=1_000) == entries
        shown = {entry["trial"]: entry for entry in entries}
        assert set(shown) == {trial.number for trial in whole}
        for trial in whole:
            entry = shown[trial.number]
            assert entry["value"] == (value := trial_value(opened, trial)) or not math.isfinite(value or NAN)
            assert entry["params"] == trial.params
            assert entry["epochs"] == (trial.last_step or 7 * ("hpo:fork" in trial.user_attrs))
        all_trials = {trial.number: trial for trial in opened.study.get_trials()}
        without = trials_without_curves(opened.storage, study, minimize=True)
        assert [trial.number for trial in without] == sorted(all_trials)
        for trial in without:
            trial.intermediate_values = all_trials[trial.number].intermediate_values
            assert trial == all_trials[trial.number]
        largest = trials_without_curves(opened.storage, study, minimize=False)[36]
        assert largest.intermediate_values == {2: 0.7}


def test_status_reads_no_parameters_and_of_each_curve_its_length(tmp_path: Path, sqlite_url: str) -> None:
    opened = load_study(load_spec(make_big_study(tmp_path, 30, epochs=10, storage=sqlite_url)))
    read: list[str] = []
    with closing(opened.storage):
        sa.event.listen(opened.storage.engine, "before_cursor_execute", lambda *call: read.append(call[2]))
        assert len(outlined_trials(opened.storage, opened.study_id)) == 30
    of_curves = [each for each in read if "trial_intermediate_values" in each]
    assert len(of_curves) == 1
    assert "max(trial_intermediate_values.step)" in of_curves[0]
    assert not any("trial_params" in each for each in read)
