"""What `hpo.run` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True, repr=False)
class RunResult:
    """What a study has come to at the end of `hpo.run`.

    Attributes:
        study: Optuna's study, for reading; see `hpo.load_study`.
        n_trials: Trials that the study is to bring to an end.
        finished: Trials that have ended.
        outcomes: How many ended as what: ``complete``, ``pruned``, ``diverged``, …
        best: The best trial as `hpo best --json` has it: ``trial`` (its number), ``value``, ``params``,
            ``epoch``, ``metrics``, ``checkpoint``, and ``internals`` (predictions and what else was not asked
            for). None if no trial is complete; with several objectives a list, the Pareto front.
        ending: Why the run ended: ``done``, ``timeout``, ``goal`` (the study has what it is after), ``stopped``
            (by `hpo stop`), or ``left`` (a signal has ended this call, and the engine's agents work on).
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
