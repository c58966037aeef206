"""Faults to plant in a study that has come to its end, with what the audit is to say of each."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpo.config.spec import StudySpec

N_TRIALS = 9


@dataclass(frozen=True)
class Finished:
    """A study that has come to its end, to plant faults in."""

    spec: StudySpec

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.spec.output_dir / "study.db")) as database, database:
            return database.execute(statement, values).fetchall()

    def number(self, state: str, outcome: str = "") -> int:
        """The trial in this state with the most epochs."""
        found = self.sql(
            "SELECT number FROM trials JOIN hpo_attempts USING (trial_id) "
            "LEFT JOIN trial_intermediate_values USING (trial_id) WHERE state = ? AND outcome = ? "
            "GROUP BY trial_id ORDER BY count(*) DESC",
            state,
            outcome or state.lower(),
        )
        return int(found[0][0])

    def id(self, number: int) -> int:
        return int(self.sql("SELECT trial_id FROM trials WHERE number = ?", number)[0][0])

    def epochs(self, number: int) -> int:
        query = "SELECT count(*) FROM trial_intermediate_values WHERE trial_id = ?"
        return int(self.sql(query, self.id(number))[0][0])

    def attempt(self, number: int) -> Path:
        return self.spec.output_dir / "trials" / str(number) / "attempt-1"

    def newest(self, number: int) -> Path:
        return max((self.attempt(number) / "checkpoints").iterdir())

    def attr(self, number: int, key: str) -> Any:
        query = "SELECT value_json FROM trial_user_attributes WHERE key = ? AND trial_id = ?"
        return json.loads(self.sql(query, key, self.id(number))[0][0])

    def set_attr(self, number: int, key: str, value: Any) -> None:
        statement = "UPDATE trial_user_attributes SET value_json = ? WHERE key = ? AND trial_id = ?"
        self.sql(statement, json.dumps(value), key, self.id(number))


# ---- faults: each plants one, and returns what the audit is to say


def a_trial_is_gone(study: Finished) -> list[str]:
    number = study.number("PRUNED")
    study.sql("DELETE FROM trials WHERE number = ?", number)
    folder = study.spec.output_dir / "trials" / str(number)
    gone = [f"there is no trial {number}"] if number < N_TRIALS else []
    return [
        *gone,
        f"{N_TRIALS - 1} trials count, the budget is {N_TRIALS}",
        f"{folder} is of a trial that is not there",
    ]


def a_number_is_taken_twice(study: Finished) -> list[str]:
    number = study.number("PRUNED")
    columns = "study_id, state, datetime_start, datetime_complete"
    study.sql(f"INSERT INTO trials (number, {columns}) SELECT ?, {columns} FROM trials WHERE number = 1", number)
    study.sql(
        "INSERT INTO trial_system_attributes (trial_id, key, value_json) SELECT max(trials.trial_id), "
        "'hpo:imported', 'true' FROM trials"
    )
    return [f"there are several trials {number}"]


def a_trial_is_still_running(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    study.sql("UPDATE trials SET state = 'RUNNING' WHERE number = ?", number)
    return [f"trial {number} is RUNNING"]


def a_mark_of_a_pause_is_left(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    columns = "(trial_id, key, value_json)"
    study.sql(f"INSERT INTO trial_user_attributes {columns} VALUES (?, 'hpo:paused', '2')", study.id(number))
    return [f"trial {number}: it has ended, and is marked as paused at 2"]


def a_trial_has_trained_beyond_its_grants(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    columns = "(trial_id, key, value_json)"
    grants = json.dumps([{"number": at, "until": 1, "why": {}} for at in range(2)])
    study.sql(f"INSERT INTO trial_user_attributes {columns} VALUES (?, 'hpo:grants', ?)", study.id(number), grants)
    return [
        "there were 0 grants, and the trials have those of the numbers 0, 1",
        f"trial {number}: its grants end at [1, 1]",
        f"trial {number}: it has trained {study.epochs(number)} epochs, and was granted 1",
    ]


def the_trials_have_trained_more_epochs_than_they_may(study: Finished) -> list[str]:
    own = "trial_id IN (SELECT trial_id FROM hpo_attempts)"
    epochs = study.sql(f"SELECT count(*) FROM trial_intermediate_values WHERE {own}")
    study.sql("UPDATE study_user_attributes SET value_json = ? WHERE key = 'hpo:n_epochs'", str(epochs[0][0] - 2))
    return ["the trials have trained 2 epochs more than the study may"]


def a_pruned_trial_was_never_to_be_paused(study: Finished) -> list[str]:
    number = study.number("PRUNED")
    study.sql("UPDATE hpo_attempts SET outcome = 'paused' WHERE trial_id = ?", study.id(number))
    return [
        f"trial {number}: it has ended, and is marked as paused at None",
        f"trial {number}: it was to be paused at None, and was at {study.epochs(number)}",
        f"trial {number}: it has no best epoch",
    ]


def the_budget_is_larger(study: Finished) -> list[str]:
    study.sql("UPDATE study_user_attributes SET value_json = ? WHERE key = 'hpo:n_trials'", str(N_TRIALS + 1))
    return [f"{N_TRIALS} trials count, the budget is {N_TRIALS + 1}"]


def a_lease_is_open(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    study.sql("UPDATE hpo_attempts SET ended_at = NULL, outcome = NULL WHERE trial_id = ?", study.id(number))
    return [f"trial {number}: attempt 1 is open"]


def an_attempt_is_missing(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    study.sql("UPDATE hpo_attempts SET attempt = 2 WHERE trial_id = ?", study.id(number))
    return [
        f"trial {number}: its attempts are 2, not 1 to 1",
        f"trial {number}: there are files of an attempt 1 that the ledger does not know",
    ]


def make_second(study: Finished, number: int, outcome: str, overlap: float) -> None:
    """Make the trial's attempt its second."""
    study.sql("UPDATE hpo_attempts SET attempt = 2 WHERE trial_id = ?", study.id(number))
    study.sql(
        "INSERT INTO hpo_attempts SELECT trial_id, 1, host, boot_id, pid + 1, start_time, worker, device, code, "
        "agent, started_at - 1, beat_at, seconds, started_at + ?, ?, NULL FROM hpo_attempts WHERE trial_id = ?",
        overlap,
        outcome,
        study.id(number),
    )


