"""Loads the trained models of a study: finds the trial and its checkpoint, and builds the module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from optuna.trial import FrozenTrial, TrialState
from torch import nn

from hpo.config.code import code_identity
from hpo.config.spec import StudySpec
from hpo.config.targets import instantiate
from hpo.errors import InputError, StudyError
from hpo.storage.attributes import BEST_ATTR
from hpo.storage.lineage import trained_as
from hpo.study.code_record import trial_codes
from hpo.study.folders import CHECKPOINTS, attempt_folders
from hpo.study.joining import config_warning
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.own_trials import best_trial, own_trials
from hpo.study.status import no_best
from hpo.trial.builder import Builder
from trainer.checkpoint.files import list_checkpoints
from trainer.checkpoint.manager import find_checkpoint, newest_checkpoint
from trainer.data.random_state import rng_state, seed_all, set_rng_state
from trainer.state import best_epoch


@dataclass(frozen=True)
class BestWeights:
    """The weights of a trial's best epoch, and where they come from.

    Attributes:
        trial: The trial's number.
        seed: Seed of its training.
        params: Its parameters.
        config: Its whole config, see `hpo.config.spec.StudySpec.resolve`.
        epoch: The best epoch, counted from 1.
        metrics: The metrics of that epoch.
        weights: The model's state dict, on the CPU.
        codes: Hashes of the code that the trial ran under, the latest last.
        other_config: A warning if the study file is different now; empty if not.
    """

    trial: int
    seed: int
    params: Mapping[str, Any]
    config: Mapping[str, Any]
    epoch: int
    metrics: Mapping[str, float]
    weights: Mapping[str, Any]
    codes: Sequence[str] = ()
    other_config: str = ""

    def warning(self, spec: StudySpec) -> str:
        """A warning if the code or config here is not the trial's; empty if both are."""
        here = code_identity(spec).hash
        found = [self.other_config] if self.other_config else []
        if self.codes and self.codes[-1] != here:
            difference = f"trial {self.trial} ran under the code {self.codes[-1]}, and the code here is {here}"
            found.append(f"{difference}: its weights may make another model here than the one that was measured")
        return "\n".join(found)


def load_model(
    spec: StudySpec,
    trial: str = "best",
    *,
    device: str | torch.device = "cpu",
    warn: Callable[[str], None] | None = None,
) -> nn.Module:
    """The model of a trial with the weights of its best epoch, in eval mode.

    Args:
        spec: The study file.
        trial: ``best`` or a trial's number.
        device: The device for the model.
        warn: Called with a warning if the trial ran under other code or another config.

    Raises:
        InputError: The device can't hold the model.
        StudyError: There is no such study or trial, the trial has no readable checkpoint, or its weights do not
            fit the model of the study file.
    """
    with load_study(spec) as opened:
        found = best_weights(opened, trial)
    warning = found.warning(spec)
    if warning and warn is not None:
        warn(warning)
    return model_with(spec, found, device=device)


def best_weights(opened: OpenStudy, which: str) -> BestWeights:
    """The best weights of a trial, from its checkpoints; see `load_model` for arguments and errors."""
    if opened.spec.config.objective is not None:
        raise StudyError(
            "the study has an `objective`, and only that function knows what of its checkpoints is a model\n"
            '  fix: load the checkpoint that `hpo best` names: `torch.load(path)["saved"]` is what it saved'
        )
    trial = find_trial(opened, which)
    checkpoint = best_checkpoint(opened, trial)
    epoch = int(checkpoint["state"]["epoch"])
    return BestWeights(
        trial.number,
        opened.trial_seed(trained_as(trial), trial.params),
        trial.params,
        opened.spec.resolve(trial.params),
        epoch,
        checkpoint["state"]["history"][epoch - 1],
        checkpoint["model"],
        trial_codes(opened.storage, opened.study.get_trials(deepcopy=False)[trained_as(trial)]),
        config_warning(opened),
    )


def model_with(spec: StudySpec, found: BestWeights, *, device: str | torch.device = "cpu") -> nn.Module:
    """The model of these weights, in eval mode; see `load_model` for arguments and errors."""
    kept = rng_state()
    try:
        seed_all(found.seed)  # so that values a model draws and does not save are the same as in the training
        model: nn.Module = instantiate(Builder(spec).resolver, found.config["model"])
    finally:
        set_rng_state(kept)
    try:
        model.load_state_dict(found.weights)
    except RuntimeError as error:
        raise StudyError(
            f"the weights of trial {found.trial} do not fit {found.config['model']['_target_']}: {error}\n"
            "  fix: bring the model's code and the study file back to what they were when the trial ran"
        ) from error
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        problem, fix = f"can't hold the model: {str(error).partition(chr(10))[0]}", "name a device of this machine"
        raise InputError(problem, path="device", value=str(device), fix=fix) from error


def find_trial(opened: OpenStudy, which: str) -> FrozenTrial:
    """The best trial, or the one with this number.

    Raises:
        StudyError: There is no such trial, several are best, or its parameters are not drawn yet, or are not in
            this search space.
    """
    trial = _best(opened) if which == "best" else _numbered(opened, which)
    if trial.state == TrialState.WAITING and not trial.params:
        problem = f"trial {trial.number} waits, and draws its parameters when it starts"
        raise StudyError(f"{problem}\n  fix: `hpo run` trains it")
    refuse_foreign_parameters(opened, trial.number, trial.params)
    return trial


def refuse_foreign_parameters(opened: OpenStudy, number: int, params: Mapping[str, Any]) -> None:
    """Refuse parameters outside of the study file's own search space: import paths in the storage are not trusted.

    A function that draws its parameters itself checks them as it asks for them.

    Raises:
        StudyError: The parameters are not in the search space.
    """
    if not opened.spec.defines_by_run and not opened.space.contains(params):
        problem = f"the parameters of trial {number} do not lie in the search space of the study file"
        raise StudyError(f"{problem}\n  fix: bring that back to what it was when the trial ran")


def best_checkpoint(opened: OpenStudy, trial: FrozenTrial) -> dict[str, Any]:
    """The checkpoint of a trial's best epoch (so far, if it is not complete), on the CPU.

    Raises:
        StudyError: There is no readable checkpoint.
    """
    folders = [folder / CHECKPOINTS for folder in attempt_folders(opened.spec, trained_as(trial))]
    epoch = (trial.user_attrs.get(BEST_ATTR) or {}).get("epoch")
    if epoch is None:
        newest = newest_checkpoint(folders)
        study, state = opened.spec.study, newest and newest[1]["state"]
        epoch = state and best_epoch(state["history"], study.metric, study.mode, after=state["inherited"])
    found = find_checkpoint(folders, epoch) if epoch else None
    if found is None:
        made = any(folder.is_dir() for folder in folders)
        problem = "has no readable checkpoint of its best epoch"
        if made and not list_checkpoints(folders):
            problem = "has no checkpoints any more: `hpo clean` or run.disk_quota has removed them"
        fix = f"train it anew with `hpo train --trial {trial.number} --from-scratch`"
        raise StudyError(f"trial {trial.number} {problem}\n  fix: {fix}")
    return found[1]


def _best(opened: OpenStudy) -> FrozenTrial:
    best = best_trial(opened)
    if best is None:
        raise no_best(opened, own_trials(opened))
    return best


def _numbered(opened: OpenStudy, which: str) -> FrozenTrial:
    for trial in opened.study.get_trials(deepcopy=False):
        if str(trial.number) == which:
            return trial
    raise StudyError(f"the study {opened.spec.study.name} has no trial {which}\n  fix: see `hpo trials`")
