"""Code of this project that a function uses says nothing of how the function gets its parameters."""

from __future__ import annotations

from typing import Any

from hpo.trial.named_in import draws_parameters
from hpo.trial.script_trial import session_of
from hpo.trial.session import Session


class Callback:
    def __init__(self, trial: Session) -> None:
        self.trial = session_of(trial)


def takes_arguments(trial: Session, lr: float) -> Any:
    return Callback(trial), lr


def draws_in_another(trial: Any) -> Any:
    return drawn(trial)


def drawn(trial: Any) -> Any:
    return trial.suggest_float("lr", 0.0, 1.0)


def draws_by_default(trial: Any, *, draw: Any = drawn) -> Any:
    return draw(trial)


class Objective:
    """As scripts of Optuna have it where the objective needs arguments of its own."""

    def __call__(self, trial: Any) -> Any:
        return self.inner(trial)

    def inner(self, trial: Any) -> Any:
        return trial.suggest_float("lr", 0.0, 1.0)


class Model:
    def __call__(self, trial: Any) -> Any:
        return trial


def test_an_object_that_is_called_draws_in_its_own_methods() -> None:
    assert draws_parameters(Objective())
    assert not draws_parameters(Model())


def test_a_callback_of_this_project_draws_no_parameters() -> None:
    assert not draws_parameters(takes_arguments)
    assert draws_parameters(draws_in_another)
    assert draws_parameters(draws_by_default)
