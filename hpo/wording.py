"""Formats numbers, sizes, durations and reasons as text for people; the only module that does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

#: Why a trial ended that something else has ended, such as a person in the dashboard.
ENDED_OUTSIDE: Final = "it was ended from outside"

#: Whole numbers below this, such as a count of parameters, are written out in full.
_WHOLE: Final = 1e12

_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


def shown(value: Any, digits: int = 6) -> str:
    """A value as text: a fraction with so many significant digits, None as a dash, a list or mapping as JSON."""
    if value is None:
        return "-"
    if isinstance(value, list | dict):
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < _WHOLE else f"{value:.{digits}g}"


def parameter(value: Any, digits: int = 6) -> str:
    """A parameter's value as `shown` writes it, except that None, a value like others here, is ``None``."""
    return "None" if value is None else shown(value, digits)


def percent(share: float) -> str:
    """A fraction of 1 in percent."""
    return f"{share * 100:.0f} %"


def duration(seconds: float) -> str:
    """A duration for people: ``12 ms``, ``3.5 s``, ``12.5 min``, ``2 h 5 min``."""
    if seconds < 0.9995:  # with three digits, anything longer rounds to a second
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{seconds / 60:.3g} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def file_size(count: int) -> str:
    """A number of bytes on disk in powers of 1000: ``1.5 GB``."""
    power = min(max(len(str(count)) - 1, 0) // 3, len(_UNITS) - 1)
    return f"{count / 1000**power:.4g} {_UNITS[power]}"


def gib(count: float) -> str:
    """A number of bytes of memory or free space in powers of 1024: ``0.25 GiB``, ``15.6 GiB``, ``1024 GiB``."""
    size = count / 2**30
    return f"{size:.3g} GiB" if size < 100 else f"{size:.0f} GiB"


def progress(trials: tuple[int, int], epochs: tuple[int, int | None]) -> tuple[int, int, str]:
    """The progress of a study towards the budget that ends it: how much is done, of how much, and of what.

    Args:
        trials: How many have ended, and `n_trials`.
        epochs: How many epochs all trials together have trained, and the limit; None without one.
    """
    trained, limit = epochs
    return (*trials, "trials") if limit is None else (trained, limit, "epochs")


def study_progress(status: Mapping[str, Any]) -> tuple[int, int, str]:
    """`progress` of a study from its status, see `hpo.study.status.study_status`."""
    epochs = status["epochs"]
    return progress((status["finished"], status["n_trials"]), (epochs["trained"], epochs["limit"]))


def best_list(best: dict[str, Any] | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The ``best`` of a status as a list: empty, the one best trial, or the Pareto front."""
    if best is None:
        return []
    return best if isinstance(best, list) else [best]


def described_best(goals: Sequence[str], best: Any) -> list[tuple[str, str]]:
    """The ``best`` of a status as (title, text), or nothing without one; ``goals`` are the study's metrics."""
    found = best_list(best)
    if not found:
        return []
    if len(goals) > 1:
        return [("Pareto front", f"trials {', '.join(str(entry['trial']) for entry in found)}")]
    return [("best", f"trial {found[0]['trial']}, {goals[0]} {found[0]['value']:.6g}")]


def granted(until: int | None, why: Mapping[str, Any]) -> str:
    """A scheduler's grant and its reason: ``to epoch 9: model, ends at 0.12 (0.1 to 0.2), best 0.15``."""
    goal = "to its end" if until is None else f"to epoch {until}"
    said = reason_of_grant(why)
    return f"{goal}: {said}" if said else goal


def taken(number: int, epochs: int, until: int | None, why: Mapping[str, Any]) -> str:
    """A trial that starts or resumes with a grant: ``trial 4 resumes after epoch 3, to epoch 9: promotion``."""
    begins = f"resumes after epoch {epochs}" if epochs else "starts"
    return f"trial {number} {begins}, {granted(until, why)}"


def paused_at_end(epoch: int) -> str:
    """Why a trial is pruned: it was paused when its study ended."""
    return f"pruned at epoch {epoch}: paused there when the study ended"


def same_as(known: int) -> str:
    """Why a trial has a result without training: another trial has the same parameters."""
    return f"the same parameters as trial {known}: its result was taken over"


def never_asked(names: Sequence[str]) -> str:
    """Which values of a queued trial had no effect; empty if all had one."""
    given = ", ".join(f"`{name}`" for name in names)
    return f"it was queued with {given}, which its function never asked for" if given else ""


def replaced_by(epoch: int, fork: int, parent: int) -> str:
    """Why a trial is pruned: a fork of another trial replaces it."""
    return f"pruned at epoch {epoch}: trial {fork} stands in its place, a fork of trial {parent}"


def pruned_by(epoch: int, pruner: str) -> str:
    """Why a pruner ended a trial."""
    return f"pruned at epoch {epoch} by {pruner}"


def not_finite(epoch: int, metrics: Sequence[str], *, returned: bool) -> str:
    """Which metrics of a diverged trial were not finite: ``epoch 3: train_loss, val_loss not finite``."""
    if not metrics:
        return f"after epoch {epoch}, see its log"
    return f"{'returned' if returned else f'epoch {epoch}'}: {listed(metrics, 4)} not finite"


def condemned(epoch: int, probability: float, alpha: float, *, runs_on: bool) -> str:
    """A pruner's decision: ``pruned at epoch 3: probability 0.004 to end among the best, alpha is 0.04``."""
    became = "kept as an audit run" if runs_on else "pruned"
    return f"{became} at epoch {epoch}: probability {probability:.2g} to end among the best, alpha is {alpha:.2g}"


def reason_of_grant(why: Mapping[str, Any]) -> str:
    """The reason alone of `granted`: ``model, ends at 0.12 (0.1 to 0.2), best 0.15``; empty without one."""
    said = [] if not why.get("kind") else [str(why["kind"])]
    if why.get("parent") is not None:
        said = [f"fork of trial {why['parent']} after epoch {why['epoch']}"]
    if why.get("replaces") is not None:
        said.append(f"in the place of trial {why['replaces']}")
    if why.get("predicted") is not None:
        said.append(f"ends at {shown(why['predicted'], 3)} ({shown(why['low'], 3)} to {shown(why['high'], 3)})")
    if why.get("incumbent") is not None:
        said.append(f"best {shown(why['incumbent'], 3)}")
    return ", ".join(said)


def not_replayed(forks: int, taken_over: int) -> str:
    """Which trials a replay leaves out: ``2 forks of other trials``; empty if none.

    Args:
        forks: How many trials began with a checkpoint of another one.
        taken_over: How many trials took over a known result without training.
    """
    parts = [f"{count_of(forks, 'fork')} of other trials"] if forks else []
    parts += [f"{count_of(taken_over, 'trial')} that took over a known result"] if taken_over else []
    return " and ".join(parts)


def count_of(number: int, noun: str) -> str:
    """A number and its noun, in the plural if needed: ``1 trial``, ``2 trials``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def are(number: int, noun: str) -> str:
    """`count_of` with its verb: ``1 trial is``, ``2 trials are``."""
    return f"{count_of(number, noun)} {'is' if number == 1 else 'are'}"


def listed(found: Sequence[Any], most: int = 12) -> str:
    """A list for a sentence, cut off after `most` entries."""
    named = ", ".join(map(str, found[:most]))
    return named if len(found) <= most else f"{named} and {len(found) - most} more"
