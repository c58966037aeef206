"""Forks: stored with the claim on the trial, begun from the parent's checkpoint, resumed as any trial."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import FrozenTrial, TrialState

from hpo.config.spec import load_spec
from hpo.console.lines import Reporter
from hpo.console.tally import Tally
from hpo.execution.messages import EpochsEnded, Started
from hpo.execution.observer import Observer
from hpo.report.grants import kinds
from hpo.storage.attributes import BEST_ATTR, PAUSED_ATTR, REASON_ATTR
from hpo.storage.grants import Grant, OldGrantError, grants_of
from hpo.storage.ledger import Lease, Owner
from hpo.storage.lineage import epochs_reached, epochs_trained, forked_from
from hpo.storage.study_end import prune_paused
from hpo.study.folders import attempt_folders
from hpo.study.initial_trials import known_trials
from hpo.study.open_study import OpenStudy, load_study, start_study
from hpo.study.outcome import Outcome, outcome_of
from hpo.study.retention import clean
from hpo.study.retry import reopen
from hpo.study.standing import standing_of
from hpo.study.status import study_status
from hpo.study.taking import claimable
from hpo.study.trial_entries import study_trials
from hpo.trial.builder import Builder
from hpo.trial.report import TrialReport
from hpo.trial.session import Session
from hpo.trial.stopping import StopRequest
from hpo.trial.training_code import FunctionCode, TrainingCode
from hpo.wording import granted
from tests.support.attempts import killing, run, trainer_code
from tests.support.commands import hpo
from tests.support.forking import RATE, ForkLate, ForkOnce
from tests.support.owners import forked
from tests.support.plain_training import train as train_plainly
from tests.support.studies import Studies, take
from tests.unit.trainer.support import assert_same
from trainer.checkpoint.manager import find_checkpoint, newest_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]

EPOCHS = 5
OVERRIDES = (f"trainer.max_epochs={EPOCHS}", "study.n_trials=3", "study.pruner=none")


def function_code(view: OpenStudy) -> TrainingCode:
    return FunctionCode(train_plainly)


MAKE: dict[str, Callable[[OpenStudy], TrainingCode]] = {"trainer": trainer_code, "function": function_code}


def train(
    view: OpenStudy,
    trial: optuna.Trial,
    make: Callable[[OpenStudy], TrainingCode] = trainer_code,
    pulse: Callable[[Session], None] = lambda _: None,
    request: StopRequest | None = None,
) -> TrialReport:
    return run(view, make(view), trial, request=request, pulse=pulse)


def run_all(view: OpenStudy, make: Callable[[OpenStudy], TrainingCode] = trainer_code, most: int = 99) -> None:
    for _ in range(most):
        taken = take(view)
        if not isinstance(taken, optuna.Trial):
            assert taken is None
            return
        train(view, taken, make)


def forking(view: OpenStudy, **arguments: Any) -> OpenStudy:
    return replace(view, scheduler=ForkOnce(**arguments))


def trials_of(view: OpenStudy) -> list[FrozenTrial]:
    return view.storage.get_all_trials(view.study_id)


def folders(view: OpenStudy, number: int) -> list[Path]:
    return [folder / "checkpoints" for folder in attempt_folders(view.spec, number)]


def checkpoint(view: OpenStudy, number: int, epoch: int) -> dict[str, Any]:
    found = find_checkpoint(folders(view, number), epoch)
    assert found is not None
    return found[1]


# ---- the storage


def test_the_fork_is_stored_with_the_claim_and_the_trial_in_whose_place_it_stands_ends(studies: Studies) -> None:
    with studies.open(*OVERRIDES) as (view,):
        run_all(forking(view), most=2)
        taken = take(forking(view))
        assert isinstance(taken, optuna.Trial)
        parent, replaced, fork = trials_of(view)
        assert forked_from(fork) == {"parent": 0, "epoch": 2, "replaces": 1}
        assert [(each["number"], each["until"]) for each in grants_of(fork)] == [(2, None)]
        assert view.space.suggest(taken) == {**parent.params, RATE: 0.02}
        assert (replaced.state, outcome_of(replaced)) == (TrialState.PRUNED, "pruned")
        assert replaced.value == replaced.intermediate_values[2]
        assert replaced.datetime_complete is not None
        assert PAUSED_ATTR not in replaced.user_attrs
        shown = standing_of(view).own[2]
        assert (shown.inherited, shown.replaces, shown.epochs, shown.state) == (2, 1, 2, "running")


def test_a_grant_that_is_not_the_next_one_forks_nothing(studies: Studies) -> None:
    with studies.open(*OVERRIDES) as (view,):
        run_all(forking(view), most=2)
        late = Grant(
            view.study_id,
            {"number": 1, "until": None, "why": {}},
            {},
            None,
            {"parent": 0, "epoch": 2, "replaces": 1},
        )
        with view.storage.granting(late), pytest.raises(OldGrantError):
            view.study.ask()
        assert [outcome_of(trial) for trial in trials_of(view)] == ["paused", "paused"]


def test_without_a_trial_left_nothing_is_forked_and_no_trial_ends(studies: Studies) -> None:
    with studies.open(*OVERRIDES, "study.n_trials=2") as (view,):
        run_all(forking(view))
        assert [outcome_of(trial) for trial in trials_of(view)] == ["paused", "paused"]


def test_a_larger_budget_does_not_bring_back_what_a_fork_has_replaced(studies: Studies) -> None:
    with studies.open(*OVERRIDES, "study.epochs=5") as (view,):
        run_all(forking(view))
        assert [pruned.number for pruned in prune_paused(view.storage, view.study_id)] == [0, 2]
    start_study(studies.spec(*OVERRIDES, "study.epochs=9")).storage.close()
    view = load_study(studies.spec(*OVERRIDES, "study.epochs=9"))
    assert [outcome_of(trial) for trial in trials_of(view)] == ["paused", "pruned", "paused"]
    view.storage.close()


# ---- epochs


def test_the_parents_epochs_are_neither_reported_nor_counted_again(studies: Studies) -> None:
    with studies.open(*OVERRIDES, "study.epochs=30") as (view,):
        run_all(forking(view))
        fork = trials_of(view)[2]
        assert sorted(fork.intermediate_values) == [3, 4, 5]
        assert (epochs_reached(fork), epochs_trained(fork)) == (5, 3)
        assert study_status(view)["epochs"]["trained"] == 5 + 2 + 3
        assert standing_of(view).epochs_left == 20
        entries = study_trials(view)
        assert [entry["internals"]["fork"] for entry in entries] == [
            None,
            None,
            {"parent": 0, "epoch": 2, "replaces": 1},
        ]
        assert [entry["internals"]["replaced_by"] for entry in entries] == [None, 2, None]
        assert [entry["epochs"] for entry in entries] == [5, 2, 5]


@pytest.mark.parametrize(("epochs", "expected"), [(5, [2, 2, 3]), (7, [2, 2, 5]), (8, [3, 2, 5])])
def test_a_budget_of_epochs_is_spent_exactly(epochs: int, expected: list[int], studies: Studies) -> None:
    with studies.open(*OVERRIDES, f"study.epochs={epochs}") as (view,):
        run_all(forking(view))
        trials = trials_of(view)
        assert list(map(epochs_reached, trials)) == expected
        assert sum(map(epochs_trained, trials)) == epochs
        assert claimable(forking(view)) == 0


# ---- what people read


def test_people_read_from_where_it_was_forked_and_why_the_other_ended(studies: Studies) -> None:
    with studies.open(*OVERRIDES) as (view,):
        run_all(forking(view))
        fork = trials_of(view)[2]
        why = "to its end: fork of trial 0 after epoch 2, in the place of trial 1, best "
        (told,) = [granted(each["until"], each["why"]) for each in grants_of(fork)]
        assert told.startswith(why)
        reasons = [entry["reason"] for entry in study_trials(view)]
        assert reasons == [None, "pruned at epoch 2: trial 2 stands in its place, a fork of trial 0", None]
        shown = hpo("trials", view.spec.path, *OVERRIDES, "study.scheduler={name: pbt, population: 4}").stdout
        assert "fork of trial 0" in " ".join(shown.split())
        assert [(each.kind, each.epochs) for each in kinds([fork])] == [("fork", 3)]


def test_a_run_counts_its_own_epochs_only_and_the_trial_that_has_ended(
    studies: Studies, capsys: pytest.CaptureFixture[str]
) -> None:
    with studies.open(*OVERRIDES, "study.epochs=30") as (view,):
        run_all(forking(view), most=2)
        tally = Tally(view)
        assert (tally.finished, tally.view().paused, tally.progress[0]) == (0, 2, 4)
        taken = take(forking(view))
        assert isinstance(taken, optuna.Trial)
        started = Started(2, Lease(3, 1), grants=grants_of(trials_of(view)[2]))
        tally.heard("worker-1", started)
        assert (tally.finished, tally.view().paused) == (1, 1)
        tally.heard("worker-1", TrialReport(2, Outcome.COMPLETE, 0.5, EPOCHS, 1.0))
        assert tally.progress[0] == 4 + 3
        reporter = Reporter(view)
        capsys.readouterr()
        reporter.heard("worker-1", started)
        assert "trial 2 starts, to its end: fork of trial 0 after epoch 2" in capsys.readouterr().out


def test_a_driver_sees_a_fork_resume_after_the_epochs_of_its_parent(studies: Studies) -> None:
    with studies.open(*OVERRIDES, views=2) as (watching, working):
        run_all(forking(working), most=2)
        late, observer = Observer(watching), Observer(watching)
        fork = take(forking(working))
        assert isinstance(fork, optuna.Trial)
        started = Started(2, Lease(fork._trial_id, 1), 0.0, 2, grants_of(trials_of(watching)[2]))
        epoch = EpochsEnded(2, 3, (0.5,), EPOCHS)
        assert seen_of_running(observer) == [started]
        fork.report(0.5, 3)
        assert seen_of_running(observer) == [epoch]
        assert seen_of_running(late) == [started, epoch]


def seen_of_running(observer: Observer) -> list[Started | EpochsEnded]:
    return [said for _, said in observer.look() if isinstance(said, Started | EpochsEnded)]


# ---- training


@pytest.mark.parametrize("kind", MAKE)
def test_it_begins_with_all_that_its_parent_had(
    kind: str, studies: Studies, capfd: pytest.CaptureFixture[str]
) -> None:
    with studies.open(*OVERRIDES, "callbacks={checkpoint: {max_overhead: 1, keep_last: 9}}") as (view,):
        run_all(forking(view), MAKE[kind])
        parent, fork = checkpoint(view, 0, 2), checkpoint(view, 2, EPOCHS)
        assert_same(fork["state"]["history"][:2], parent["state"]["history"])
        assert fork["state"]["inherited"] == 2
        (file,) = folders(view, 0)[0].glob("epoch-00002.pt")
        assert f"forked from {file}" in capfd.readouterr().out


def test_its_first_step_is_torchs_from_the_parents_weights_with_the_new_rate(studies: Studies) -> None:
    """One batch an epoch without dropout: what is left is the optimizer's step."""
    whole = ("loader.batch_size=64", "model.dropout=0.0", "lr_scheduler=null", "trainer.max_epochs=3")
    with studies.open(*OVERRIDES, *whole) as (view,):
        run_all(forking(view))
        parent, fork = checkpoint(view, 0, 2), checkpoint(view, 2, 3)
        builder = Builder(view.spec)
        config = view.spec.resolve(trials_of(view)[2].params)
        data = builder.data(config)
        inputs, targets = data["train"].tensors
        hidden = config["model"]["hidden"]
        layers = torch.nn.Sequential(
            torch.nn.Linear(4, hidden), torch.nn.Tanh(), torch.nn.Identity(), torch.nn.Linear(hidden, 1)
        )
        layers.load_state_dict({key.removeprefix("layers."): part for key, part in parent["model"].items()})
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.02)
        optimizer.load_state_dict(parent["optimizer"])
        optimizer.param_groups[0]["lr"] = 0.02
        ((layers(inputs) - targets) ** 2).mean().backward()
        optimizer.step()
        for key, part in layers.state_dict().items():
            torch.testing.assert_close(fork["model"][f"layers.{key}"], part, rtol=1e-5, atol=1e-6)


