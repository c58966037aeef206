"""Computes the importance of each parameter with Optuna, and remarks on how far to trust it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial

from hpo.config.schema_study import Direction
from hpo.report.drawable import snapshot
from hpo.study.ranking import is_ranked

#: PED-ANOVA compares the best tenth with all; Optuna asks for at least five trials in that tenth.
_ENOUGH: Final = 50
_FEWEST: Final = 2
_ALL_ALIKE: Final = "Target and region quantiles select the same set"
_RARE: Final = "Some regimes for parameter"


@dataclass(frozen=True)
class Importances:
    """How much each parameter matters.

    Attributes:
        shares: The importances by parameter, the largest first; their sum is 1. Empty if there are none.
        missing: Why there are none.
        remarks: Cautions about them.
    """

    shares: dict[str, float] = field(default_factory=dict)
    missing: str | None = None
    remarks: tuple[str, ...] = ()


def importances(trials: Iterable[FrozenTrial], goals: Mapping[str, Direction]) -> Importances:
    """Optuna's default importances (PED-ANOVA) of a study's complete trials within the bounds.

    Watanabe, Bansal & Hutter 2023, "PED-ANOVA" (https://arxiv.org/abs/2304.10255): how differently a parameter is
    spread among the best tenth of the trials and among all. With several goals the best are those on and near the
    Pareto front.
    """
    complete = [trial for trial in trials if is_ranked(trial)]
    if len(complete) < _FEWEST:
        verb = "is" if len(complete) == 1 else "are"
        return Importances(missing=f"it takes {_FEWEST} complete trials; there {verb} {len(complete)}")
    # A range may differ between trials.
    searched = {name for trial in complete for name, each in trial.distributions.items() if not each.single()}
    if len(searched) < _FEWEST:
        return Importances(missing="it takes several parameters with more than one value")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = optuna.importance.get_param_importances(snapshot(complete, goals))
        except ValueError as error:  # Optuna raises it for a space that it can't assess
            return Importances(missing=str(error))
    warned = [str(each.message) for each in said]
    if any(text.startswith(_ALL_ALIKE) for text in warned):
        return Importances(missing="the values of the complete trials are all alike")
    remarks = (*_remarks(len(complete), warned), *_changing(complete))
    return Importances({name: float(share) for name, share in found.items()}, remarks=remarks)


def _changing(trials: Sequence[FrozenTrial]) -> tuple[str, ...]:
    """Cautions about a space that differs between trials, as with a function that draws its parameters."""
    ranges: dict[str, list[BaseDistribution]] = {}
    for trial in trials:
        for name, each in trial.distributions.items():
            ranges.setdefault(name, []).append(each)
    differ = [name for name, found in ranges.items() if any(each != found[0] for each in found)]
    if not differ:
        return ()
    return (
        f"The range of {', '.join(differ)} differs from trial to trial: trials are compared within each range.",
    )


def _remarks(count: int, warned: Iterable[str]) -> tuple[str, ...]:
    rare = sorted({text.split("`")[1] for text in warned if text.startswith(_RARE)})
    remarks = []
    if count < _ENOUGH:
        remarks.append(f"They are rough: {count} complete trials are few, {_ENOUGH} make them dependable.")
    if rare:
        remarks.append(f"Few trials have (or lack) {', '.join(rare)}: more doubtful than the others.")
    return tuple(remarks)
