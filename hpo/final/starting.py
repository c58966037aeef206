"""Finds what a final training starts from: the base config or a trial, with its checkpoint or from scratch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from optuna.trial import FrozenTrial
from torch.optim import Optimizer

from hpo.config.code import code_identity
from hpo.config.spec import StudySpec
from hpo.errors import InputError, StudyError
from hpo.final.models import best_checkpoint, find_trial, refuse_foreign_parameters
from hpo.storage.lineage import trained_as
from hpo.study.code_record import trial_codes
from hpo.study.lineage import Stage, lineage_of
from hpo.study.open_study import OpenStudy
from hpo.study.own_trials import trial_value
from hpo.trial.micro_batch import state_in_parts
from hpo.trial.run_length import NO_PROGRESS, Progress
from trainer import Trainer
from trainer.step.optimizers import load_optimizer
from trainer.step.parts import bare_model

#: Entries of a parameter group that a scheduler changes; final training starts with their configured values.
_SCHEDULED: Final = (
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "betas",
    "momentum",
    "base_momentum",
    "max_momentum",
)


@dataclass(frozen=True)
class Start:
    """The start of a final training.

    Attributes:
        name: For people: ``trial 7`` or ``base config``.
        trial: The trial's number; None for the base config.
        seed: The seed of the training.
        params: The parameters, which replace values of the base config.
        checkpoint: The best epoch's checkpoint to start from; None to train from scratch.
        value: The trial's value in the study (the best so far, if it is not complete); None for the base config.
        code: The hash of the latest code that the trial ran under; None for the base config.
        lineage: The stages of the trials that it was forked from, the first one first. From scratch, the model is
            trained with each one's parameters up to the epoch where the next one began.
    """

    name: str
    trial: int | None
    seed: int
    params: Mapping[str, Any]
    checkpoint: dict[str, Any] | None
    value: float | None = None
    code: str | None = None
    lineage: Sequence[Stage] = ()

    @property
    def stages(self) -> Sequence[Stage]:
        """The stages of the training, in order."""
        own = Stage(-1 if self.trial is None else self.trial, self.params, self.seed, None)
        return [own] if self.checkpoint is not None else [*self.lineage, own]

    def with_seed(self, seed: int) -> Start:
        """A copy that trains all stages from scratch with another seed."""
        lineage = [replace(stage, seed=seed) for stage in self.lineage]
        return replace(self, seed=seed, checkpoint=None, lineage=lineage)

    @property
    def epoch(self) -> int:
        """The epochs that are already trained."""
        return 0 if self.checkpoint is None else int(self.checkpoint["state"]["epoch"])

    @property
    def progress(self) -> Progress:
        """The progress of the checkpoint; none from scratch."""
        if self.checkpoint is None:
            return NO_PROGRESS
        state = self.checkpoint["state"]
        return Progress(int(state["data_epoch"]), int(state["step"]), int(state["data_batch"]))


def start_of_base(spec: StudySpec) -> Start:
    """The start from the base config, without a trial."""
    return Start("base config", None, spec.seed, {}, None)


def start_of_trial(
    opened: OpenStudy,
    which: str,
    *,
    from_scratch: bool,
    accept_code_change: bool = False,
    option: tuple[str, str] | None = None,
) -> Start:
    """The start from a trial: its parameters, and its best checkpoint unless ``from_scratch``.

    Args:
        opened: The study.
        which: ``best`` or a trial's number.
        from_scratch: Use only the parameters; for a fork, also those that its parents were trained with before.
        accept_code_change: Accept a trial that ran under other code than the code here.
        option: The option that asked for the trial, and its value; None: ``--trial``.

    Raises:
        InputError: The trial ran under other code.
        StudyError: There is no such trial, its parameters are not in this search space, or it has no readable
            checkpoint.
    """
    trial = find_trial(opened, which)
    trials = opened.study.get_trials(deepcopy=False)
    trained = trials[trained_as(trial)]
    code = next(reversed(trial_codes(opened.storage, trained)), None)
    if not accept_code_change:
        _refuse_other_code(opened.spec, trial.number, code, option or ("--trial", str(trial.number)))
    checkpoint = None if from_scratch else best_checkpoint(opened, trial)
    *lineage, own = stages_of(opened, trials, trained)
    value = trial_value(opened, trial)
    return Start(f"trial {trial.number}", trial.number, own.seed, trial.params, checkpoint, value, code, lineage)


def stages_of(opened: OpenStudy, trials: Sequence[FrozenTrial], trial: FrozenTrial) -> list[Stage]:
    """The stages of a trial that is trained from scratch; `trials` are all trials of the study in the storage.

    Raises:
        StudyError: A trial of its lineage is missing, or has parameters that are not in this search space.
    """
    try:
        stages = lineage_of(trials, trial, opened.trial_seed)
    except ValueError as error:
        raise StudyError(str(error)) from error
    for stage in stages:
        refuse_foreign_parameters(opened, stage.trial, stage.params)
    return stages


def _refuse_other_code(spec: StudySpec, number: int, code: str | None, option: tuple[str, str]) -> None:
    here = code_identity(spec).hash
    if code not in (None, here):
        raise InputError(
            f"trial {number} ran under the code {code}, and the code here is {here}",
            path=option[0],
            value=option[1],
            fix="bring the code back, or accept that the final model is not that trial's: `--accept-code-change`",
        )


def start_from(trainer: Trainer, checkpoint: dict[str, Any], *, of: str) -> None:
    """Load a checkpoint's weights, optimizer state and history; learning rate and schedule stay as newly built.

    Args:
        trainer: A new trainer.
        checkpoint: The checkpoint of a trial's epoch.
        of: The trial's name for people.

    Raises:
        StudyError: The checkpoint is of another model or optimizer.
    """
    fresh = [dict(group) for group in trainer.optimizer.param_groups]
    try:
        bare_model(trainer.model).load_state_dict(checkpoint["model"])
        load_optimizer(trainer.optimizer, checkpoint["optimizer"])
        _as_built(trainer.optimizer, fresh)
    except (RuntimeError, ValueError, KeyError) as error:
        raise StudyError(
            f"the checkpoint of {of} does not fit the model and optimizer here: {error}\n"
            "  fix: undo what has changed since the trial ran, or train it anew with `--from-scratch`"
        ) from error
    # The trial's batches may have been split; here they are whole, with the configured size.
    state = {**state_in_parts(checkpoint, 1), "stop_reason": None, "batch_size": None}
    trainer.state.load_state_dict(state)


def _as_built(optimizer: Optimizer, fresh: list[dict[str, Any]]) -> None:
    """Reset the entries that a scheduler changes to their built values; refuse groups of another optimizer."""
    for group, built in zip(optimizer.param_groups, fresh, strict=True):
        if missing := optimizer.defaults.keys() - group.keys() - {*_SCHEDULED}:
            raise ValueError(f"the optimizer was another one, without {', '.join(sorted(missing))}")
        for key in _SCHEDULED:
            if key in built:
                group[key] = built[key]
