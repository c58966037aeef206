"""Trials read without their curves count, rank and show as whole ones do."""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy as sa
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from hpo.config.spec import load_spec
from hpo.console.snapshot import Looks
from hpo.storage.attributes import IMPORTED_ATTR
from hpo.storage.ledger import Owner
from hpo.storage.optuna_private import TRIAL_SYSTEM_ATTRS, TRIALS, id_of_study
from hpo.storage.outlines import KeptOutlines, outlined_trials, trials_without_curves
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.own_trials import own_trials, trial_value
from hpo.study.status import study_best, study_status
from hpo.study.trial_entries import study_trials
from tests.support.big_study import make_big_study
from tests.support.owners import load, make_study
from tests.support.owners import opened as opened_storage

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
    with opened_study(tmp_path, ready_url) as opened:
        whole, study = own_trials(opened), opened.study_id
        assert study_status(opened) == study_status(opened, whole)
        best = study_best(opened)
        assert isinstance(best, dict)
        assert best["trial"] == 36  # pruned when the study ended, and the best until it paused
        assert best["params"] == {"optimizer.lr": 0.008}
        entries = study_trials(opened)
        assert study_trials(opened, last=5) == entries[-5:]
        assert study_trials(opened, last=1_000) == entries
        left_out = {"metrics", "prediction", "seed", "grants", "fork", "replaced_by"}
        kept = [
            {key: each[key] for key in each.keys() - {"metrics"}}
            | {"internals": {key: each["internals"][key] for key in each["internals"].keys() - left_out}}
            for each in entries
        ]
        assert study_trials(opened, brief=True) == kept
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
            each = all_trials[trial.number]
            each.system_attrs = {
                key: value for key, value in each.system_attrs.items() if not key.startswith("artifacts:")
            }
            trial.intermediate_values = each.intermediate_values
            assert trial == each
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


def test_kept_outlines_follow_the_study_and_read_what_has_ended_once(ready_url: str) -> None:
    make_study(ready_url, 20)
    with opened_storage(ready_url, owner=Owner.current()) as worker, opened_storage(ready_url) as storage:
        study = id_of_study(load(worker))
        kept = KeptOutlines(storage, study)

        def look() -> list[FrozenTrial]:
            found = kept.look()
            assert found == outlined_trials(storage, study)
            return found

        assert look() == []
        ids = [worker.create_new_trial(study) for _ in range(4)]
        for trial_id in ids:
            worker.set_trial_intermediate_value(trial_id, 1, 0.5)
        look()
        worker.pause(ids[0], 1)
        worker.set_trial_state_values(ids[1], COMPLETE, [0.5])
        worker.requeue(ids[2])
        ids.append(worker.create_new_trial(study))
        look()
        assert worker.resume(ids[0])  # a paused one is not asked for: its change is noted
        worker.set_trial_intermediate_value(ids[0], 2, 0.25)
        look()
        worker.pause(ids[0], 2)
        before = look()
        after = kept.look()
        assert [trial.number for trial, old in zip(after, before, strict=True) if trial is old] == [0, 1]


def test_looks_read_no_curves_of_trials_that_have_ended(tmp_path: Path, sqlite_url: str) -> None:
    opened = load_study(load_spec(make_big_study(tmp_path, 30, epochs=10, storage=sqlite_url)))
    read: list[str] = []
    with closing(opened.storage):
        looks = Looks(opened)
        sa.event.listen(opened.storage.engine, "before_cursor_execute", lambda *call: read.append(call[2]))
        found = looks.look()
        assert looks.look() == found
        assert found.status == study_status(opened)
    assert len(found.outcomes) == len(found.seconds) == 30
    assert sum(found.epochs.values()) == found.status["epochs"]["trained"]
    of_curves = [each for each in read if "trial_intermediate_values" in each]
    assert len([each for each in of_curves if "max(trial_intermediate_values.step)" not in each]) == 3  # the best
