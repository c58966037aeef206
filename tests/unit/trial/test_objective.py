"""One trial from its parameters to its state, with real training: seven ends, and what lies between them."""

from __future__ import annotations

import io
import json
import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from optuna.trial import TrialState

from hpo.storage.attributes import BEST_ATTR, OUTCOME_ATTR, PREDICTION_ATTR, REASON_ATTR, RUN_ATTR, TRACEBACK_ATTR
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.outcome import Outcome, outcome_of
from hpo.study.own_trials import best_trial
from hpo.study.status import study_best, study_status
from hpo.study.trial_entries import study_trials
from hpo.wording import ENDED_OUTSIDE
from tests.support.attempts import From, dying, run, stored
from tests.support.databases import server_of
from tests.support.studies import Studies
from trainer.checkpoint.manager import load_checkpoint

FAULTS = """
import asyncio
import sys
import torch


def huge(outputs, targets):
    return torch.empty(2**60).sum()


def python_memory(outputs, targets):
    raise MemoryError


def cuda_memory(outputs, targets):
    raise torch.OutOfMemoryError("CUDA out of memory")


class Big(torch.nn.Module):
    def __init__(self, hidden):
        cuda_memory(None, None)


def ready():
    from torch.utils.data import DataLoader
    from parts import load

    return {name: DataLoader(each, 8) for name, each in load().items()}


def leave(outputs, targets):
    sys.exit(0)


def wrong(outputs, targets):
    raise KeyError("a key")


def interrupt(outputs, targets):
    raise KeyboardInterrupt("by the code itself")


def generator_exit(outputs, targets):
    raise GeneratorExit


def cancelled(outputs, targets):
    raise asyncio.CancelledError("a task")


class Own(BaseException):
    def __reduce__(self):
        raise TypeError("not to be pickled")


def own(outputs, targets):
    raise Own("of no known kind")


class Mute(Exception):
    def __str__(self):
        raise ZeroDivisionError


def mute(outputs, targets):
    raise Mute


class Number(RuntimeError):
    def __str__(self):
        return 3


def number(outputs, targets):
    raise Number


def odd(outputs, targets):
    raise ValueError("half \\ud800, end \\x00, \\x1b[2J")


def endless(outputs, targets):
    raise ValueError("x" * 3_000_000)


def recursive(outputs, targets):
    return recursive(outputs, targets)


def group(outputs, targets):
    raise BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError(1)])


def memory_in_a_group(outputs, targets):
    raise ExceptionGroup("several", [ValueError(1), MemoryError()])


def circle(outputs, targets):
    first, second = ValueError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    raise first


def closed(outputs, targets):
    sys.stdout.close()
    sys.stderr = None
    raise ValueError("nowhere to print")
"""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    kept = torch.get_num_threads()
    yield
    torch.set_num_threads(kept)


def curve(view: OpenStudy, number: int = 0) -> str:
    folders = sorted((view.spec.output_dir / "trials" / str(number)).iterdir())
    return (folders[-1] / "metrics.csv").read_text()


def test_a_complete_trials_value_metrics_and_checkpoint_are_of_one_epoch(studies: Studies) -> None:
    with studies.open(
        "trainer.max_epochs=6", "optimizer.lr=0.5", "search_space={model.hidden: {type: int, low: 4, high: 4}}"
    ) as (view,):
        report = run(view)
        trial = stored(view)
        best = trial.user_attrs[BEST_ATTR]
        assert report.outcome == outcome_of(trial) == Outcome.COMPLETE
        assert (
            trial.value == report.value == best["metrics"]["val_loss"] == min(trial.intermediate_values.values())
        )
        assert trial.intermediate_values[best["epoch"]] == trial.value
        checkpoint = load_checkpoint(view.spec.output_dir / best["checkpoint"])
        assert checkpoint["state"]["epoch"] == best["epoch"]
        assert checkpoint["state"]["history"][-1] == best["metrics"]
        assert (report.epochs, report.reason, report.params) == (6, "", {"model.hidden": 4})
        shown = study_best(view)
        assert (shown["value"], shown["metrics"] | shown["internals"]["metrics"]) == (trial.value, best["metrics"])
        assert Path(shown["checkpoint"]).is_file()


