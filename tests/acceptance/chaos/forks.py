"""What must hold for forks: where each began, in whose place it stands, and that no place is empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from optuna.trial import FrozenTrial

from hpo.storage.attributes import EPOCHS_ATTR, IMPORTED_ATTR
from hpo.storage.grants import grants_of
from hpo.storage.lineage import epochs_reached, epochs_trained, forked_from, inherited_epochs
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome, outcome_of
from hpo.wording import listed


def epochs_left(trials: Sequence[FrozenTrial], opened: OpenStudy) -> int | None:
    """Epochs of the budget that no trial has trained; None without one."""
    epochs = sum(epochs_trained(trial) for trial in trials if IMPORTED_ATTR not in trial.system_attrs)
    budget = opened.study.user_attrs.get(EPOCHS_ATTR)
    return None if budget is None else budget - epochs


def forks(trials: Sequence[FrozenTrial], opened: OpenStudy) -> Iterator[str]:
    """A fork begins where its parent has paused, and each place in the population has one trial at a time."""
    begun = {trial.number: fork for trial in trials if (fork := forked_from(trial)) is not None}
    by_number = {trial.number: trial for trial in trials}
    for number, fork in sorted(begun.items()):
        parent, replaced = by_number.get(fork["parent"]), by_number.get(fork["replaces"])
        begins = f"trial {number} is a fork of trial {fork['parent']} after epoch {fork['epoch']}"
        if parent is None or parent.number >= number:
            yield f"{begins}, which is not before it"
        elif not inherited_epochs(parent) < fork["epoch"] <= epochs_reached(parent):
            yield f"{begins}, which that has not trained"
        elif fork["epoch"] not in [each["until"] for each in grants_of(parent)]:
            yield f"{begins}, where that has not paused"
        if replaced is not None and outcome_of(replaced) == Outcome.COMPLETE:
            yield f"trial {number} stands in the place of trial {replaced.number}, which is complete"
    places = Counter(fork["replaces"] for fork in begun.values() if fork["replaces"] is not None)
    if twice := [number for number, count in sorted(places.items()) if count > 1]:
        yield f"several forks stand in the place of trial {listed(twice)}"
    own = [trial for trial in trials if IMPORTED_ATTR not in trial.system_attrs]
    if opened.scheduler.forks and len(own) < opened.budget() and epochs_left(trials, opened) != 0:
        pruned = [trial.number for trial in own if outcome_of(trial) == Outcome.PRUNED]
        if alone := [number for number in pruned if number not in places]:
            yield f"nothing stands in the place of trial {listed(alone)}, which was pruned"
