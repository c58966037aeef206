"""What became of a trial, from its state, its value and what was stored with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState

from hpo.storage.attributes import OUTCOME_ATTR
from hpo.study.outcome import (
    STATE_OF,
    Outcome,
    finite,
    outcome_of,
    prediction_record,
)
from hpo.trial.failure import failure_outcome, is_device_memory
from tests.unit.trainer.support import quick


def ended(state: TrialState, value: float | None = None, stored: str | None = None) -> optuna.trial.FrozenTrial:
    attrs = {} if stored is None else {OUTCOME_ATTR: stored}
    return optuna.trial.create_trial(state=state, value=value, user_attrs=attrs)


@pytest.mark.parametrize(
    ("state", "value", "stored", "outcome"),
    [
        (TrialState.WAITING, None, None, "waiting"),
        (TrialState.WAITING, None, "error", "waiting"),
        (TrialState.COMPLETE, 1.0, None, Outcome.COMPLETE),
        (TrialState.COMPLETE, math.inf, "diverged", Outcome.DIVERGED),
        (TrialState.COMPLETE, -math.inf, "diverged", Outcome.DIVERGED),
        (TrialState.COMPLETE, 1.0, "diverged", Outcome.COMPLETE),
        (TrialState.COMPLETE, 1.0, "error", Outcome.COMPLETE),
        (TrialState.COMPLETE, 1.0, "out_of_memory", Outcome.COMPLETE),
        (TrialState.PRUNED, 1.0, None, Outcome.PRUNED),
        (TrialState.PRUNED, 1.0, "diverged", Outcome.PRUNED),
        (TrialState.FAIL, None, None, Outcome.ERROR),
        (TrialState.FAIL, None, "out_of_memory", Outcome.OUT_OF_MEMORY),
        (TrialState.FAIL, None, "timed_out", Outcome.TIMED_OUT),
        (TrialState.FAIL, None, "lost", Outcome.LOST),
        (TrialState.FAIL, None, "diverged", Outcome.ERROR),
    ],
)
def test_a_stored_outcome_counts_only_with_the_end_it_was_stored_for(
    state: TrialState, value: float | None, stored: str | None, outcome: str
) -> None:
    assert outcome_of(ended(state, value, stored)) == outcome


def test_every_outcome_has_a_state_and_a_line_in_the_documents() -> None:
    documented = (Path(__file__).parents[3] / "docs" / "how-it-works.md").read_text()
    table = documented.partition("## Outcomes")[2].partition("\n## ")[0]
    for outcome in Outcome:
        assert outcome in STATE_OF, f"{outcome} has no state: add it to STATE_OF in hpo/study/outcome.py"
        assert f"`{outcome}`" in table, f"{outcome} is not described: add it to docs/how-it-works.md, Outcomes"


def test_memory_that_ran_out_is_told_from_an_error() -> None:
    with pytest.raises(RuntimeError) as allocation:
        torch.empty(2**60)
    for error in (allocation.value, MemoryError(), torch.OutOfMemoryError("CUDA out of memory")):
        assert failure_outcome(error) == Outcome.OUT_OF_MEMORY
    for other in (RuntimeError("shapes"), ValueError(), SystemExit(1)):
        assert failure_outcome(other) == Outcome.ERROR


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@quick(40)
@given(VALUES)
def test_anything_made_finite_is_json(value: Any) -> None:
    json.dumps(finite(value), allow_nan=False)


def test_only_what_is_not_finite_becomes_null() -> None:
    assert finite({"a": [1.5, math.nan], "b": (math.inf, -math.inf), "c": "nan", "d": True}) == {
        "a": [1.5, None],
        "b": [None, None],
        "c": "nan",
        "d": True,
    }


def test_an_error_made_of_one_about_memory_is_about_memory() -> None:
    error = ValueError("could not call model.Net")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert failure_outcome(error) == Outcome.OUT_OF_MEMORY
    assert is_device_memory(error)
    assert not is_device_memory(MemoryError())
    assert is_device_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))


def predicted(loss: float, final: float | None = None, std: float = 0.5) -> dict[str, float]:
    made = {} if final is None else {"predicted_final_loss": final, "predicted_final_loss_std": std}
    return {"val_loss": loss, **made}


HISTORY = [predicted(4.0), predicted(3.0, 1.5), predicted(2.0, 1.2, 0.25), predicted(1.0, 1.0, 0.0)]


@pytest.mark.parametrize(
    ("epochs", "whole", "final", "latest"),
    [
        (4, True, 1.0, (3, 1.2)),  # what is said at the last epoch is known by then
        (4, False, None, (3, 1.2)),
        (3, False, None, (3, 1.2)),
        (2, False, None, (2, 1.5)),
    ],
)
def test_a_prediction_is_kept_beside_the_outcome(
    epochs: int, whole: bool, final: float | None, latest: tuple[int, float]
) -> None:
    assert prediction_record(HISTORY[:epochs], "val_loss", 4, whole=whole) == {
        "metric": "val_loss",
        "epoch": 2,
        "predicted_final_loss": 1.5,
        "std": 0.5,
        "final_loss": final,
        "latest_epoch": latest[0],
        "latest": latest[1],
    }


def test_without_a_prediction_before_the_end_nothing_is_kept() -> None:
    assert prediction_record([], "val_loss", 4, whole=False) is None
    assert prediction_record(HISTORY[:1], "val_loss", 4, whole=False) is None
    assert prediction_record([HISTORY[0], HISTORY[3]], "val_loss", 2, whole=True) is None


def test_a_prediction_may_lack_its_deviation_and_an_end_its_validation() -> None:
    history = [{"val_loss": 1.0, "predicted_final_loss": 0.5}, {"train_loss": 1.0}]
    found = prediction_record(history, "val_loss", 2, whole=True)
    assert found is not None
    assert (found["std"], found["final_loss"]) == (None, None)
