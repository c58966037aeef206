"""`hpo replay` on small finished studies in a real database."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import TrialState

from hpo.config.spec import StudySpec
from hpo.search.replay import replay
from hpo.search.schedulers.scheduler import Standing
from hpo.search.schedulers.simulation import Known
from hpo.storage.attributes import FORK_ATTR, MAX_EPOCHS_ATTR, OUTCOME_ATTR, SAME_AS_ATTR
from hpo.study.open_study import OpenStudy
from hpo.study.replay_schedulers import Stored
from hpo.study.replay_study import study_curves
from hpo.study.replayable import replayable
from tests.support.commands import STUDY, hpo, hpo_json
from tests.support.studies import Studies, ask
from tests.unit.search.test_replay import Recorder

pytestmark = pytest.mark.full


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
        curves = study_curves(replayable(view).trials)
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
        done = replay(study_curves(replayable(view).trials), view.study.pruner)
    assert [each.pruned for each in done.trials] == pruned
    assert done.epochs_fraction == 1.0
    assert 0 < sum(pruned) < 18


def test_the_pruner_is_not_asked_where_a_trial_diverged(studies: Studies) -> None:
    """Nor was it in the study: as pruned, it would not count among the complete ones that others compare with."""
    options = "study.pruner={name: median, n_startup_trials: 2, n_warmup_steps: 3}"
    with studies.open(options, "study.n_trials=9") as (view,):
        play(view, 1.0, 1.0, 1.0)
        play(view, 1.0, 1.0, 1.0)
        trial, _ = ask(view)
        for step, value in enumerate((2.0, 2.0, math.nan), start=1):
            trial.report(value, step)
        trial.set_user_attr(OUTCOME_ATTR, "diverged")
        view.study.tell(trial, math.inf)
        play(view, 2.0, 2.0, 2.0, state=TrialState.PRUNED)
        done = replay(study_curves(replayable(view).trials), view.study.pruner)
    assert [each.pruned for each in done.trials] == [False, False, False, True]


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


def test_a_trial_outside_the_bounds_is_no_best_that_a_pruner_could_lose(studies: Studies) -> None:
    bounds = ("study.n_trials=4", "callbacks.parameter_count=true", "study.constraints={parameters: <= 9}")
    with studies.open(*bounds) as (view,):
        for parameters, *values in ((99, 9.0, 0.1), (8, 3.0, 1.0), (9, 4.0, 3.0), (10, 9.0, 0.2)):
            trial, _ = ask(view)
            trial.set_constraint("parameters", parameters - 9)
            for step, value in enumerate(values, start=1):
                trial.report(value, step)
            view.study.tell(trial, values[-1])
    typed = (studies.folder / "study.yaml", *bounds, "--pruner", "threshold,upper=5", "--orders", "1")
    (cut,) = hpo_json("replay", *typed)["pruners"]
    assert cut["epochs_used"] == 6
    assert (cut["regret"], cut["wrongly_pruned"], cut["top_pruned"]) == (0.0, 0, 0)


def test_the_table_says_what_it_leaves_out(finished: Path) -> None:
    printed = hpo("replay", finished, "--pruner", "threshold,upper=5.5", "--orders", "1")
    shown = [line.rstrip() for line in printed.stdout.splitlines()]
    assert printed.stderr == ""
    assert shown[0] == "replay of tiny: 7 trials of 16 epochs, 1 order, 1 worker"
    assert shown[1].split()[:4] == ["pruner", "epochs", "of", "all"]
    assert shown[2].split()[:-1] == ["threshold,upper=5.5", "12", "75.0%", "0.6667", "0.6667", "1.0", "100%"]
    assert shown[3] == ("cut short by the study: 2 of 7 trials; regret and wrongly pruned are among the others")


@pytest.fixture
def forked(finished: Path, studies: Studies) -> Path:
    """The same with two forks, the best trials of all, and one that took over the result of trial 0."""
    with studies.open("study.n_trials=20") as (view,):
        for value in (0.2, 0.1):
            trial, _ = ask(view)
            trial.set_user_attr(FORK_ATTR, {"parent": 0, "epoch": 2, "replaces": None})
            trial.report(value, 3)
            view.study.tell(trial, value)
        trial, _ = ask(view)
        for epoch, value in enumerate((9.0, 1.0, 1.5), start=1):
            trial.report(value, epoch)
        trial.set_user_attr(SAME_AS_ATTR, 0)
        view.study.tell(trial, 1.0)
    return finished


@pytest.mark.parametrize("option", ["--pruner", "--scheduler"])
def test_forks_and_known_results_are_left_out_and_counted(forked: Path, option: str) -> None:
    typed = (option, {"--pruner": "none", "--scheduler": "asha"}[option], "--orders", "1")
    data = hpo_json("replay", forked, "study.n_trials=20", *typed)
    assert (data["trials"], data["epochs"], data["left_out"]) == (7, 16, {"forks": 2, "taken_over": 1})
    printed = hpo("replay", forked, "study.n_trials=20", *typed).stdout
    assert "\nleft out: 2 forks of other trials and 1 trial that took over a known result\n" in printed


@pytest.mark.parametrize("option", ["--pruner", "--scheduler"])
def test_a_study_with_little_but_forks_says_that_they_do_not_count(studies: Studies, option: str) -> None:
    with studies.open() as (view,):
        play(view, 1.0)
        for value in (0.2, 0.1):
            trial, _ = ask(view)
            trial.set_user_attr(FORK_ATTR, {"parent": 0, "epoch": 1, "replaces": None})
            trial.report(value, 2)
            view.study.tell(trial, value)
    name = {"--pruner": "none", "--scheduler": "asha"}[option]
    said = hpo("replay", studies.folder / "study.yaml", option, name, code=3).stderr
    assert "; left out are 2 forks of other trials\n" in said
    assert "  fix: replay a study without a scheduler that forks" in said


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


def test_several_objectives_are_refused_by_their_line(studies: Studies) -> None:
    text = STUDY.replace("pruner: none", "pruner: none\n  objectives: {val_loss: minimize, val_mae: minimize}")
    with studies.open(text=text):
        refused = hpo("replay", studies.folder / "study.yaml", code=2).stderr
    assert re.search(r"study\.yaml:\d+: study\.objectives: can't be replayed: pruners and schedulers", refused)
    assert "--pruner" not in refused


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
        ("median,3", "command line: --pruner: is not a pruner", "--pruner median,n_warmup_steps=3"),
        (",", "command line: --pruner: is not a pruner", "value: ,"),
        (
            "asha,factor=4",
            "command line: --pruner asha,factor=4: is a scheduler, not a pruner",
            "fix: write `--scheduler asha,factor=4`",
        ),
        (
            "percentile",
            "command line: --pruner percentile: PercentilePruner needs the argument percentile",
            "percentile: …",
        ),
        (
            "median,n_warmup_steps=-1",
            "command line: --pruner median,n_warmup_steps=-1: median refuses its arguments",
            "n_warmup_steps",
        ),
        (
            "threshold,upper=[1]",
            "command line: --pruner threshold,upper=[1]: must be a number or null",
            "upper",
        ),
        (
            "hyperband,max_resource=auto,reduction_factor=1",
            "command line: --pruner hyperband,max_resource=auto,reduction_factor=1: hyperband refuses its",
            "reduction_factor is 1: give at least 2",
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
    assert "fix: finish more trials; without a pruner and a scheduler all of them run" in printed


def test_a_study_that_is_not_there_is_an_error(studies: Studies) -> None:
    studies.spec()
    assert "hpo run" in hpo("replay", studies.folder / "study.yaml", "--pruner", "none", code=3).stderr


@pytest.mark.parametrize("options", [("--orders", "0"), ("--workers", "0")])
def test_counts_start_at_one(finished: Path, options: tuple[str, str]) -> None:
    hpo("replay", finished, *options, code=2)


# ---- under other schedulers


@pytest.fixture
def known(studies: Studies) -> Path:
    """Nine whole trials of nine epochs, the best first: level k / 10 after nine epochs, 1 above it after one."""
    with studies.open("study.n_trials=20", "trainer.max_epochs=9", "study.pruner=none") as (view,):
        for level in range(9):
            play(view, *[level / 10 + (9 - epoch) / 8 for epoch in range(1, 10)])
    return studies.folder / "study.yaml"


_WITH = ("study.n_trials=20", "trainer.max_epochs=9", "study.pruner=none")


def test_a_scheduler_is_replayed_on_the_stored_curves(known: Path) -> None:
    data = hpo_json("replay", known, *_WITH, "--scheduler", "asha", "--scheduler", "asha,factor=9", "--orders", 1)
    assert {
        name: data[name] for name in ("trials", "cut_short", "epochs", "found", "limit", "orders", "workers")
    } == {
        "trials": 9,
        "cut_short": 0,
        "epochs": 81,
        "found": 0.0,
        "limit": None,
        "orders": 1,
        "workers": 1,
    }
    first, second = data["schedulers"]
    assert first == {
        "scheduler": "asha",
        "epochs_used": 9 + 3 + 3 + 6,
        "found": 0.0,
        "regret": 0.0,
        "trials": 9,
        "grants": 9 + 3 + 1,
        "at_edge": 0,
        "worst_regret": 0.0,
        "decision_ms": first["decision_ms"],
        "slowest_decision_ms": first["slowest_decision_ms"],
    }
    assert (second["scheduler"], second["epochs_used"]) == ("asha,factor=9", 9 + 8)


@pytest.mark.parametrize("name", ["freeze_thaw", "hyperband"])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_given_epochs_are_used_and_the_regret_is_that_of_what_was_trained(
    name: str, workers: int, known: Path
) -> None:
    arguments = ("replay", known, *_WITH, "--scheduler", name, "--epochs", 20, "--workers", workers, "--orders", 2)
    data = hpo_json(*arguments)
    (found,) = data["schedulers"]
    assert (data["limit"], found["epochs_used"]) == (20, 20)
    # The best is 0, and the median of the ends .4.
    assert found["regret"] == pytest.approx(found["found"] / 0.4)
    same = hpo_json(*arguments)["schedulers"][0]
    assert {**found, "decision_ms": 0, "slowest_decision_ms": 0} == {
        **same,
        "decision_ms": 0,
        "slowest_decision_ms": 0,
    }


@pytest.mark.parametrize("whole", [False, True])
def test_the_regret_of_a_study_without_a_whole_trial_above_its_best_is_by_the_median_of_all_ends(
    studies: Studies, whole: bool
) -> None:
    with studies.open(*_WITH) as (view,):
        play(view, 2.5, 2.0, 1.0, state=None if whole else TrialState.PRUNED)
        for value in (3.0, 6.0, 5.0):
            play(view, value, state=TrialState.PRUNED)
    typed = ("replay", studies.folder / "study.yaml", *_WITH, "--scheduler", "asha", "--orders", 1, "--epochs")
    (found,) = hpo_json(*typed, 2)["schedulers"]
    # It starts trials 0 and 1, and finds 2.5. The best is 1, and the median of 1, 3, 6 and 5 is 4.
    assert (found["found"], found["regret"]) == (2.5, (2.5 - 1) / (4 - 1))
    (found,) = hpo_json(*typed, 9)["schedulers"]
    assert (found["found"], found["regret"], found["worst_regret"]) == (1.0, 0.0, 0.0)


def test_a_replay_that_finds_nothing_has_no_finite_regret(studies: Studies) -> None:
    with studies.open(*_WITH) as (view,):
        for values in ((math.nan, math.nan), (math.nan, 2.0, math.nan), (math.nan, 1.0, math.nan)):
            play(view, *values, state=TrialState.PRUNED)
    typed = ("replay", studies.folder / "study.yaml", *_WITH, "--scheduler", "asha", "--epochs", 1, "--orders", 2)
    assert re.search(r"asha .* inf +inf +inf", hpo(*typed).stdout)


def test_what_is_not_stored_is_said(finished: Path) -> None:
    printed = hpo("replay", finished, "study.n_trials=20", "--scheduler", "asha,first_rung=2").stdout
    assert "the study itself" in printed
    assert "cut short by the study: 2 of 7 trials" in printed
    (entry,) = hpo_json("replay", finished, "study.n_trials=20", "--scheduler", "asha", "--orders", 1)[
        "schedulers"
    ]
    assert entry["at_edge"] == 1, "the failed one stood best at the first epoch, and had one more"


@pytest.mark.parametrize("reported", [True, False])
def test_values_of_trials_that_diverged_or_failed_are_not_found(studies: Studies, reported: bool) -> None:
    """Whether it has reported a value that is not finite, or diverged within the epoch."""
    with studies.open(*_WITH) as (view,):
        for values in ((3.0, 2.0), (5.0, 4.0)):
            play(view, *values)
        play(view, 0.5, 0.4, state=TrialState.FAIL)
        trial, _ = ask(view)
        trial.report(0.1, 1)
        if reported:
            trial.report(math.nan, 2)
        trial.set_user_attr(OUTCOME_ATTR, "diverged")
        view.study.tell(trial, math.inf)
    data = hpo_json("replay", studies.folder / "study.yaml", *_WITH, "--scheduler", "asha", "--orders", 1)
    (entry,) = data["schedulers"]
    assert (data["trials"], data["found"]) == (4, 2.0)
    # It promotes none but the one that diverges, and the median end is 3.
    assert (entry["trials"], entry["found"], entry["regret"]) == (4, 3.0, 1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--scheduler", "ash"), "--scheduler ash: no scheduler has this name"),
        (
            ("--scheduler", "median"),
            "--scheduler median: is a pruner, not a scheduler\n  fix: write `--pruner median`",
        ),
        (("--scheduler", "asha,factr=4"), "--scheduler asha,factr=4: Asha takes no such argument"),
        (("--scheduler", "asha,4"), "--scheduler: is not a scheduler"),
        (("--scheduler", "pbt"), "--scheduler pbt: can't be replayed"),
        (("--scheduler", "asha", "--pruner", "none"), "--scheduler: can't stand beside `--pruner`"),
        (("--epochs", "9"), "--epochs: is about `--scheduler`"),
    ],
)
def test_a_scheduler_that_can_not_be_replayed_is_refused(options: tuple[str, ...], said: str, known: Path) -> None:
    result = hpo("replay", known, *_WITH, *options, code=2)
    assert said in result.stderr


def test_a_proposal_is_trained_as_the_nearest_that_is_left() -> None:
    space = {"x": FloatDistribution(1e-4, 1.0, log=True), "kind": CategoricalDistribution(["a", "b"])}
    points = [{"x": 0.5, "kind": "a"}, {"x": 1e-3, "kind": "a"}, {"x": 1e-2, "kind": "b"}]
    stored = Stored([Known(point, {1: 1.0}) for point in points], Standing(read=list, space=space))
    assert stored.draw({"x": 2e-3, "kind": "a"}).params == points[1]
    assert stored.draw({"x": 2e-3, "kind": "b"}).params == points[2]
    assert stored.draw(None).params == points[0]


DRAWS = """
study: {name: tiny, n_trials: 3, metric: value, direction: minimize, pruner: none}
objective: {_target_: parts.draws}
"""


def test_a_scheduler_that_needs_a_space_is_refused_for_a_function_that_draws(studies: Studies) -> None:
    with studies.open(text=DRAWS) as (view,):
        for value in (2.0, 1.0, 3.0):
            trial, _ = ask(view)
            trial.report(value, 1)
            view.study.tell(trial, value)
    said = hpo("replay", studies.folder / "study.yaml", "--scheduler", "freeze_thaw", code=2).stderr
    assert said.startswith("command line: --scheduler freeze_thaw: needs a search space, and the function of")
    assert "asha" in said
    hpo("replay", studies.folder / "study.yaml", "--scheduler", "asha", "--orders", "1")