def test_its_best_epoch_is_its_own(studies: Studies) -> None:
    """With a rate that spoils the weights the parent's last epoch is better than any of the fork's."""
    with studies.open(*OVERRIDES) as (view,):
        run_all(forking(view, changes=((RATE, 0.1),)))
        fork = trials_of(view)[2]
        best = min(fork.intermediate_values, key=fork.intermediate_values.__getitem__)
        assert fork.user_attrs[BEST_ATTR]["epoch"] == best
        assert fork.value == fork.intermediate_values[best]
        path = view.spec.output_dir / fork.user_attrs[BEST_ATTR]["checkpoint"]
        assert path.is_file()
        assert path.name == f"epoch-{best:05d}.pt"


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("pulse", [1, 2, 6, 12])
def test_killed_at_any_time_it_resumes_to_the_same_bits(kind: str, pulse: int, studies: Studies) -> None:
    options = (*OVERRIDES, "callbacks={checkpoint: {max_overhead: 1}}")
    results = []
    for at in ("whole", "killed"):
        with studies.open(*options, at=at) as (view,):
            run_all(forking(view), MAKE[kind], most=2)
        if at == "killed":
            process = forked.Process(target=_die, args=(view.spec.path, options, kind, pulse))
            process.start()
            process.join(120)
            assert process.exitcode == -signal.SIGKILL
        view = load_study(studies.spec(*options, at=at), Owner.current(worker="next"))
        view.requeue_dead()
        run_all(forking(view), MAKE[kind])
        fork = trials_of(view)[2]
        newest = newest_checkpoint(folders(view, 2))
        assert newest is not None
        kept = {key: newest[1][key] for key in newest[1] if key != "rng"}
        results.append((outcome_of(fork), fork.intermediate_values, fork.value, kept))
        assert len(view.storage.attempts_of_trial(fork._trial_id)) == (2 if at == "killed" else 1)
        view.storage.close()
    (one, *others), (two, *rest) = results
    assert one == two == "complete"
    assert_same(others, rest)


