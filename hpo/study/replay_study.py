"""Replays a finished study's curves under other pruners, as they are typed on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from optuna.trial import FrozenTrial, TrialState

from hpo.config.marks import COMMAND_LINE
from hpo.config.spec import StudySpec
from hpo.errors import InputError, StudyError
from hpo.search.by_name import known_class
from hpo.search.pruners import PRUNERS, make_pruner
from hpo.search.replay import RecordedRun, Replay, Setting, replay, summarize, whole_curves
from hpo.search.schedulers.by_name import SCHEDULERS
from hpo.storage.attributes import MAX_EPOCHS_ATTR
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome, outcome_of
from hpo.study.ranking import is_feasible
from hpo.study.replayable import order_of, replayable

#: Curves on which a pruner is tried: with fewer it may not get past its start-up trials.
_TRIED: Final = 12
_EXAMPLES: Final = {"--pruner": "--pruner median,n_warmup_steps=3", "--scheduler": "--scheduler asha,factor=4"}


def typed_mapping(text: str, option: str) -> str:
    """Turn a typed pruner or scheduler (``median,n_warmup_steps=3``) into a mapping in YAML's flow style.

    Commas in brackets belong to a value: ``patient,patience=2,wrapped_pruner={name: median, n_warmup_steps: 3}``.

    Args:
        text: What was typed.
        option: The option: ``--pruner`` or ``--scheduler``.

    Raises:
        InputError: A part after the first is not ``key=value``, there is no name, or it names the other kind.
    """
    name, *arguments = (part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text))
    pairs = [argument.partition("=") for argument in arguments]
    wrong = next((key for key, equals, _ in pairs if not (key and equals)), None)
    if not name or wrong is not None:
        fix = f"write a name and arguments, for example `{_EXAMPLES[option]}`"
        raise InputError(f"is not a {option[2:]}", file=COMMAND_LINE, path=option, value=text, fix=fix)
    kinds = {"--pruner": known_class(name, PRUNERS), "--scheduler": SCHEDULERS.get(name)}
    (other,) = kinds.keys() - {option}
    if kinds[option] is None and kinds[other] is not None:
        problem, fix = f"is a {other[2:]}, not a {option[2:]}", f"write `{other} {text}`"
        raise InputError(problem, file=COMMAND_LINE, path=f"{option} {text}", fix=fix)
    inside = ", ".join(f"{key.strip()}: {value.strip()}" for key, _, value in pairs)
    return f"{{name: {name}, {inside}}}" if inside else f"{{name: {name}}}"


def retold(error: InputError, typed: str, option: str) -> InputError:
    """An error about ``study.pruner`` or ``study.scheduler``, changed into one about the typed option."""
    argument, value = error.path.removeprefix(f"study.{option[2:]}").lstrip("."), error.value
    if value and argument not in ("", "name"):
        value = f"{argument}={value}"
    return InputError(error.problem, file=COMMAND_LINE, path=f"{option} {typed}", value=value, fix=error.fix)


def check_pruner(spec: StudySpec) -> None:
    """Build the pruner of a study file and let it decide about some curves.

    Raises:
        InputError: The pruner can't be built, or can't decide with its arguments.
    """
    pruner = make_pruner(spec)
    curves = whole_curves([[level, level - 0.5, level - 0.7] for level in range(_TRIED, 0, -1)])
    try:
        replay(curves, pruner, Setting(direction=spec.study.direction, max_epochs=3))
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise spec.error(
            f"can't be used with these arguments: {error}",
            path="study.pruner",
            value=spec.study.pruner.model_dump(),
            fix="see the class of that name in its documentation",
        ) from error


def study_curves(trials: Sequence[FrozenTrial]) -> list[RecordedRun]:
    """The curves of finished trials.

    The curve of a complete trial is whole, also after early stopping; its final value is the trial's own, the best
    of the curve. A trial that diverged has no finite final value, which counts as the worst. A trial that was
    pruned or failed is cut short: its full result is not known.
    """
    return [
        RecordedRun(
            values=tuple(trial.intermediate_values[step] for step in sorted(trial.intermediate_values)),
            steps=tuple(sorted(trial.intermediate_values)),
            final=math.nan if trial.values is None or trial.state != TrialState.COMPLETE else trial.values[0],
            end=trial.state,
            feasible=is_feasible(trial),
            diverged=outcome_of(trial) == Outcome.DIVERGED and not math.isfinite(_last(trial)),
        )
        for trial in trials
    ]


def _last(trial: FrozenTrial) -> float:
    return trial.intermediate_values[max(trial.intermediate_values)]


def replay_study(
    opened: OpenStudy, contestants: Mapping[str, StudySpec], *, orders: int, workers: int
) -> dict[str, Any]:
    """Replay a study under several pruners.

    A trial that the study cut short ends where its curve ends, in the same state. It counts in the epochs only,
    not where trials are judged by their final values.

    Args:
        opened: The study.
        contestants: By the name to show, a study file with the pruner to replay.
        orders: How many orders of the trials: the study's own, then random ones.
        workers: How many trials run at a time.

    Returns:
        Plain data: what was replayed, and one entry per pruner under ``pruners``, with the figures of
        `hpo.search.replay.Summary` and the mean epochs used.

    Raises:
        StudyError: Fewer than two trials ran to an end with a finite value within the bounds.
    """
    known, name = replayable(opened), opened.spec.study.name
    curves = study_curves(known.trials)
    if sum(curve.whole and math.isfinite(curve.judged) for curve in curves) < 2:
        bounds = " within its constraints" if opened.spec.study.constraints else ""
        usual = "finish more trials; without a pruner and a scheduler all of them run to their end"
        raise StudyError(
            f"the study {name} has fewer than 2 trials that ran to their end with a finite value{bounds}: there "
            f"is nothing to judge pruners by{known.aside}\n  fix: {known.fix(usual)}"
        )
    found = {
        shown: summarize([_replayed(opened, curves, spec, order, workers) for order in range(orders)])
        for shown, spec in contestants.items()
    }
    epochs = sum(curve.epochs for curve in curves)
    return {
        "study": name,
        "trials": len(curves),
        "cut_short": sum(not curve.whole for curve in curves),
        "left_out": known.others,
        "epochs": epochs,
        "orders": orders,
        "workers": workers,
        "pruners": [
            {"pruner": shown, "epochs_used": summary.epochs_fraction * epochs, **asdict(summary)}
            for shown, summary in found.items()
        ],
    }


def _replayed(opened: OpenStudy, curves: list[RecordedRun], spec: StudySpec, order: int, workers: int) -> Replay:
    """One replay; ``order`` is the number of an order, see `order_of`."""
    setting = Setting(
        direction=spec.study.direction,
        workers=workers,
        speed_seed=order if workers > 1 else None,
        max_epochs=opened.study.user_attrs.get(MAX_EPOCHS_ATTR, spec.trial_epochs),
        study_name=spec.study.name,
    )
    return replay(curves, make_pruner(spec), setting, order_of(len(curves), order))
