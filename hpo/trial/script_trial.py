"""`ScriptTrial`: the trial that an Optuna objective gets, which draws parameters and reports to a session."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, SupportsFloat, TypeVar

import optuna
import torch
from optuna.distributions import BaseDistribution, CategoricalChoiceType
from optuna.trial import BaseTrial, FixedTrial

from hpo.config.paths import same
from hpo.config.schema_space import label
from hpo.errors import StudyError
from hpo.storage.attributes import PREFIX
from hpo.study.folders import print_notice
from hpo.trial.session import Session, TrainingStoppedError
from trainer.state import INTERRUPTED, PAUSED

_Value = TypeVar("_Value")


class ScriptTrial(BaseTrial):
    """An `optuna.Trial` as a script's objective uses it, on a trial that a worker holds.

    Optuna's own trial draws the parameters and stores them at once, so a later attempt gets those that an earlier
    one has drawn. The session handles reports, decisions and checkpoints. The members are those of Optuna's trial,
    and those of a session that a script needs to resume.

    Args:
        session: The session of the running attempt.
        drawn: Draws the parameters: Optuna's trial, or one of fixed parameters.
    """

    def __init__(self, session: Session, drawn: BaseTrial) -> None:
        self.session = session
        self._drawn = drawn
        self._meant: dict[str, Any] = {}
        self._warned = False

    # ---- parameters

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """As of `optuna.Trial`."""
        return self._taken(name, lambda: self._drawn.suggest_float(name, low, high, step=step, log=log))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """As of `optuna.Trial`."""
        return self._taken(name, lambda: self._drawn.suggest_int(name, low, high, step=step, log=log))

    def suggest_categorical(  # type: ignore[override]
        self, name: str, choices: Sequence[CategoricalChoiceType]
    ) -> CategoricalChoiceType:
        """As of `optuna.Trial`; a list, tuple or mapping is stored as the text of its JSON.

        Raises:
            StudyError: A choice has no JSON, or a truth value stands beside a number that counts as equal.
        """
        labels = [_stored(name, choice) for choice in choices]
        _refuse_twins(name, labels)
        drawn = self._taken(name, lambda: self._drawn.suggest_categorical(name, labels))
        meant = [
            each for each, stored in zip(choices, labels, strict=True) if stored is not each and stored == drawn
        ]
        if not meant:
            return drawn
        self._meant[name] = meant[0]
        return meant[0]

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        """As of `optuna.Trial`, where it is deprecated."""
        return self.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        """As of `optuna.Trial`, where it is deprecated."""
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        """As of `optuna.Trial`, where it is deprecated."""
        return self.suggest_float(name, low, high, step=q)

    def _taken(self, name: str, draw: Callable[[], _Value]) -> _Value:
        """Draw a parameter; a new one is added to the config in the trial's folder."""
        session = self.session
        if not isinstance(name, str):
            problem = f"the name of a parameter is {name!r}, and no text"
            raise StudyError(f"{problem}\n  fix: write it as a text, such as {str(name)!r}")
        try:
            value = draw()
        except ValueError as error:
            if isinstance(self._drawn, FixedTrial) and name not in session.params:
                raise StudyError(_without(name, session.params)) from error
            raise
        if name not in session.params:
            session.params = {**session.params, name: value}
            session.keep_config({**session.config, "params": session.params})
        return value

    # ---- what it came to

    def report(self, value: SupportsFloat, step: int, **metrics: SupportsFloat) -> None:
        """Report the study's metric after a step, counted from 0 or 1; further metrics are given by name.

        As in `optuna.Trial`, the first value of a step is kept: a second one is ignored, and the log says so.

        Raises:
            ValueError: The step is negative, or before one that was reported.
            MetricError: A metric is not a real number.
            optuna.TrialPruned: The trial was pruned by an earlier report.
            TrainingStoppedError: Training should have stopped, for another reason, after the report before.
        """
        taken = self.session.report_step(int(step), {self.session.metric: value, **metrics})
        if not taken and not self._warned:
            self._warned = True
            print_notice(f"step {step} is reported again: its first value stays")

    def should_prune(self) -> bool:
        """Whether the trial should end here, because it is pruned or has diverged.

        Raises:
            TrainingStoppedError: The trial ends here for another reason and resumes later: its run ends, or it
                pauses and its checkpoint is saved.
        """
        session = self.session
        reason = session.reason_to_stop()
        if reason == PAUSED and session.checkpoints.of_epoch(session.epoch) is None:
            return False  # it may still save a checkpoint now, which ends it; else its next report does
        if session.should_stop and reason in (PAUSED, INTERRUPTED):
            raise TrainingStoppedError(f"{reason} after epoch {session.epoch}")
        return reason is not None

    def set_user_attr(self, key: str, value: Any) -> None:
        """As of `optuna.Trial`.

        Raises:
            ValueError: The key is one of hpo's own.
        """
        if key.startswith(PREFIX):
            raise ValueError(f"the attribute {key!r} begins with {PREFIX!r}, as those of hpo do: rename it")
        self._drawn.set_user_attr(key, value)

    def set_constraint(self, key: str, value: float) -> None:
        """As of `optuna.Trial`."""
        self._drawn.set_constraint(key, value)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters that were drawn so far."""
        return {**self._drawn.params, **self._meant}

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The distributions of the drawn parameters."""
        return self._drawn.distributions

    @property
    def user_attrs(self) -> dict[str, Any]:
        """The attributes that were set."""
        return self._drawn.user_attrs

    @property
    def constraints(self) -> dict[str, float]:
        """The constraints that were set."""
        return self._drawn.constraints

    @property
    def datetime_start(self) -> datetime.datetime | None:
        """When the trial's first attempt began."""
        return self._drawn.datetime_start

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.session.number

    @property
    def study(self) -> optuna.Study:
        """Optuna's study, for reading.

        Raises:
            AttributeError: The parameters are fixed, as in final training.
        """
        study: optuna.Study = self._drawn.study  # type: ignore[attr-defined]
        study.stop = _refuse_to_stop  # type: ignore[method-assign] # Optuna's says that no objective has called it
        return study

    # ---- further members of a session

    @property
    def folder(self) -> Path:
        """The folder that this attempt may write to."""
        return self.session.folder

    @property
    def device(self) -> torch.device:
        """The device to train on."""
        return self.session.device

    @property
    def seed(self) -> int:
        """Seed of everything random in the training; the same for each attempt."""
        return self.session.seed

    @property
    def should_stop(self) -> bool:
        """Whether to save and return: the trial is pruned, has diverged or pauses, or its run ends."""
        return self.session.should_stop

    def save_checkpoint(self, state: Any) -> Path:
        """Save what the trial needs to resume; where it pauses, or its run ends, it ends here.

        See `Session.save_checkpoint`, errors included."""
        return self.session.save_checkpoint(state)

    def load_checkpoint(self) -> Any | None:
        """What was saved last, None where there is nothing; see `Session.load_checkpoint`."""
        return self.session.load_checkpoint()


