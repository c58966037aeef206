"""What people and other commands see of a paused trial."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from optuna.trial import TrialState
from rich.console import Console

from hpo.console.events import EventWriter
from hpo.console.lines import Reporter
from hpo.console.live import GrantView, picture
from hpo.console.snapshot import Looks, has_ended
from hpo.console.tally import Tally, viewed
from hpo.console.watch import study_view
from hpo.errors import StudyError
from hpo.execution.messages import EpochsEnded, Extended, Started
from hpo.storage.attributes import FORK_ATTR, GRANTS_ATTR
from hpo.storage.grants import Grant, Granted
from hpo.storage.ledger import Lease
from hpo.storage.settling import Settled
from hpo.storage.study_end import prune_paused
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome
from hpo.study.repair import repair
from hpo.study.retention import clean
from hpo.study.retry import reopen
from hpo.study.status import study_status
from hpo.study.trial_entries import study_trials
from hpo.trial.report import TrialReport
from hpo.trial.resources import Slot
from hpo.wording import granted, paused_at_end
from tests.support.commands import hpo
from tests.support.studies import Studies, ask
from trainer.checkpoint.manager import CheckpointManager

pytestmark = pytest.mark.full


@pytest.fixture
def view(studies: Studies) -> Iterator[OpenStudy]:
    """A study of three trials: one is paused, one runs, one has not begun."""
    with studies.open("study.n_trials=3") as (view,):
        trial, _ = ask(view)
        for step in (1, 2):
            trial.report(1.0 / step, step)
        folder = view.spec.output_dir / "trials" / "0" / "attempt-1" / "checkpoints"
        folder.mkdir(parents=True)
        view.storage.pause(trial._trial_id, 2)
        ask(view)
        yield view


def test_a_fork_that_has_reported_nothing_is_where_it_began(view: OpenStudy) -> None:
    trial, _ = ask(view)
    trial.set_user_attr(FORK_ATTR, {"parent": 0, "epoch": 2, "replaces": None})
    why = {"kind": "fork", "parent": 0, "epoch": 2}
    trial.set_user_attr(GRANTS_ATTR, [{"until": 4, "why": why, "number": 0}])
    (_, entry) = Looks(view).look().status["running_trials"]
    shown = viewed(entry, with_host=False)
    assert (entry["trial"], entry["epoch"], shown.resumed) == (2, 2, 2)


def test_status_counts_it_apart(view: OpenStudy) -> None:
    status = study_status(view)
    assert (status["paused"], status["running"], status["waiting"], status["finished"]) == (1, 1, 0, 0)
    assert [each["trial"] for each in status["running_trials"]] == [1]
    assert not has_ended(view, {**status, "finished": 3, "running": 0})
    entry = study_trials(view)[0]
    assert (entry["outcome"], entry["value"], entry["epochs"]) == ("paused", 0.5, 2)
    attempts = entry["internals"]["attempts"]
    assert [(each["outcome"], each["reason"]) for each in attempts] == [("paused", "after epoch 2")]
    assert view.claimable() == 1, "it counts in the budget"
    assert view.running() == 1


def test_the_commands_show_it(view: OpenStudy) -> None:
    status = hpo("status", view.spec.path, "study.n_trials=3")
    assert [line.split() for line in status.stdout.splitlines() if "paused" in line] == [["paused", "1"]]
    trials = json.loads(hpo("trials", view.spec.path, "study.n_trials=3", "--json").stdout)
    assert [each["outcome"] for each in trials] == ["paused", "running"]


def test_the_live_view_shows_how_many_there_are(view: OpenStudy) -> None:
    tally = Tally(view)
    assert tally.view().paused == study_view(view, Looks(view).look()).paused == 1
    tally.heard("worker-1", TrialReport(1, None, 0.5, 2, 1.0, paused=True))
    assert (tally.view().paused, tally.finished) == (2, 0)
    tally.heard("worker-1", Started(0, Lease(1, 1)))
    assert tally.view().paused == 1
    assert "1 paused" in _picture(tally)


def test_one_that_fails_after_its_pause_is_not_the_best_any_more(view: OpenStudy) -> None:
    tally = Tally(view)
    tally.heard("worker-1", TrialReport(1, None, 0.2, 2, 1.0, paused=True))
    assert [each["trial"] for each in tally.best] == [1]
    tally.heard("worker-1", TrialReport(1, Outcome.TIMED_OUT, 0.1, 3, 2.0, reason="it took too long"))
    assert tally.best == []


def test_the_live_view_counts_what_waits_as_it_happens(studies: Studies) -> None:
    with studies.open("study.n_trials=3") as (view,):
        trial, _ = ask(view)
        view.storage.requeue(trial._trial_id)
        tally = Tally(view)
        assert tally.view().waiting == 1
        tally.heard("worker-1", Started(0, Lease(1, 1)))
        assert tally.view().waiting == 0
        tally.heard("worker-1", TrialReport(0, None, None, 2, 1.0))
        assert tally.view().waiting == 1


def _picture(tally: Tally) -> str:
    out = io.StringIO()
    Console(width=100, file=out).print(picture(tally.view(), 100, 20))
    return out.getvalue()


def test_a_line_and_an_event_tell_of_it(view: OpenStudy, capsys: pytest.CaptureFixture[str]) -> None:
    report = TrialReport(1, None, 0.5, 2, 1.0, paused=True)
    Reporter(view).heard("worker-1", report)
    assert "trial 1    paused    val_loss 0.5          2 epochs" in capsys.readouterr().out
    out = io.StringIO()
    EventWriter(view, out).heard("worker-1", report)
    event = json.loads(out.getvalue())
    assert (event["event"], event["trial"], event["epochs"], event["value"]) == ("trial_paused", 1, 2, 0.5)


def test_the_end_of_one_is_told(view: OpenStudy, capsys: pytest.CaptureFixture[str]) -> None:
    settled = Settled(0, 0, TrialState.PRUNED, "pruned", paused_at_end(2))
    for quiet, said in ((False, "1 paused trial pruned, as the study has ended\n"), (True, "")):
        reporter = Reporter(view, quiet=quiet)
        reporter.heard("", settled)
        assert capsys.readouterr() == ("", "")
        reporter.end("done")
        assert capsys.readouterr() == (said, "")


def test_a_repair_leaves_it_alone(view: OpenStudy) -> None:
    report = repair(view)
    assert report.done == []
    assert [each.trial for each in report.left] == [1]
    assert study_status(view)["paused"] == 1


def test_it_cannot_be_retried(view: OpenStudy) -> None:
    with pytest.raises(StudyError, match="it is paused"):
        reopen(view, [0])


def test_its_newest_checkpoint_stays(view: OpenStudy) -> None:
    folder = view.spec.output_dir / "trials" / "0" / "attempt-1" / "checkpoints"
    for epoch in (1, 2):
        CheckpointManager(folder).write({"state": {"epoch": epoch}}, epoch, 0)
    assert [each.number for each in clean(view).removed] == [0], "the spare one goes"
    assert [path.name for path in folder.iterdir()] == ["epoch-00002.pt"]
    assert clean(view).removed == []


def test_its_newest_checkpoint_stays_where_the_studys_end_has_pruned_it(view: OpenStudy) -> None:
    folder = view.spec.output_dir / "trials" / "0" / "attempt-1" / "checkpoints"
    for epoch in (1, 2):
        CheckpointManager(folder).write({"state": {"epoch": epoch}}, epoch, 0)
    assert len(list(prune_paused(view.storage, view.study_id))) == 1
    clean(view)
    assert [path.name for path in folder.iterdir()] == ["epoch-00002.pt"]


# ---- a study that is given epochs, and a scheduler that says why


@pytest.fixture
def given(studies: Studies) -> Iterator[OpenStudy]:
    """A study of 40 epochs with a trial that has trained two of the three that it was granted."""
    overrides = ("study.epochs=40", "study.scheduler=asha", "study.pruner=none")
    with studies.open(*overrides) as (view,):
        why = {"kind": "model", "predicted": 0.1234, "low": 0.1, "high": 0.2, "incumbent": 0.15}
        grant = Grant(view.study_id, {"number": 0, "until": 3, "why": why})
        with view.storage.granting(grant):
            trial, _ = ask(view)
        for step in (1, 2):
            trial.report(1.0 / step, step)
        yield view


def test_its_progress_is_that_of_its_epochs(given: OpenStudy, capsys: pytest.CaptureFixture[str]) -> None:
    assert study_status(given)["epochs"] == {"trained": 2, "limit": 40}
    tally = Tally(given)
    assert tally.progress == (2, 40, "epochs")
    tally.heard("worker-1", TrialReport(1, None, 0.5, 7, 1.0, paused=True))
    assert tally.progress == (9, 40, "epochs")
    assert tally.best[0]["trial"] == 1
    left = tally.view().left_s
    assert left is not None
    assert left > 0
    Reporter(given).heard("worker-1", TrialReport(1, None, 0.5, 7, 1.0, paused=True))
    assert capsys.readouterr().out.startswith("[ 9/40 epochs] trial 1    paused")
    assert study_view(given, Looks(given).look()).progress == (2, 40, "epochs")
    assert not has_ended(given, {**study_status(given), "running": 0})
    assert has_ended(given, {**study_status(given), "running": 0, "epochs": {"trained": 40, "limit": 40}})


def test_nothing_is_estimated_while_a_trial_is_before_where_it_was(given: OpenStudy) -> None:
    tally = Tally(given)
    tally.begin({"worker-1": Slot("cpu", "cpu", None, 1)})
    tally.heard("worker-1", Started(0, Lease(1, 1)))
    tally.heard("worker-1", EpochsEnded(0, 1, (1.0,), 3))
    assert tally.progress == (1, 40, "epochs")
    assert tally.view().left_s is None


def test_no_time_is_left_once_more_is_trained_than_was_given(given: OpenStudy) -> None:
    tally = Tally(given)
    tally.heard("worker-1", TrialReport(1, None, 0.5, 50, 1.0, paused=True))
    assert tally.progress == (52, 40, "epochs")
    assert tally.view().left_s == 0
    found = Looks(given).look()
    done = {**found.status, "epochs": {"trained": 52, "limit": 40}, "running_trials": []}
    assert study_view(given, replace(found, status=done)).notices == []


def test_the_commands_say_what_it_was_granted_and_why(given: OpenStudy) -> None:
    options = ("study.epochs=40", "study.scheduler=asha", "study.pruner=none")
    rows = [line.split() for line in hpo("status", given.spec.path, *options).stdout.splitlines()]
    assert ["epochs", "2", "of", "40"] in rows
    listed = hpo("trials", given.spec.path, *options, "--internals").stdout
    assert "last granted" in listed.partition("predictions and internals")[2]
    assert "to epoch 3: model, ends at 0.123 (0.1 to 0.2), best 0.15" in listed
    (trial,) = json.loads(hpo("trials", given.spec.path, *options, "--json").stdout)
    assert trial["internals"]["grants"][0]["why"]["predicted"] == 0.1234


_PROMOTED: Granted = {"number": 4, "until": 9, "why": {"kind": "promotion", "incumbent": 0.15}}
_TO_ITS_END: Granted = {"number": 6, "until": None, "why": {"kind": "whole"}}


def test_lines_say_why_a_trial_trains(given: OpenStudy, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = study_trials(given)[0]["internals"]["grants"]
    reporter = Reporter(given)
    reporter.heard("worker-1", Started(0, Lease(1, 1), 0.0, 0, [first]))
    reporter.heard("worker-1", Started(0, Lease(1, 1), 0.0, 2, [first, _PROMOTED]))
    reporter.heard("worker-1", Extended(0, [first, _PROMOTED, _TO_ITS_END]))
    reporter.heard("worker-1", Started(1, Lease(2, 1)))
    assert capsys.readouterr().out.splitlines() == [
        "trial 0 starts, to epoch 3: model, ends at 0.123 (0.1 to 0.2), best 0.15",
        "trial 0 resumes after epoch 2, to epoch 9: promotion, best 0.15",
        "trial 0 trains on after epoch 9, to its end: whole",
    ]


def test_the_live_view_shows_the_latest_grant(given: OpenStudy) -> None:
    tally = Tally(given)
    tally.begin({"worker-1": Slot("cpu", "cpu", None, 1)})
    tally.heard("worker-1", Started(0, Lease(1, 1), 0.0, 2, [_PROMOTED]))
    assert "promotion, best 0.15" in _picture(tally)
    tally.heard("worker-1", Extended(0, [_PROMOTED, _TO_ITS_END]))
    shown = tally.view().workers[0].granted
    assert shown == GrantView(9, None, "whole")
    tally.heard("worker-1", TrialReport(0, None, 0.5, 9, 1.0, paused=True))
    assert tally.view().workers[0].granted is None


def test_a_look_from_elsewhere_shows_it_too(given: OpenStudy) -> None:
    (worker,) = study_view(given, Looks(given).look()).workers
    assert worker.granted == GrantView(0, 3, "model, ends at 0.123 (0.1 to 0.2), best 0.15")


def test_a_trial_that_the_end_has_pruned_says_so(view: OpenStudy) -> None:
    assert [each.reason for each in prune_paused(view.storage, view.study_id)] == [paused_at_end(2)]
    assert study_trials(view)[0]["reason"] == "pruned at epoch 2: paused there when the study ended"
    listed = hpo("trials", view.spec.path, "study.n_trials=3").stdout
    assert "pruned at epoch 2: paused there when the study ended" in listed


@pytest.mark.parametrize(
    ("until", "why", "said"),
    [
        (None, {}, "to its end"),
        (9, {"kind": "promotion", "predicted": None}, "to epoch 9: promotion"),
        (3, {"kind": "", "incumbent": 0.5}, "to epoch 3: best 0.5"),
    ],
)
def test_why_in_words(until: int | None, why: dict[str, object], said: str) -> None:
    assert granted(until, why) == said
