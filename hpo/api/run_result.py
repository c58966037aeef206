"""Defines RunResult, which `hpo.run` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, repr=False)
class RunResult:
    """The state of a study at the end of `hpo.run`.

    Attributes:
        study: The `optuna.Study`, read-only; see `hpo.load_study`.
        n_trials: Number of trials that the study is to finish.
        finished: Number of trials that have ended.
        outcomes: Number of trials by outcome: ``complete``, ``pruned``, ``diverged``, …
        best: The best trial, as `hpo best --json` prints it: ``trial`` (its number), ``value``, ``params``,
            ``epoch``, ``metrics``, ``checkpoint``, and ``internals`` (predictions and other internal numbers).
            None if no trial is complete; with several objectives a list, the Pareto front.
        ending: Why the run ended: ``done``, ``timeout``, ``goal`` (`target_value` or `stop_after_no_improvement`
            was reached), ``stopped`` (by `hpo stop`), or ``left`` (a signal ended this call, and the engine's
            agents continue).
    """

    study: optuna.Study
    n_trials: int
    finished: int
    outcomes: Mapping[str, int]
    best: Any
    ending: str

    def __repr__(self) -> str:
        counts = [f"{count} {name}" for name, count in self.outcomes.items() if count]
        text = f"{self.study.study_name}: {', '.join([f'{self.finished} of {self.n_trials} trials', *counts])}"
        if isinstance(self.best, list):
            text += f"; best: trials {', '.join(str(each['trial']) for each in self.best)}"
        elif self.best is not None:
            text += f"; best: trial {self.best['trial']}, {self.best['value']:.6g}"
        return f"<RunResult {text}>"