@pytest.mark.parametrize(
    ("state", "values", "outcome"), [(TrialState.FAIL, None, "error"), (TrialState.COMPLETE, [7.0], "complete")]
)
def test_a_trial_that_is_ended_from_outside_says_so(
    studies: Studies, state: TrialState, values: list[float] | None, outcome: str
) -> None:
    with studies.open() as (view,):
        trial, plain = view.study.ask(), load_study(view.spec)
        request = From(2, lambda: plain.storage.set_trial_state_values(trial._trial_id, state, values))
        report = run(view, trial=trial, request=request)
        plain.storage.close()
        assert (report.outcome, report.reason, report.outside) == (outcome, ENDED_OUTSIDE, True)
        assert values is None or report.value == 7.0


def test_a_trial_that_another_attempt_has_is_not_said_to_be_ended(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, plain = view.study.ask(), load_study(view.spec)
        request = From(2, lambda: plain.storage.set_trial_state_values(trial._trial_id, TrialState.WAITING))
        report = run(view, trial=trial, request=request)
        plain.storage.close()
        assert (report.outcome, report.reason, report.outside) == (None, "", False)


def test_the_best_of_a_maximised_metric_is_its_largest(studies: Studies) -> None:
    with studies.open("study.metric=val_mae", "study.direction=maximize") as (view,):
        report = run(view)
        assert report.value == stored(view).value == max(stored(view).intermediate_values.values())


def test_a_pruned_trial_is_pruned(studies: Studies) -> None:
    with studies.open("study.pruner={name: threshold, upper: 0.0, n_warmup_steps: 2}") as (view,):
        report = run(view)
        trial = stored(view)
        assert report.outcome == outcome_of(trial) == Outcome.PRUNED
        assert trial.state == TrialState.PRUNED
        assert [entry["reason"] for entry in study_trials(view)] == ["pruned at epoch 2 by threshold"]
        assert list(trial.intermediate_values) == [1, 2]
        assert report.epochs == 2
        assert curve(view).count("\n") == 3
        assert best_trial(view) is None


@pytest.mark.parametrize(
    ("overrides", "value", "others"),
    [((), math.inf, ()), (("study.metric=val_mae", "study.direction=maximize"), -math.inf, ("val_mae",))],
)
def test_a_diverged_trial_is_the_worst_and_never_the_best(
    studies: Studies, overrides: tuple[str, ...], value: float, others: tuple[str, ...]
) -> None:
    with studies.open("loss.nan=true", *overrides) as (view,):
        report = run(view)
        trial = stored(view)
        assert report.outcome == outcome_of(trial) == Outcome.DIVERGED
        assert (trial.state, trial.value, report.value) == (TrialState.COMPLETE, value, None)
        assert best_trial(view) is None
        assert study_status(view)["outcomes"]["diverged"] == 1
        assert not list(view.spec.output_dir.rglob("*.pt"))
        (entry,) = study_trials(view)
        assert entry["reason"] == f"epoch 1: {', '.join(('train_loss', 'val_loss', *others))} not finite"


def test_a_trial_that_diverged_inside_an_epoch_sends_to_its_log(studies: Studies) -> None:
    with studies.open("loss.nan=true", "callbacks.nan_detection.every_n_batches=1") as (view,):
        assert run(view).outcome == Outcome.DIVERGED
        (entry,) = study_trials(view)
        assert (entry["epochs"], entry["reason"]) == (0, "after epoch 0, see its log")


@pytest.mark.parametrize(
    ("fault", "outcome", "reason"),
    [
        ("wrong", Outcome.ERROR, "KeyError: 'a key'"),
        ("leave", Outcome.ERROR, "SystemExit: 0"),
        ("interrupt", Outcome.ERROR, "KeyboardInterrupt: by the code itself"),
        ("generator_exit", Outcome.ERROR, "GeneratorExit"),
        ("cancelled", Outcome.ERROR, "CancelledError: a task"),
        ("own", Outcome.ERROR, "Own: of no known kind"),
        ("mute", Outcome.ERROR, "Mute: (no message: its __str__ raised ZeroDivisionError)"),
        ("number", Outcome.ERROR, "Number: (no message: its __str__ raised TypeError)"),
        ("odd", Outcome.ERROR, r"ValueError: half \ud800, end \x00, \x1b[2J"),
        ("endless", Outcome.ERROR, "ValueError: xxx"),
        ("recursive", Outcome.ERROR, "RecursionError: maximum recursion depth exceeded"),
        ("group", Outcome.ERROR, "BaseExceptionGroup: several (2 sub-exceptions)"),
        ("memory_in_a_group", Outcome.OUT_OF_MEMORY, "ExceptionGroup: several (2 sub-exceptions)"),
        ("circle", Outcome.ERROR, "ValueError: first"),
        ("huge", Outcome.OUT_OF_MEMORY, "RuntimeError: "),
        ("python_memory", Outcome.OUT_OF_MEMORY, "MemoryError"),
        ("cuda_memory", Outcome.OUT_OF_MEMORY, "OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_what_a_studys_code_raises_is_the_trials_end(
    studies: Studies, fault: str, outcome: Outcome, reason: str
) -> None:
    (studies.folder / "faults.py").write_text(FAULTS)
    with studies.open(f"loss={{_target_: faults.{fault}}}") as (view,):
        report = run(view)
        trial = stored(view)
        assert report.outcome == outcome_of(trial) == outcome
        assert trial.state == TrialState.FAIL
        assert report.reason.startswith(reason)
        assert trial.user_attrs[REASON_ATTR] == report.reason
        assert "faults.py" in trial.user_attrs[TRACEBACK_ATTR]
        assert len(trial.user_attrs[TRACEBACK_ATTR]) < 11_000
        json.dumps([report.reason, trial.user_attrs], ensure_ascii=False).encode()
        pickle.loads(pickle.dumps(report))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model={_target_: faults.Big}", ""),
        ("data={_target_: faults.ready}", " (its batches are ready ones, which are not cut)"),
        ("loader.batch_size=1", " (its batches can't be cut any further)"),
    ],
)
def test_batches_are_blamed_for_a_lack_of_memory_only_where_one_was_trained(
    studies: Studies, override: str, said: str
) -> None:
    (studies.folder / "faults.py").write_text(FAULTS)
    fault = "loss={_target_: faults.cuda_memory}"
    with studies.open(fault, override, "run.on_oom=retry_with_accumulation") as (view,):
        report = run(view)
    assert report.outcome == Outcome.OUT_OF_MEMORY
    assert report.reason == f"OutOfMemoryError: CUDA out of memory{said}"


def test_an_error_is_the_trials_where_its_code_has_closed_the_streams(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    (studies.folder / "faults.py").write_text(FAULTS)
    with studies.open("loss={_target_: faults.closed}") as (view,):
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        report = run(view)
        monkeypatch.undo()
        assert (report.outcome, report.reason) == (Outcome.ERROR, "ValueError: nowhere to print")
        log = view.spec.output_dir / "trials" / "0" / "attempt-1" / "log.txt"
        assert "ValueError: nowhere to print" in log.read_text()


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
def test_a_server_stores_what_odd_errors_say(studies: Studies, kind: str, request: pytest.FixtureRequest) -> None:
    (studies.folder / "faults.py").write_text(FAULTS)
    url = server_of(kind, request).new_database(ready=True)
    with studies.open("loss={_target_: faults.odd}", f"run.storage={url}") as (view,):
        said = r"ValueError: half \ud800, end \x00, \x1b[2J"
        assert run(view).reason == stored(view).user_attrs[REASON_ATTR] == said
        assert study_trials(view)[0]["outcome"] == "error"


def test_a_failure_before_training_is_the_trials_too(studies: Studies) -> None:
    with studies.open("data.broken=true") as (view,):
        report = run(view)
        assert (report.outcome, report.epochs) == (Outcome.ERROR, 0)
        assert "the data is broken" in stored(view).user_attrs[REASON_ATTR]


@pytest.mark.parametrize(
    "look", [1, 4, 14]
)  # the first batch, an epoch's last, the very last; an epoch's report looks, too
def test_an_interrupted_trial_waits_and_goes_on_bit_equal(studies: Studies, look: int) -> None:
    with studies.open(at="undisturbed") as (view,):
        torch.set_num_threads(1)
        assert run(view).outcome == Outcome.COMPLETE
        expected, value = curve(view), stored(view).value
    with studies.open(at="interrupted", views=2) as (view, later):
        report = run(view, request=From(look))
        assert report.outcome is None
        assert outcome_of(stored(view)) == "waiting"
        torch.set_num_threads(2)
        report = run(later)
        assert torch.get_num_threads() == stored(view).user_attrs[RUN_ATTR]["threads"] == 1
        assert (report.outcome, report.number) == (Outcome.COMPLETE, 0)
        assert curve(view) == expected
        assert (stored(view).value, len(stored(view).intermediate_values)) == (value, 3)
        assert study_status(view)["finished"] == 1


def test_a_trial_that_is_interrupted_at_the_last_step_of_all_waits_for_its_validation(studies: Studies) -> None:
    with studies.open("trainer.max_steps=4", views=2) as (view, later):
        assert run(view, request=From(4)).outcome is None
        assert outcome_of(stored(view)) == "waiting"
        assert run(later).outcome == Outcome.COMPLETE
        assert len(stored(view).intermediate_values) == 1


@pytest.mark.parametrize("look", [1, 6])
def test_a_trial_whose_lease_is_lost_ends_quietly_and_writes_nothing_more(studies: Studies, look: int) -> None:
    with studies.open() as (other,):
        late, before = dying(other), []

        def take() -> None:
            assert [(each.number, each.attempt) for each in other.requeue_dead()] == [(0, 1)]
            before.append(stored(other))

        report = run(late, request=From(look, take))
        assert report.outcome is None
        assert report.value is None
        assert stored(other) == before[0]
        assert run(other).outcome == Outcome.COMPLETE
        assert sorted(path.name for path in (other.spec.output_dir / "trials" / "0").iterdir()) == [
            "attempt-1",
            "attempt-2",
        ]
        late.storage.close()


def test_a_process_that_wakes_before_its_first_folder_leaves_the_next_attempts_alone(studies: Studies) -> None:
    with studies.open() as (other,):
        late, woken = dying(other), []
        asked = late.study.ask()  # stopped here, until another process trains the trial

        def wake() -> None:
            folder = other.spec.output_dir / "trials" / "0" / "attempt-2"
            assert (folder / "config.yaml").is_file()
            woken.append(run(late, trial=asked).outcome)
            assert (folder / "config.yaml").is_file()

        assert [(each.number, each.attempt) for each in other.requeue_dead()] == [(0, 1)]
        assert run(other, request=From(3, wake)).outcome == Outcome.COMPLETE
        assert woken == [None]
        late.storage.close()


@pytest.mark.parametrize("said", ["diverged", "error", "out_of_memory"])
def test_a_trial_killed_between_its_outcome_and_its_end_ends_as_it_then_does(studies: Studies, said: str) -> None:
    with studies.open() as (other,):
        late = dying(other)
        late.study.ask().set_user_attr(OUTCOME_ATTR, said)
        late.storage.close()
        other.requeue_dead()
        assert run(other).outcome == Outcome.COMPLETE
        assert [entry["outcome"] for entry in study_trials(other)] == ["complete"]
        best = best_trial(other)
        assert best is not None
        assert best.number == 0


def test_a_trial_that_kills_its_worker_each_time_is_lost(studies: Studies) -> None:
    with studies.open() as (other,):
        for attempt in range(1, 5):
            late = dying(other)
            assert late.study.ask().number == 0
            late.storage.close()
            assert [each.state.name for each in other.requeue_dead()] == ["WAITING" if attempt < 4 else "FAIL"]
        assert study_status(other)["outcomes"]["lost"] == 1
        assert study_trials(other)[0]["value"] is None


def test_what_a_trial_prints_is_in_its_own_log(studies: Studies, capfd: pytest.CaptureFixture[str]) -> None:
    with studies.open(
        "study.n_trials=2", "search_space={loss.fail: {type: categorical, choices: [true, false]}}"
    ) as (view,):
        with capfd.disabled():  # what pytest captures is not what the process prints to
            outcomes = [run(view).outcome for _ in range(2)]
        logs = [
            (view.spec.output_dir / "trials" / number / "attempt-1" / "log.txt").read_text() for number in "01"
        ]
    for outcome, log in zip(outcomes, logs, strict=True):
        assert ("ValueError: this loss fails" if outcome == Outcome.ERROR else "val_loss") in log


STOPPING = """
from trainer import Callback


class Enough(Callback):
    priority = 60

    def __init__(self, after):
        self.after = after

    def on_train_batch_end(self, trainer):
        if trainer.state.step >= self.after:
            trainer.state.stop("enough", now=True)
"""


@pytest.mark.parametrize(("after", "outcome"), [(6, Outcome.COMPLETE), (2, Outcome.ERROR)])
def test_a_callback_that_stops_inside_an_epoch_ends_the_trial(studies: Studies, after: int, outcome: str) -> None:
    """It would wait, be taken again, and stop again, for ever."""
    studies.spec()
    (studies.folder / "stopping.py").write_text(STOPPING)
    with studies.open(f"callbacks={{enough: {{_target_: stopping.Enough, after: {after}}}}}") as (view,):
        report = run(view)
        assert report.outcome == outcome
        trial = stored(view)
        assert trial.state.is_finished()
        if outcome == Outcome.ERROR:
            assert trial.user_attrs["hpo:reason"] == "it ended (enough) before an epoch with a finite val_loss"
        else:
            assert trial.value == trial.intermediate_values[1]


WRITES = """
import numpy as np
from trainer import Callback

VALUES = {"float32": np.float32(0.25), "none": None, "text": "0.25"}


class Writes(Callback):
    def __init__(self, kind):
        self.kind = kind

    def on_epoch_end(self, trainer):
        trainer.state.metrics["mine"] = VALUES[self.kind]
"""


@pytest.mark.parametrize(
    ("kind", "outcome", "reason"),
    [
        ("float32", Outcome.COMPLETE, ""),
        ("none", Outcome.ERROR, "MetricError: Writes: metric 'mine' is a NoneType (None): record a real number"),
        ("text", Outcome.ERROR, "MetricError: Writes: metric 'mine' is a str ('0.25'): record a real number"),
    ],
)
@pytest.mark.parametrize("metric", ["val_loss", "mine"])
def test_what_a_callback_records_is_a_number_or_the_trials_error(
    studies: Studies, kind: str, outcome: Outcome, reason: str, metric: str
) -> None:
    (studies.spec().path.parent / "writing.py").write_text(WRITES)
    writes = f"callbacks={{writes: {{_target_: writing.Writes, kind: {kind}}}}}"
    with studies.open(writes, f"study.metric={metric}", "study.direction=minimize") as (view,):
        report = run(view)
        trial = stored(view)
        assert report.outcome == outcome_of(trial) == outcome
        assert report.reason.startswith(reason)
        assert trial.user_attrs.get(REASON_ATTR, "").startswith(reason)
        if outcome == Outcome.COMPLETE:
            assert trial.user_attrs[BEST_ATTR]["metrics"]["mine"] == 0.25
        if outcome == Outcome.COMPLETE and metric == "mine":
            assert trial.value == 0.25


SIX = ("trainer.max_epochs=6", "callbacks={loss_prediction: {min_epochs: 2}}")


def test_what_was_predicted_is_kept_with_what_it_became(studies: Studies) -> None:
    with studies.open(*SIX) as (view,):
        assert run(view).outcome == Outcome.COMPLETE
        trial = stored(view)
    kept = trial.user_attrs[PREDICTION_ATTR]
    assert (kept["metric"], kept["epoch"], kept["latest_epoch"]) == ("val_loss", 2, 5)
    assert kept["final_loss"] == trial.intermediate_values[6]
    assert all(math.isfinite(kept[name]) for name in ("predicted_final_loss", "std", "latest"))
    assert kept["std"] > 0


def test_the_predicted_metric_is_the_callbacks_not_the_studys(studies: Studies) -> None:
    follow = "callbacks={loss_prediction: {min_epochs: 2, metric: val_mae}}"
    with studies.open("trainer.max_epochs=6", follow) as (view,):
        run(view)
        kept = stored(view).user_attrs[PREDICTION_ATTR]
        last = curve(view).splitlines()
    assert kept["metric"] == "val_mae"
    assert kept["final_loss"] == pytest.approx(float(last[-1].split(",")[last[0].split(",").index("val_mae")]))


@pytest.mark.parametrize(
    ("overrides", "outcome", "epochs"),
    [
        (("study.pruner={name: threshold, upper: 0.0, n_warmup_steps: 4}",), Outcome.PRUNED, 4),
        (("callbacks.early_stopping={patience: 1, min_delta: 0.999}",), Outcome.COMPLETE, 2),
    ],
)
def test_a_trial_that_ended_early_has_a_prediction_and_no_outcome_of_it(
    studies: Studies, overrides: tuple[str, ...], outcome: str, epochs: int
) -> None:
    with studies.open(*SIX, *overrides) as (view,):
        report = run(view)
        kept = stored(view).user_attrs[PREDICTION_ATTR]
    assert (report.outcome, report.epochs) == (outcome, epochs)
    assert kept["final_loss"] is None
    assert (kept["epoch"], kept["latest_epoch"]) == (2, epochs)
    assert math.isfinite(kept["latest"])


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.max_epochs=3",),  # too short to predict
        ("trainer.max_epochs=6", "callbacks={loss_prediction: false}"),
        ("trainer.max_epochs=6", "callbacks={loss_prediction: {min_epochs: 6}}"),  # known by then
        (*SIX, "loss.nan=true"),
        (*SIX, "loss.fail=true"),
    ],
)
def test_without_a_prediction_nothing_is_kept(studies: Studies, overrides: tuple[str, ...]) -> None:
    with studies.open(*overrides) as (view,):
        run(view)
        trial = stored(view)
    assert trial.state.is_finished()
    assert PREDICTION_ATTR not in trial.user_attrs
