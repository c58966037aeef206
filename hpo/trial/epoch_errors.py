"""Errors about the epochs that training code reports, which say what to change in the code."""

from __future__ import annotations

from typing import Final

_REPORT_FIRST: Final = (
    "a checkpoint is that of the epoch reported last, and the trial would resume one epoch off: report an epoch, "
    "then save it (inside an epoch, give `batch=`)"
)


def without_name(metric: str) -> TypeError:
    """The error for a metric without a name, as in Optuna's ``trial.report(value, step)``."""
    named = f"{metric}=…" if metric.isidentifier() else f"**{{{metric!r}: …}}"
    return TypeError(
        f"report takes the epoch's number, and each metric by its name: `trial.report(epoch, {named})`, "
        "or a mapping of them as `trial.report(epoch, **metrics)`"
    )


def saved_early(epoch: int) -> ValueError:
    """The error for a first report that comes after a checkpoint was saved."""
    return ValueError(
        f"report({epoch}, …) comes after a checkpoint that was saved before any report; {_REPORT_FIRST}"
    )


def out_of_turn(epoch: int, after: int, *, resumed: bool) -> ValueError:
    """The error for a report of another epoch than the next one.

    Args:
        epoch: The reported number.
        after: Finished epochs.
        resumed: Whether it is the first report since the training resumed from a checkpoint.
    """
    why = ""
    if resumed and epoch == after + 2:
        why = f"; it resumed from a checkpoint that was saved before its report; {_REPORT_FIRST}"
    return ValueError(
        f"report({epoch!r}, …): the epoch after {after} is {after + 1}: number epochs from 1, report each once "
        f"and then save it, and let `load_checkpoint` say where a trial resumes{why}"
    )