def _die(file: Path, options: tuple[str, ...], kind: str, pulse: int) -> None:
    torch.set_num_threads(1)
    view = forking(load_study(load_spec(file, options), Owner.current(worker="killed")))
    taken = take(view)
    assert isinstance(taken, optuna.Trial)
    train(view, taken, MAKE[kind], killing(pulse))


def test_the_parents_checkpoint_stays_as_long_as_the_fork_may_need_it(studies: Studies) -> None:
    with studies.open(*OVERRIDES, views=2) as (view, other):
        run_all(forking(view), most=2)
        clean(forking(view))
        fork, parent = take(forking(view)), take(forking(other))
        assert isinstance(fork, optuna.Trial)
        assert isinstance(parent, optuna.Trial)
        assert train(other, parent).epochs == EPOCHS
        view.storage.requeue(fork._trial_id)  # its worker leaves before the first epoch
        clean(forking(view))
        again = take(forking(view))
        assert isinstance(again, optuna.Trial)
        assert train(view, again).epochs == EPOCHS
        assert find_checkpoint(folders(view, 0), 2) is not None
        assert clean(forking(view)).removed, "when nothing can be forked any more, the checkpoints go as ever"
        assert find_checkpoint(folders(view, 0), 2) is None


def test_a_trial_that_is_lost_between_two_grants_is_replaced_from_a_checkpoint_before(studies: Studies) -> None:
    """A clean keeps it, though all others have come further: while the trial trains on, and once it has failed."""
    with studies.open(*OVERRIDES, views=2) as (view, other):
        late = replace(view, scheduler=ForkLate())
        run_all(late, most=3)
        lost = take(replace(other, scheduler=ForkLate()))
        assert isinstance(lost, optuna.Trial)
        assert [epochs_reached(trial) for trial in trials_of(view)] == [4, 2]
        lost.report(0.5, 3)
        clean(late)
        other.study.tell(lost, state=TrialState.FAIL)
        clean(late)
        taken = take(late)
        assert isinstance(taken, optuna.Trial)
        assert forked_from(taken) == {"parent": 0, "epoch": 2, "replaces": 1}
        assert train(late, taken).outcome == "complete"
        assert clean(late).removed, "no trial is left that could be a fork"
        assert find_checkpoint(folders(view, 0), 2) is None