def two_attempts_at_a_time(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    make_second(study, number, "lost", 0.001)
    return [f"trial {number}: attempt 2 began before attempt 1 had ended"]


def an_attempt_after_the_last_one(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    make_second(study, number, "pruned", 0.0)
    return [f"trial {number}: attempt 1 ended it as pruned, and another followed"]


def a_process_with_two_trials(study: Finished) -> list[str]:
    query = "SELECT pid, start_time, host, trial_id, started_at, ended_at FROM hpo_attempts ORDER BY started_at"
    (pid, start, host, _, began, ended), (*_, other, _, _), *_ = study.sql(query)
    change = "UPDATE hpo_attempts SET pid = ?, start_time = ?, host = ?, started_at = ? WHERE trial_id = ?"
    study.sql(change, pid, start, host, (began + ended) / 2, other)
    return [f"process {pid} on {host} had two trials at a time"]


def an_outcome_is_wrong(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    study.sql("UPDATE hpo_attempts SET outcome = 'pruned' WHERE trial_id = ?", study.id(number))
    return [f"trial {number}: it is complete, its last attempt pruned"]


def a_failure_without_a_reason(study: Finished) -> list[str]:
    number = study.number("FAIL", "error")
    study.sql("DELETE FROM trial_user_attributes WHERE key = 'hpo:reason'")
    return [f"trial {number}: it failed without hpo:reason"]


def a_step_is_missing(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    study.sql("DELETE FROM trial_intermediate_values WHERE step = 2 AND trial_id = ?", study.id(number))
    steps = ", ".join(str(step) for step in range(1, study.epochs(number) + 2) if step != 2)
    return [f"trial {number}: the reported steps are {steps}, not 1 to {study.epochs(number) + 1}"]


def a_value_is_one_ulp_off(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    where = "WHERE trial_id = ? AND step = 1"
    value = study.sql(f"SELECT intermediate_value FROM trial_intermediate_values {where}", study.id(number))[0][0]
    near = math.nextafter(value, math.inf)
    study.sql(f"UPDATE trial_intermediate_values SET intermediate_value = ? {where}", near, study.id(number))
    return [f"trial {number}: step 1 is reported as {near!r}, and is {value!r}"]


def a_final_value_is_one_ulp_off(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    value = math.nextafter(
        study.sql("SELECT value FROM trial_values WHERE trial_id = ?", study.id(number))[0][0], 9
    )
    study.sql("UPDATE trial_values SET value = ? WHERE trial_id = ?", value, study.id(number))
    return [f"trial {number}: its value {value!r} is not its curve's best"]


def pruned_elsewhere(study: Finished) -> list[str]:
    number = study.number("PRUNED")
    study.set_attr(number, "hpo:pruned_at", 1)
    return [f"trial {number}: it was to be pruned at 1, and was at {study.epochs(number)}"]


def another_seed(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    run = study.attr(number, "hpo:run")
    study.set_attr(number, "hpo:run", {**run, "seed": 1})
    return [f"trial {number}: it was run with seed 1, its own is {run['seed']}"]


def _rewrite_table(study: Finished, number: int, change: Callable[[list[str]], list[str]]) -> None:
    file = study.attempt(number) / "metrics.csv"
    file.write_text("".join(f"{line}\r\n" for line in change(file.read_text().splitlines())))


def a_row_is_written_twice(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    _rewrite_table(study, number, lambda lines: [*lines, lines[-1]])
    epochs = ", ".join(map(str, [*range(1, study.epochs(number) + 1), study.epochs(number)]))
    return [f"trial {number}: metrics.csv of attempt 1 has the epochs {epochs}"]


def a_row_is_missing_at_the_end(study: Finished) -> list[str]:
    number, epochs = study.number("PRUNED"), study.epochs(study.number("PRUNED"))
    _rewrite_table(study, number, lambda lines: lines[:-1])
    return [f"trial {number}: metrics.csv of attempt 1 has {epochs - 1} epochs, {epochs} are reported"]


def a_row_is_changed(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    _rewrite_table(study, number, lambda lines: [*lines[:2], lines[2].replace(".", ".0", 1), *lines[3:]])
    return [f"trial {number}: metrics.csv of attempt 1 differs at epoch 2"]


def the_best_checkpoint_is_damaged(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    best = study.attr(number, "hpo:best")["checkpoint"]
    file = study.spec.output_dir / best
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return [
        f"trial {number}: {file}: ",
        f"trial {number}: its best checkpoint {best} is not one of its readable ones of that epoch",
    ]


def the_newest_checkpoint_is_gone(study: Finished) -> list[str]:
    number, epochs = study.number("PRUNED"), study.epochs(study.number("PRUNED"))
    for file in (study.attempt(number) / "checkpoints").iterdir():
        file.unlink()
    return [f"trial {number}: its newest checkpoint is of epoch None, {epochs} are reported"]


def _change_newest(study: Finished, number: int, change: Callable[[dict[str, Any]], None]) -> str:
    file = study.newest(number)
    checkpoint = torch.load(file, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, file)
    return file.name


def a_weight_is_changed(study: Finished) -> list[str]:
    number = study.number("COMPLETE")

    def change(checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["model"]["layers.0.weight"]
        weights[0, 0] = torch.nextafter(weights[0, 0], torch.tensor(math.inf))

    name = _change_newest(study, number, change)
    return [f"trial {number}: {name} has other weights than it has alone"]


def a_checkpoint_remembers_otherwise(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    name = _change_newest(study, number, lambda checkpoint: checkpoint["state"]["history"][0].update(lr=1.0))
    return [f"trial {number}: attempt-1/checkpoints/{name} differs at epoch 1"]


def a_checkpoint_of_another_trial(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    name = _change_newest(study, number, lambda checkpoint: checkpoint.update(seed=0))
    return [f"trial {number}: attempt-1/checkpoints/{name} was made with another seed"]


def another_epoch_was_best(study: Finished) -> list[str]:
    number = study.number("COMPLETE")
    best = study.attr(number, "hpo:best")
    study.set_attr(number, "hpo:best", {**best, "metrics": {**best["metrics"], "val_mae": 0.0}})
    epoch = best["epoch"]
    return [
        f"trial {number}: its best epoch is stored as {epoch}, with metrics that are not those of epoch {epoch}"
    ]


def an_error_that_is_none(study: Finished) -> list[str]:
    number = study.number("PRUNED")
    statement = "UPDATE {} WHERE trial_id = ?"
    study.sql(statement.format("hpo_attempts SET outcome = 'error'"), study.id(number))
    study.sql(statement.format("trials SET state = 'FAIL'"), study.id(number))
    for key, value in (("hpo:outcome", "error"), ("hpo:reason", "none")):
        columns = "(trial_id, key, value_json)"
        insert = f"INSERT INTO trial_user_attributes {columns} VALUES (?, ?, ?)"
        study.sql(insert, study.id(number), key, json.dumps(value))
    return [
        f"trial {number}: alone it trains ",
        f"trial {number}: alone it raises nothing",
    ]


FAULTS: Sequence[Callable[[Finished], list[str]]] = [
    a_trial_is_gone,
    a_number_is_taken_twice,
    a_trial_is_still_running,
    a_mark_of_a_pause_is_left,
    a_trial_has_trained_beyond_its_grants,
    the_trials_have_trained_more_epochs_than_they_may,
    a_pruned_trial_was_never_to_be_paused,
    the_budget_is_larger,
    a_lease_is_open,
    an_attempt_is_missing,
    two_attempts_at_a_time,
    an_attempt_after_the_last_one,
    a_process_with_two_trials,
    an_outcome_is_wrong,
    a_failure_without_a_reason,
    a_step_is_missing,
    a_value_is_one_ulp_off,
    a_final_value_is_one_ulp_off,
    pruned_elsewhere,
    another_seed,
    a_row_is_written_twice,
    a_row_is_missing_at_the_end,
    a_row_is_changed,
    the_best_checkpoint_is_damaged,
    a_checkpoint_of_another_trial,
    another_epoch_was_best,
]
#: Those that nothing but training once more brings to light.
FAULTS_OF_TRAINING: Sequence[Callable[[Finished], list[str]]] = [
    the_newest_checkpoint_is_gone,
    a_weight_is_changed,
    a_checkpoint_remembers_otherwise,
    an_error_that_is_none,
]
