"""`TrainingCode`, the interface of code that trains a trial on its session, and `FunctionCode` for functions."""

from __future__ import annotations

import contextlib
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import BaseTrial

from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET, TargetResolver, instantiate
from hpo.errors import StudyError
from hpo.study.folders import print_notice
from hpo.trial.named_in import draws_parameters
from hpo.trial.process_forks import only_in
from hpo.trial.script_trial import ScriptTrial
from hpo.trial.session import Session, TrainingStoppedError
from hpo.wording import count_of, listed
from trainer.data.random_state import seed_all
from trainer.recorded import MetricError, Metrics
from trainer.state import DIVERGED, PAUSED, Mode, best_epoch

#: The name of the parameter by which a function takes its trial's session.
SESSION: Final = "trial"
_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class TrainingCode(Protocol):
    """Trains one attempt at one trial."""

    @property
    def history(self) -> Sequence[Metrics]:
        """The metrics of each finished epoch so far, including epochs of earlier attempts that it resumes."""
        ...

    @property
    def returned(self) -> Metrics | None:
        """The trial's result as the code itself gives it; None: the best epoch counts."""
        ...

    @property
    def prediction(self) -> Mapping[str, Any] | None:
        """The trial's predicted final values, see `hpo.study.outcome.prediction_record`; None without any."""
        ...

    def train(self, session: Session) -> str | None:
        """Train to the end, or up to a request to stop.

        Returns:
            Why it ended early, ``"diverged"``, ``"pruned"``, ``"paused"`` and ``"interrupted"`` among others
            (`trainer.state`); None where it ran to its end.

        Raises:
            optuna.TrialPruned: The trial is pruned.
            LeaseLostError: Another attempt has the trial.
            BaseException: Whatever the study's code raises.
        """
        ...

    def smaller(self) -> int | str:
        """After the device's memory ran out: the number of parts into which to cut each batch next time.

        A text instead says why batches are not cut; it is empty where batches were not the cause.
        """
        ...


@dataclass
class FunctionCode:
    """Trains with a function that uses the session directly.

    The global random generators are seeded with the session's seed before the call. The function returns the
    trial's value: a number, a number for each goal, or a mapping of metrics. If it returns nothing, or something
    else, the value is that of the best reported epoch.

    Attributes:
        function: The function, called with the session.
        goals: The metrics that the study optimises; empty: only the session's metric.
    """

    function: Callable[[Session], object]
    goals: Sequence[str] = ()
    _session: Session | None = None
    _returned: Metrics | None = None

    @property
    def history(self) -> Sequence[Metrics]:
        """The reported epochs."""
        return [] if self._session is None else self._session.history

    @property
    def returned(self) -> Metrics | None:
        """What the function has returned, if that is the trial's value."""
        return self._returned

    @property
    def prediction(self) -> None:
        """None: only the Trainer's callbacks predict."""

    def train(self, session: Session) -> str | None:
        """Call the function; see `TrainingCode`.

        Raises:
            StudyError: It has reported nothing, and returns nothing.
            MetricError: It returns something else than a number or metrics, and that is to be the value.
            StorageInternalError: The study's storage failed.
        """
        self._session = session
        seed_all(session.seed)
        try:
            with only_in(session.process), contextlib.suppress(TrainingStoppedError):
                self._conclude(session, self.function(session))
        except StorageInternalError as error:
            if _is_of_the_study(error):
                raise
            raise StudyError(f"a storage of the function's own failed: {error}") from error
        except AttributeError as error:
            if error.obj is session and error.name and hasattr(optuna.Trial, error.name):
                raise _of_optuna(error.name) from error
            raise
        except optuna.TrialPruned:
            if session.stop_reason != DIVERGED:  # an Optuna script raises this for a diverged trial too
                raise
        finally:
            try:
                session.finish()
            finally:
                session.reports.close()
        # A function that was not told to stop, or has no epoch left, has ended by itself and does not pause.
        has_ended = not session.told_to_stop or 0 < session.max_epochs <= session.epoch
        return None if session.stop_reason == PAUSED and has_ended else session.stop_reason

    def smaller(self) -> str:
        """Empty: the function makes its own batches, so hpo can't cut them."""
        return ""

    def _conclude(self, session: Session, returned: object) -> None:
        """Take what the function has returned as the trial's value, unless the function was asked to stop."""
        if session.told_to_stop:
            return
        if not session.history:
            session.conclude(_metrics(returned, self.goals or (session.metric,)))
        elif returned is not None:
            self._returned = self._value_of(session, returned)
            if self._returned is not None and not math.isfinite(self._returned[session.metric]):
                session.diverge()

    def _value_of(self, session: Session, returned: object) -> Metrics | None:
        """What the function returned besides reporting epochs, if it is a value; None for, say, a model."""
        try:
            found = Metrics(_metrics(returned, self.goals or (session.metric,)))
        except (StudyError, MetricError) as error:
            print_notice(f"the best reported epoch counts, and not what the function returned: {error}")
            return None
        if session.metric in found:
            return found
        print_notice(f"the best reported epoch counts: what the function returned has no {session.metric}")
        return None