def test_what_a_second_fork_begins_with_stays_where_the_first_was_lost_at_once(studies: Studies) -> None:
    with studies.open(*OVERRIDES, "study.n_trials=4") as (view,):
        run_all(forking(view), most=2)
        fork = take(forking(view))
        assert isinstance(fork, optuna.Trial)
        view.study.tell(fork, state=TrialState.FAIL)
        run_all(forking(view))
        assert [outcome_of(trial) for trial in trials_of(view)] == ["complete", "pruned", "error"]
        clean(forking(view), keep_best=1)
        assert find_checkpoint(folders(view, 1), 2) is not None


def test_what_a_larger_budget_may_fork_stays_where_the_study_has_ended(studies: Studies) -> None:
    with studies.open(*OVERRIDES) as (view,):
        run_all(forking(view), most=2)
        plain = load_study(view.spec)
        assert len(list(prune_paused(plain.storage, plain.study_id))) == 2
        clean(forking(plain))
        assert find_checkpoint(folders(view, 0), 2) is not None
        plain.storage.close()


def test_a_fork_that_failed_begins_anew_with_its_parents_checkpoint_when_it_is_retried(studies: Studies) -> None:
    with studies.open(*OVERRIDES) as (view,):
        run_all(forking(view), most=2)
        fork = take(forking(view))
        assert isinstance(fork, optuna.Trial)
        view.study.tell(fork, state=TrialState.FAIL)  # before its first epoch
        run_all(forking(view))
        clean(forking(view))
        reopen(view, [fork.number])
        again = take(forking(view))
        assert isinstance(again, optuna.Trial)
        assert train(view, again).outcome == "complete"