def session_of(trial: Session | ScriptTrial) -> Session:
    """The session behind the ``trial`` that a function gets."""
    return trial.session if isinstance(trial, ScriptTrial) else trial


def _stored(name: str, choice: Any) -> CategoricalChoiceType:
    try:
        json.dumps(choice)
    except TypeError as error:
        raise StudyError(
            f"the choices of `{name}` are stored as JSON, and one of them can't be\n  value: {choice!r}\n"
            "  fix: write text or plain numbers, and let the function look up what each stands for"
        ) from error
    return label(choice)


def _refuse_twins(name: str, labels: Sequence[CategoricalChoiceType]) -> None:
    """Refuse choices that count as equal, such as 1 and True: Optuna would store the first of them for either."""
    known: dict[CategoricalChoiceType, CategoricalChoiceType] = {}
    for each in labels:
        first = known.setdefault(each, each)
        if not same(first, each):
            raise StudyError(
                f"the choices of `{name}` hold {first!r} and {each!r}, which count as equal\n"
                "  fix: write text, and let the function look up what each stands for"
            )


def _refuse_to_stop() -> NoReturn:
    raise StudyError(
        "the function calls `study.stop()`, and a trial can't stop the study that others train too\n"
        "  fix: leave it out; write `study.target_value` or `study.stop_after_no_improvement`, or use `hpo stop`"
    )


def _without(name: str, params: Mapping[str, Any]) -> str:
    return (
        f"the function asks for a parameter `{name}`, which the trial does not have; it has "
        f"{', '.join(params) or 'none'}\n  fix: bring the function back to what it was when the trial ran"
    )
