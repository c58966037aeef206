"""Final training over several seeds: estimates the mean result of parameters, and finds the best of the leaders.

A study's best trial is also a lucky one: its value is the best of many, each with the noise of its own seed.
Training again with seeds that had no part in the choice shows what to expect of the parameters. The data and its
split stay the same: the intervals are about the noise of training, not about other data.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from scipy import stats

from hpo.config.code import code_identity
from hpo.config.spec import StudySpec
from hpo.errors import StudyError
from hpo.final.seed_run import SeedRun, SeedTrainer
from hpo.final.stamp import clear, write_json
from hpo.final.starting import Start, stages_of, start_of_trial
from hpo.storage.lineage import trained_as
from hpo.study.lineage import Stage
from hpo.study.open_study import OpenStudy
from hpo.study.own_trials import own_trials, ranked_trials
from hpo.study.status import no_best
from trainer.files import aside_of

#: Confidence of the intervals.
CONFIDENCE: Final = 0.95
_FEWEST: Final = 2  # the fewest values for an interval
#: The files of a training that are kept.
_FILES: Final = ("config.yaml", "metrics.csv", "model.pt")


@dataclass(frozen=True)
class Estimate:
    """The mean of a metric over seeds, with its confidence interval.

    Attributes:
        mean: The mean.
        half_width: Half the width of the mean's 95 % confidence interval; None for a single value.
        n: Number of values.
    """

    mean: float
    half_width: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of at least one value with its confidence interval, by Student's t with n - 1 degrees of freedom.

    Student, "The Probable Error of a Mean", Biometrika 6 (1908), 1-25. It assumes normally distributed values.
    """
    n, mean = len(values), statistics.fmean(values)
    if n < _FEWEST:
        return Estimate(mean, None, n)
    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1))
    return Estimate(mean, quantile * statistics.stdev(values) / math.sqrt(n), n)


def leaders(opened: OpenStudy, k: int, *, accept_code_change: bool = False) -> list[Start]:
    """The study's best ``k`` trials to train from scratch, the best first; trials of equal parameters count once.

    The parameters of a fork include those of its parents, with which it is trained before.

    Args:
        opened: The study.
        k: How many.
        accept_code_change: Accept trials that ran under other code than the code here.

    Raises:
        InputError: A trial ran under other code.
        StudyError: No trial can be the best, or the study has several objectives.
    """
    study = opened.spec.study
    if study.objectives is not None:
        raise StudyError(
            f"the study {study.name} has several objectives, and so no order of its trials\n"
            "  fix: choose a trial of the front that `hpo best` shows: `--trial N --seeds 5`"
        )
    ranked = ranked_trials(opened)
    if not ranked:
        raise no_best(opened, own_trials(opened))
    trials, first = opened.study.get_trials(deepcopy=False), dict[str, int]()
    for trial in ranked:
        if len(first) == k:
            break
        first.setdefault(_course(stages_of(opened, trials, trials[trained_as(trial)])), trial.number)
    option = ("--top-k", str(k))
    return [
        start_of_trial(
            opened, str(number), from_scratch=True, accept_code_change=accept_code_change, option=option
        )
        for number in first.values()
    ]


def _course(stages: Iterable[Stage]) -> str:
    """A key of a training from scratch without its seeds; a fork with its parent's parameters adds no stage."""
    parts: list[list[Any]] = []
    for stage in stages:
        if parts and parts[-1][0] == stage.params:
            parts.pop()
        parts.append([stage.params, stage.until])
    return json.dumps(parts, sort_keys=True)