def test_without_a_checkpoint_of_its_parent_it_fails_and_says_so(studies: Studies) -> None:
    with studies.open(*OVERRIDES) as (view,):
        run_all(forking(view), most=2)
        for folder in folders(view, 0):
            for file in folder.iterdir():
                file.write_bytes(b"broken")
        taken = take(forking(view))
        assert isinstance(taken, optuna.Trial)
        train(view, taken)
        fork = trials_of(view)[2]
        assert outcome_of(fork) == "error"
        assert "it is a fork of trial 0 after epoch 2" in fork.user_attrs[REASON_ATTR]


def test_weights_that_do_not_fit_fail_with_what_to_leave_out(studies: Studies) -> None:
    with studies.open(*OVERRIDES) as (view,):
        run_all(forking(view), most=2)
        hidden = trials_of(view)[0].params["model.hidden"]
        taken = take(forking(view, changes=(("model.hidden", 2 if hidden > 2 else 8),)))
        assert isinstance(taken, optuna.Trial)
        train(view, taken)
        reason = trials_of(view)[2].user_attrs[REASON_ATTR]
        assert "does not fit the parameters of this fork" in reason
        assert "study.scheduler.perturb" in reason


def test_code_that_does_not_load_its_checkpoint_is_refused(studies: Studies) -> None:
    def careless(session: Session) -> None:
        session.report(1, val_loss=1.0)

    with studies.open(*OVERRIDES) as (view,):
        run_all(forking(view), function_code, most=2)
        taken = take(forking(view))
        assert isinstance(taken, optuna.Trial)
        train(view, taken, lambda _: FunctionCode(careless))
        assert "is a fork that begins after epoch 2" in trials_of(view)[2].user_attrs[REASON_ATTR]


def test_its_result_is_no_twin_of_another_and_warms_no_other_study(studies: Studies) -> None:
    reuse = "study.duplicates=reuse"
    with studies.open(*OVERRIDES, reuse, at="one") as (view,):
        run_all(forking(view, changes=()), most=3)  # the parameters of its parent, which is paused
        fork = trials_of(view)[2]
        assert sorted(fork.intermediate_values) == [3, 4, 5]
    with studies.open(*OVERRIDES, "study.warm_start=../one/study.yaml", at="two") as (view,):
        trials, unfit = known_trials(view.spec, view.space)
        assert [trial.system_attrs["hpo:imported_from"][1] for trial in trials] == [1]
        assert unfit == 0
