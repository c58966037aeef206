"""Reads the state of a study and its running trials, from the database alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from optuna.trial import FrozenTrial

from hpo.storage import agents, ledger
from hpo.storage.attributes import MAX_EPOCHS_ATTR
from hpo.storage.grants import grants_of
from hpo.storage.lineage import epochs_trained, inherited_epochs
from hpo.storage.optuna_private import id_of_trial
from hpo.storage.outlines import KeptOutlines
from hpo.storage.pausing import paused_at
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import UNFINISHED, outcome_of
from hpo.study.own_trials import own_among
from hpo.study.status import study_status
from hpo.study.thinning import evenly
from hpo.wording import study_progress

#: At most this many points of a curve are shown.
_POINTS: Final = 100
#: The most seconds between two heartbeats of an attempt.
_BEAT: Final = 10.0


@dataclass(frozen=True)
class Look:
    """The state of a study, read at one time.

    Attributes:
        status: The status of `hpo.study.status.study_status`, with more entries for each of its
            ``running_trials``: ``epoch``, the last one reported (until then, the one it began after),
            ``max_epochs`` if known, the ``value`` after ``epoch``, the ``seconds`` of the attempt, ``curve``, the
            values so far as pairs of epoch and value (thinned out if long), and ``grants`` as in
            `hpo trials --json`.
        outcomes: The outcome of each finished trial, by number.
        paused: The numbers of the paused trials.
        epochs: How many epochs each trial has trained, by number.
        seconds: The seconds of all attempts of each finished trial, by number.
        ended: Whether nothing is left to do.
        waiting: The numbers of the trials that wait to start or resume.
    """

    status: dict[str, Any]
    outcomes: dict[int, str]
    paused: set[int]
    epochs: dict[int, int]
    seconds: dict[int, float]
    ended: bool = False
    waiting: frozenset[int] = frozenset()


class Looks:
    """Reads a study repeatedly; trials that have ended, or are still paused, are not read again.

    It reads only the curves of running trials.

    Args:
        opened: The study.
    """

    def __init__(self, opened: OpenStudy) -> None:
        self._opened = opened
        self._outlines = KeptOutlines(opened.storage, opened.study_id)
        self._seconds: dict[int, float | None] = {}

    def look(self) -> Look:
        """Read the study's current state."""
        opened, own = self._opened, own_among(self._outlines.look())
        status = study_status(opened, own)
        entries = {entry["trial"]: entry for entry in status["running_trials"]}
        ids = [id_of_trial(trial) for trial in own if trial.number in entries]
        max_epochs = opened.study.user_attrs.get(MAX_EPOCHS_ATTR)
        for trial, lasted in _running(opened, ids):
            entry = entries[trial.number]
            entry.update(_progress(trial, lasted.get(entry["attempt"])), max_epochs=max_epochs)
        ended = [trial for trial in own if trial.state.is_finished()]
        self._seconds |= _seconds(opened, [trial for trial in ended if trial.number not in self._seconds])
        return Look(
            {**status, "running_trials": [entry for entry in entries.values() if "epoch" in entry]},
            {trial.number: outcome_of(trial) for trial in ended},
            {trial.number for trial in own if paused_at(trial) is not None},
            {trial.number: epochs_trained(trial) for trial in own},
            {number: took for number, took in self._seconds.items() if took is not None},
            has_ended(opened, status),
            frozenset(trial.number for trial in own if outcome_of(trial) == "waiting"),
        )


def _running(
    opened: OpenStudy, ids: Sequence[int]
) -> Iterator[tuple[FrozenTrial, dict[int, tuple[float, float]]]]:
    """Running trials with their curves, and how long each of their attempts took until its last beat."""
    with opened.storage.engine.connect() as conn:
        lasted = ledger.lasted(conn, ids)
    for trial in opened.storage.read_some(ids):
        yield trial, lasted.get(id_of_trial(trial), {})


def _seconds(opened: OpenStudy, trials: Sequence[FrozenTrial]) -> dict[int, float | None]:
    """The seconds of all attempts of trials, by number; None for a trial that no worker has had."""
    with opened.storage.engine.connect() as conn:
        took = ledger.seconds_of(conn, opened.study_id, [id_of_trial(trial) for trial in trials])
    return {trial.number: took.get(id_of_trial(trial)) for trial in trials}


def has_ended(opened: OpenStudy, status: dict[str, Any]) -> bool:
    """Whether nothing is left to do in a study with this status.

    Once a study has reached its goal, no waiting or paused trial is taken. A scheduler may start fewer trials than
    the study may have: then the last agent to leave has found nothing to do, and no agent has died since.
    """
    if status["goal"]:
        return not status["running"]
    if any(status[name] for name in UNFINISHED):
        return False
    done, of, _ = study_progress(status)
    if done >= of or status["finished"] >= status["n_trials"]:
        return True
    with opened.storage.engine.connect() as conn:
        none_open = not agents.open_agents(conn, opened.study_id)
        return none_open and agents.last_ending(conn, opened.study_id) == agents.DONE


def _so_far(seconds: float, beat_at: float) -> float:
    """The seconds that an attempt has taken, in spite of a wrong clock on its machine or on this one."""
    return seconds + min(max(0.0, time.time() - beat_at), _BEAT)


def _progress(trial: FrozenTrial, lasted: tuple[float, float] | None) -> dict[str, Any]:
    """The progress of a running trial, as the further entries of `Look.status`."""
    steps = sorted(trial.intermediate_values)
    return {
        "epoch": steps[-1] if steps else inherited_epochs(trial),
        "value": trial.intermediate_values[steps[-1]] if steps else None,
        "seconds": None if lasted is None else _so_far(*lasted),
        "grants": grants_of(trial),
        "curve": [[step, trial.intermediate_values[step]] for step in evenly(steps, _POINTS)],
    }