def _of_optuna(name: str) -> StudyError:
    """The error for a function that uses its session as if it were an Optuna trial."""
    return StudyError(
        f"`{SESSION}.{name}` is of Optuna's trials, and a function that takes parameters as arguments gets a "
        f"session\n  fix: leave it out: `{SESSION}.report(epoch, …)` ends a trial that is pruned, and records "
        f"metrics; or draw all parameters by `{SESSION}.suggest_…`, without arguments and `search_space`"
    )


def _is_of_the_study(error: StorageInternalError) -> bool:
    """Whether it was the study's storage that failed, not an Optuna storage that the function opened itself."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(str(frame.f_globals.get("__name__")).startswith("hpo.storage.") for frame in frames)


def takes_session(function: Callable[..., object]) -> bool:
    """Whether a function has a parameter by which it takes its trial's session: one named ``trial``."""
    try:
        parameter = inspect.signature(function).parameters.get(SESSION)
    except (ValueError, TypeError):  # a function in C without a signature
        return False
    return parameter is not None and parameter.kind in _BY_NAME


def function_code(spec: StudySpec, resolver: TargetResolver, drawn: BaseTrial) -> FunctionCode:
    """The function of a study file's ``objective``.

    It gets the arguments of its trial's config, and the session as ``trial`` if it has such a parameter. A
    function that draws its parameters itself gets a `ScriptTrial` instead of the session.

    Args:
        spec: The study file.
        resolver: Resolves the function's import path.
        drawn: The trial from which such a function draws: Optuna's trial, or one with fixed parameters.
    """

    def call(session: Session) -> object:
        node: Mapping[str, Any] = session.config["objective"]
        function = resolver.resolve(node[TARGET])
        own: dict[str, Any] = {}
        if takes_session(function):
            draws = spec.defines_by_run and draws_parameters(function)
            own = {SESSION: ScriptTrial(session, drawn) if draws else session}
        return instantiate(resolver, node, **own)

    return FunctionCode(call, tuple(spec.study.goals))


def came_to(
    code: TrainingCode, metric: str, mode: Mode, *, after: int = 0
) -> tuple[int, Mapping[str, float]] | None:
    """The epoch of a training that counts, and its metrics; None where there is no finite value.

    It is the best epoch, unless the code gives the result itself. Then it is the last epoch that has reported this
    value, or else the last epoch.

    Args:
        code: The code that has trained.
        metric: The study's metric.
        mode: Whether the metric is minimised or maximised.
        after: Number of first epochs that do not count, see `trainer.state.best_epoch`.
    """
    history, returned = code.history, code.returned
    if returned is None:
        best = best_epoch(history, metric, mode, after=after)
        return None if best is None else (best, history[best - 1])
    if not math.isfinite(returned.get(metric, math.nan)):
        return None
    same = [epoch for epoch, each in enumerate(history, start=1) if each.get(metric) == returned[metric]]
    epoch = same[-1] if same else len(history)
    return epoch, {**history[epoch - 1], **returned}


def _metrics(returned: Any, goals: Sequence[str]) -> Mapping[str, Any]:
    """What a function has returned, as the metrics of an epoch."""
    if returned is None:
        raise StudyError(
            "the function has neither reported an epoch nor returned a value\n"
            f"  fix: return {', '.join(goals)}, or call `{SESSION}.report(…)` after each epoch"
        )
    if isinstance(returned, bool):
        raise StudyError(f"the function has returned {returned}, and no number\n  fix: return {', '.join(goals)}")
    if isinstance(returned, Mapping):  # a name is stored as JSON, and sorted among others
        return {name if isinstance(name, str) else str(name): value for name, value in returned.items()}
    values = returned if isinstance(returned, list | tuple) else (returned,)
    if len(values) != len(goals):
        returns = f"the function has returned {count_of(len(values), 'value')}"
        order = ", in this order" if len(goals) > 1 else ""
        raise StudyError(
            f"{returns}, and the study optimises {listed(goals)}\n  fix: return {', '.join(goals)}{order}"
        )
    try:
        return Metrics(dict(zip(goals, values, strict=True)))
    except MetricError as error:
        raise MetricError(error.message, source="what the function returned") from error
