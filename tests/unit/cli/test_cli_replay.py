"""`hpo replay` on small finished studies in a real database."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hpo.config.spec import StudySpec
from hpo.search.replay import replay
from hpo.storage.attributes import MAX_EPOCHS_ATTR, OUTCOME_ATTR
from hpo.study.open_study import OpenStudy
from hpo.study.replay_study import study_curves
from tests.support.commands import hpo, hpo_json
from tests.support.studies import Studies, ask
from tests.unit.search.test_replay import Recorder


def play(view: OpenStudy, *values: float, final: float | None = None, state: TrialState | None = None) -> None:
    """A trial with this curve; its value is the best of it unless it ended otherwise."""
    trial, _ = ask(view)
    for step, value in enumerate(values, start=1):
        trial.report(value, step)
    pick = min if view.spec.study.direction == "minimize" else max
    if state is not None:
        view.study.tell(trial, state=state)
    else:
        view.study.tell(trial, pick(values) if final is None else final)


@pytest.fixture
def finished(studies: Studies) -> Path:
    """Four whole trials (values 1, 4, 2, 3), one that diverged, one pruned, one failed, one that still runs."""
    with studies.open("study.n_trials=20") as (view,):
        play(view, 9.0, 1.0, 1.5)
        play(view, 6.0, 5.0, 4.0)
        play(view, 5.0, 2.0)  # stopped early
        play(view, 3.5, 3.2, 3.0)
        trial, _ = ask(view)
        trial.report(2.0, 1)
        trial.report(math.nan, 2)
        trial.set_user_attr(OUTCOME_ATTR, "diverged")
        view.study.tell(trial, math.inf)
        play(view, 8.0, state=TrialState.PRUNED)
        play(view, 0.5, 0.4, state=TrialState.FAIL)
        play(view, state=TrialState.FAIL)  # before its first epoch
        view.study.add_trial(optuna.trial.create_trial(value=0.0, intermediate_values={1: 0.0}))
        ask(view)
    return studies.folder / "study.yaml"


def by_pruner(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["pruner"]: entry for entry in data["pruners"]}


def test_the_curves_are_those_of_the_finished_trials(finished: Path, studies: Studies) -> None:
    with studies.open("study.n_trials=20") as (view,):
        curves = study_curves(view)
    assert [curve.epochs for curve in curves] == [3, 3, 2, 3, 2, 1, 2]
    assert [curve.final for curve in curves[:5]] == [1.0, 4.0, 2.0, 3.0, math.inf]
    assert [curve.end for curve in curves[4:]] == [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]
    assert [curve.whole for curve in curves] == [True] * 5 + [False] * 2


def test_the_studys_own_pruner_decides_as_it_did(studies: Studies) -> None:
    with studies.open("study.pruner={name: median, n_startup_trials: 2}", "study.n_trials=20") as (view,):
        pruned = []
        for number in range(20):
            trial, _ = ask(view)
            for step in range(1, 6):
                trial.report(math.sin(7 * number) - 0.1 * step * math.cos(3 * number), step)
                if trial.should_prune():
                    break
            pruned.append(trial.should_prune())
            view.study.tell(trial, None if pruned[-1] else 1.0, TrialState.PRUNED if pruned[-1] else None)
        done = replay(study_curves(view), view.study.pruner)
    assert [each.pruned for each in done.trials] == pruned
    assert done.epochs_fraction == 1.0
    assert 0 < sum(pruned) < 18


def test_a_replay_is_told_what_a_real_run_is(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Recorder] = []

    def recorder(spec: StudySpec) -> Recorder:
        asked.append(Recorder())
        return asked[-1]

    monkeypatch.setattr("hpo.study.replay_study.make_pruner", recorder)
    hpo("replay", finished, "trainer.max_epochs=3", "--pruner", "none", "--orders", "2")
    _, first, second = (each.study for each in asked)  # one to try it out, and a new one for each order
    for study in (first, second):
        assert study is not None
        assert (study.study_name, study.user_attrs) == ("tiny", {MAX_EPOCHS_ATTR: 3})
        assert len(study.get_trials()) == 7


def test_each_pruner_is_judged_by_hand(finished: Path) -> None:
    typed = ("--pruner", "none", "--pruner", "threshold,upper=5.5", "--orders", "1")
    data = hpo_json("replay", finished, *typed)
    assert (data["trials"], data["cut_short"], data["epochs"]) == (7, 2, 16)
    assert (data["orders"], data["workers"]) == (1, 1)
    kept, cut = by_pruner(data).values()
    assert (kept["epochs_used"], kept["epochs_fraction"], kept["regret"]) == (16, 1.0, 0.0)
    # Trials 0, 1 and 5 end after their first epoch. Trial 4 has nothing left after the one that is no number.
    assert (cut["epochs_used"], cut["epochs_fraction"]) == (12, 0.75)
    assert cut["regret"] == pytest.approx((2.0 - 1.0) / (2.5 - 1.0))
    assert (cut["wrongly_pruned"], cut["top_pruned"]) == (1, 1)


def test_the_table_says_what_it_leaves_out(finished: Path) -> None:
    printed = hpo("replay", finished, "--pruner", "threshold,upper=5.5", "--orders", "1")
    shown = [line.rstrip() for line in printed.stdout.splitlines()]
    assert printed.stderr == ""
    assert shown[0] == "replay of tiny: 7 trials of 16 epochs, 1 order, 1 worker"
    assert shown[1].split()[:4] == ["pruner", "epochs", "of", "all"]
    assert shown[2].split()[:-1] == ["threshold,upper=5.5", "12", "75.0%", "0.6667", "0.6667", "1.0", "100%"]
    assert shown[3] == ("cut short by the study: 2 of 7 trials; regret and wrongly pruned are among the others")


def test_more_orders_and_workers_are_the_same_each_time(finished: Path) -> None:
    def figures(*options: str) -> list[float]:
        (entry,) = hpo_json("replay", finished, "--pruner", "median,n_startup_trials=1", *options)["pruners"]
        return [entry[name] for name in ("epochs_fraction", "worst_regret", "wrongly_pruned")]

    assert figures() == figures()
    assert figures("--workers", "3") == figures("--workers", "3")
    assert figures("--orders", "1") != figures("--orders", "6")


def test_the_studys_own_pruner_comes_first_and_once(finished: Path) -> None:
    own = hpo_json("replay", finished, "study.pruner={name: threshold, upper: 5.5}", "--orders", "1")
    assert list(by_pruner(own)) == ["threshold (the study's own)", "none", "median", "predicted_loss"]
    assert own["pruners"][0]["epochs_used"] == 12
    median = hpo_json("replay", finished, "study.pruner=median", "--orders", "1")
    assert list(by_pruner(median)) == ["median (the study's own)", "none", "predicted_loss"]


def test_a_wrapped_pruner_takes_arguments_in_brackets(finished: Path) -> None:
    typed = "patient,patience=1,wrapped_pruner={name: threshold, upper: 5.5}"
    (entry,) = hpo_json("replay", finished, "--pruner", typed)["pruners"]
    assert entry["pruner"] == typed
    assert 0 < entry["epochs_fraction"] <= 1


def test_a_study_that_maximises_is_judged_the_other_way(studies: Studies) -> None:
    with studies.open("study.metric=val_mae", "study.direction=maximize") as (view,):
        play(view, 1.0, 9.0)
        play(view, 6.0, 3.0)
        play(view, 4.0, 5.0)
    options = (
        "study.metric=val_mae",
        "study.direction=maximize",
        "--pruner",
        "threshold,lower=2",
        "--orders",
        "1",
    )
    (entry,) = hpo_json("replay", studies.folder / "study.yaml", *options)["pruners"]
    assert (entry["epochs_used"], entry["wrongly_pruned"]) == (5, 1)
    assert entry["regret"] == pytest.approx((9.0 - 6.0) / (9.0 - 6.0))


@pytest.mark.parametrize(
    ("typed", "first_line", "rest"),
    [
        ("medain", "command line: --pruner medain: no pruner has this name", "did you mean `median`?"),
        (
            "median,warmup=3",
            "command line: --pruner median,warmup=3: MedianPruner takes no such argument",
            "value: warmup=3",
        ),
        ("median,3", "command line: --pruner: is no pruner", "--pruner median,n_warmup_steps=3"),
        (",", "command line: --pruner: is no pruner", "value: ,"),
        (
            "percentile",
            "command line: --pruner percentile: PercentilePruner needs the argument percentile",
            "percentile: …",
        ),
        (
            "median,n_warmup_steps=-1",
            "command line: --pruner median,n_warmup_steps=-1: MedianPruner refuses its arguments",
            "n_warmup_steps",
        ),
        (
            "threshold,upper=[1]",
            "command line: --pruner threshold,upper=[1]: ThresholdPruner refuses its arguments",
            "upper",
        ),
        (
            "hyperband,max_resource=auto,reduction_factor=1",
            "command line: --pruner hyperband,max_resource=auto,reduction_factor=1: can't be used with these",
            "fix: see the class of that name",
        ),
    ],
)
def test_a_mistyped_pruner_is_named_as_it_was_typed(
    finished: Path, typed: str, first_line: str, rest: str
) -> None:
    printed = hpo("replay", finished, "--pruner", typed, code=2).stderr
    assert printed.startswith(first_line)
    assert rest in printed
    assert "study.pruner" not in printed


def test_nothing_to_judge_by_is_an_error(studies: Studies) -> None:
    with studies.open() as (view,):
        play(view, 2.0, 1.0)
        play(view, 3.0, state=TrialState.PRUNED)
        play(view, math.nan, final=math.inf)
    printed = hpo("replay", studies.folder / "study.yaml", "--pruner", "none", code=3).stderr
    assert "fewer than 2 trials that ran to their end with a finite value" in printed
    assert "fix: finish more trials" in printed


def test_a_study_that_is_not_there_is_an_error(studies: Studies) -> None:
    studies.spec()
    assert "hpo run" in hpo("replay", studies.folder / "study.yaml", "--pruner", "none", code=3).stderr


@pytest.mark.parametrize("options", [("--orders", "0"), ("--workers", "0")])
def test_counts_start_at_one(finished: Path, options: tuple[str, str]) -> None:
    hpo("replay", finished, *options, code=2)