def train_over_seeds(trainer: SeedTrainer, starts: Sequence[Start], seeds: Sequence[int]) -> dict[str, Any]:
    """Train each start from scratch with each seed, one after another, and crown the best on average.

    A finished training with the same config, seed and study code in its folder is not repeated; an interrupted one
    resumes from its newest checkpoint. Starts are ranked by how many of their seeds diverged, fewer first, then by
    the mean of the study's metric over the other seeds. ``final/model.pt`` has the crowned start's weights of the
    seed with the best value. As that seed was chosen for its value, expect the mean of another training.

    Args:
        trainer: Trains one seed.
        starts: The starts to train, in the study's order.
        seeds: The seeds, all different.

    Returns:
        What ``final/metrics.json`` holds. ``study``, ``metric``, ``seeds``, ``confidence``, ``code`` (its hash).
        Of the crowned start ``trial``, ``trial_code`` (that of the code which the trial ran under), ``params``,
        ``study_value``, ``estimates`` (an `Estimate` for each metric), ``diverged`` (seeds) and ``runs`` (a
        `SeedRun` each). ``kept``, the run whose weights are in ``model``. And ``ranking``: the same of every start
        in the new order, with ``rank`` and ``rank_before``.

    Raises:
        StudyError: Every training diverged.
    """
    study = trainer.builder.spec.study
    total, entries = len(starts) * len(seeds), []
    for before, start in enumerate(starts):
        runs = [
            trainer.run(start, seed, f"{start.name}, seed {seed} ({before * len(seeds) + index} of {total})")
            for index, seed in enumerate(seeds, start=1)
        ]
        entries.append({"rank_before": before + 1, **_entry(trainer.builder.spec, start, runs)})
    sign = 1 if trainer.builder.spec.study.mode == "min" else -1
    entries.sort(key=lambda entry: (len(entry["diverged"]), sign * _mean(entry, study.metric)))
    ranking = [{"rank": rank, **entry} for rank, entry in enumerate(entries, start=1)]
    result = {"study": study.name, "metric": study.metric, "seeds": list(seeds), "confidence": CONFIDENCE}
    result["code"] = code_identity(trainer.builder.spec).hash
    return _kept(trainer, {**result, **_without_ranks(ranking[0]), "ranking": ranking}, sign)


def _kept(trainer: SeedTrainer, result: dict[str, Any], sign: int) -> dict[str, Any]:
    """The result with the run whose weights are kept, written to ``final/`` in place of what was there."""
    final = trainer.builder.spec.output_dir / "final"
    sound = [run for run in result["runs"] if run["value"] is not None]
    if not sound:
        raise StudyError(
            f"final training diverged with every seed\n  fix: see the logs in {final}, and train another trial"
        )
    kept = min(sound, key=lambda run: sign * run["value"])
    result |= {"kept": kept, "model": str(final / "model.pt")}
    clear(final)
    for name in _FILES:
        _copy_whole(Path(kept["folder"]) / name, final / name)
    write_json(final / "metrics.json", result)
    return result


def _entry(spec: StudySpec, start: Start, runs: Sequence[SeedRun]) -> dict[str, Any]:
    """The results of all seeds of one start."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for name, value in {**run.metrics, spec.study.metric: run.value}.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {
        "trial": start.trial,
        "params": spec.values(start.params),
        "trial_code": start.code,
        "study_value": start.value,
        "estimates": {name: asdict(estimate(each)) for name, each in values.items()},
        "diverged": [run.seed for run in runs if run.diverged],
        "runs": [asdict(run) for run in runs],
    }


def _mean(entry: Mapping[str, Any], metric: str) -> float:
    """The mean of the metric; any number if every seed diverged, as such starts are sorted last anyway."""
    return float(entry["estimates"].get(metric, {"mean": 0.0})["mean"])


def _without_ranks(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("rank", "rank_before")}


def together(ranking: Iterable[Mapping[str, Any]], metric: str) -> list[int]:
    """The trials whose intervals overlap that of the first: these seeds don't clearly separate them from it."""
    first, *others = ranking
    return [
        each["trial"] for each in others if _meet(first["estimates"].get(metric), each["estimates"].get(metric))
    ]


def _meet(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    if one is None or other is None:
        return False
    if one["half_width"] is None or other["half_width"] is None:
        return True
    return bool(abs(one["mean"] - other["mean"]) <= one["half_width"] + other["half_width"])


def _copy_whole(source: Path, target: Path) -> None:
    """Replace the target by a copy of the source; remove the target if there is no source."""
    if not source.exists():
        target.unlink(missing_ok=True)
        return
    with aside_of(target) as aside:
        shutil.copyfile(source, aside)
