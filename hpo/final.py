"""Final training: on from a trial's best checkpoint, or anew with its parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from omegaconf import OmegaConf
from optuna.trial import FrozenTrial
from torch import nn

from hpo.build import NO_PROGRESS, Builder, Progress, RunPlace, make_scheduler
from hpo.config import StudySpec
from hpo.errors import StudyError
from hpo.folders import attempt_folders
from hpo.outcome import finite
from hpo.progress import best_trial
from hpo.study import OpenStudy, study_seed
from trainer import Trainer
from trainer.checkpoint import find_checkpoint, list_checkpoints, newest_checkpoint
from trainer.compute import needs_metric
from trainer.state import Mode, best_epoch

#: Entries of a parameter group that a scheduler moves; final training starts with them as configured.
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
    """What final training starts from.

    Attributes:
        name: For people: ``trial 7`` or ``base config``.
        trial: The trial's number; None for the base config.
        seed: Seed of the training.
        params: Parameters over the base config.
        checkpoint: The best epoch's checkpoint to go on from; None to start anew.
    """

    name: str
    trial: int | None
    seed: int
    params: Mapping[str, Any]
    checkpoint: dict[str, Any] | None

    @property
    def epoch(self) -> int:
        """Epochs that are trained already."""
        return 0 if self.checkpoint is None else int(self.checkpoint["state"]["epoch"])

    @property
    def progress(self) -> Progress:
        """Passes and steps that are trained already."""
        if self.checkpoint is None:
            return NO_PROGRESS
        state = self.checkpoint["state"]
        return Progress(int(state["data_epoch"]), int(state["step"]))


def start_of_base(spec: StudySpec) -> Start:
    """The study file as it is, without a trial."""
    return Start("base config", None, study_seed(spec), {}, None)


def start_of_trial(opened: OpenStudy, which: str, *, from_scratch: bool) -> Start:
    """A trial's parameters, and its best checkpoint unless ``from_scratch``.

    Args:
        opened: The study.
        which: ``best`` or a trial's number.
        from_scratch: Take the parameters only.

    Raises:
        StudyError: There is no such trial, its parameters are not of this search space, or it has no readable
            checkpoint.
    """
    trial = _find_trial(opened, which)
    # The storage is not trusted with import paths: only what the study file's own space allows is used.
    if not opened.space.contains(trial.params):
        raise StudyError(
            f"the parameters of trial {trial.number} do not lie in the search space of the study file"
        )
    checkpoint = None if from_scratch else _best_checkpoint(opened, trial.number)
    return Start(f"trial {trial.number}", trial.number, opened.trial_seed(trial.number), trial.params, checkpoint)


def train_final(builder: Builder, start: Start, *, epochs: int | None, device: torch.device) -> dict[str, Any]:
    """Train, keep the best epoch, and write ``final/`` in the output folder.

    Args:
        builder: Builds the trainer.
        start: What to start from.
        epochs: Passes over the data to train; None: as long as ``trainer`` says.
        device: Where to train.

    Returns:
        What ``final/metrics.json`` holds: study, trial, the value of the study's metric, epochs in all, the best
        of them, the metrics of its weights on validation and test data, and the path of those weights.

    Raises:
        StudyError: The training diverged from its first epoch.
    """
    spec = builder.spec
    # Resolved for these epochs, so that a schedule written as ${trainer.max_epochs} spans them.
    length = {} if epochs is None else {"trainer.max_epochs": epochs, "trainer.max_steps": None}
    config = spec.resolve({**start.params, **length})
    folder = spec.output_dir / "final"
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder / "checkpoints")
    place = RunPlace(folder, "final", start.params)
    data = builder.data(config)
    trainer = builder.trainer(config, place, seed=start.seed, device=device, after=start.progress)
    if start.checkpoint is not None:
        _go_on(trainer, start.checkpoint)
    for line in learning_rate_plan(builder, config, trainer):
        print(line, flush=True)
    trainer.fit(data["train"], data["val"])
    return _finish(builder, trainer, start, config, place, data)


def learning_rate_plan(builder: Builder, config: Mapping[str, Any], trainer: Trainer) -> Sequence[str]:
    """Lines that say how the learning rate will go, found by running the schedule on a stand-in."""
    group = trainer.optimizer.param_groups[0]
    start = float(group.get("initial_lr", group["lr"]))
    if config["scheduler"] is None:
        return [f"learning rate: {start:.4g}, constant"]
    node = config["scheduler"]
    name = str(node["_target_"]).rpartition(".")[2]
    epochs = config["trainer"]["max_epochs"]
    by_pass = epochs is not None and config["trainer"]["validate_every"] is None
    if node["interval"] == "step" or not by_pass:
        return [f"learning rate: from {start:.4g}, {name} at each {node['interval']}"]
    # Any optimizer will do, as long as it has a momentum for the schedules that move one.
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=start, momentum=0.9)
    scheduler = make_scheduler(builder.resolver, node, optimizer)
    if needs_metric(scheduler):
        return [f"learning rate: from {start:.4g}, lower when {builder.spec.study.metric} stalls"]
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    shown = sorted({0, epochs // 4, epochs // 2, 3 * epochs // 4, epochs - 1})
    steps = ", ".join(f"{rates[index]:.3g} (epoch {index + 1})" for index in shown)
    return [f"learning rate over {epochs} epochs, {name}: {steps}"]


def _go_on(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Weights, optimizer state and history of the checkpoint; learning rate and schedule as freshly built."""
    fresh = [dict(group) for group in trainer.optimizer.param_groups]
    trainer.model.load_state_dict(checkpoint["model"])
    trainer.optimizer.load_state_dict(checkpoint["optimizer"])
    for group, built in zip(trainer.optimizer.param_groups, fresh, strict=True):
        for key in _SCHEDULED:
            if key in built:
                group[key] = built[key]
    trainer.state.load_state_dict({**checkpoint["state"], "stop_reason": None})


def _finish(
    builder: Builder,
    trainer: Trainer,
    start: Start,
    config: Mapping[str, Any],
    place: RunPlace,
    data: Mapping[str, Any],
) -> dict[str, Any]:
    spec, history = builder.spec, trainer.state.history
    epoch = best_epoch(history, spec.study.metric, builder.mode)
    if epoch is None:
        raise StudyError(f"final training diverged: no epoch has a finite {spec.study.metric}")
    if start.checkpoint is not None and epoch <= start.epoch:
        best: dict[str, Any] = start.checkpoint
    else:
        found = find_checkpoint([place.checkpoints], epoch, trainer.device)
        if found is None:
            raise StudyError(f"the checkpoint of epoch {epoch} in {place.checkpoints} can't be read")
        best = found[1]
    trainer.model.load_state_dict(best["model"])
    trainer.optimizer.load_state_dict(best["optimizer"])
    metrics = trainer.validate(data["val"])
    if "test" in data:
        metrics |= trainer.test(data["test"])
    weights = place.folder / "model.pt"
    _save_weights(trainer.model, weights)
    OmegaConf.save(OmegaConf.create({**config, "seed": start.seed}), place.folder / "config.yaml")
    result = {
        "study": spec.study.name,
        "trial": start.trial,
        "value": history[epoch - 1][spec.study.metric],
        "epochs": trainer.state.epoch,
        "best_epoch": epoch,
        "stopped": trainer.state.stop_reason,
        "metrics": metrics,
        "model": str(weights),
    }
    (place.folder / "metrics.json").write_text(json.dumps(finite(result), indent=2) + "\n")
    return result


def _save_weights(model: nn.Module, path: Any) -> None:
    aside = path.with_suffix(".part")
    torch.save({name: tensor.cpu() for name, tensor in model.state_dict().items()}, aside)
    aside.replace(path)


def _clear(checkpoints: Any) -> None:
    """An earlier final training's checkpoints are of another run."""
    for file in list_checkpoints([checkpoints]):
        file.path.unlink()


def _find_trial(opened: OpenStudy, which: str) -> FrozenTrial:
    if which == "best":
        best = best_trial(opened)
        if best is None:
            raise StudyError(f"the study {opened.spec.study.name} has no complete trial yet")
        return best
    for trial in opened.study.get_trials(deepcopy=False):
        if str(trial.number) == which:
            return trial
    raise StudyError(f"the study {opened.spec.study.name} has no trial {which}\n  fix: see `hpo trials`")


def _best_checkpoint(opened: OpenStudy, number: int) -> dict[str, Any]:
    """The checkpoint of the trial's best epoch, by the history of its newest."""
    folders = [folder / "checkpoints" for folder in attempt_folders(opened.spec, number)]
    newest = newest_checkpoint(folders)
    mode: Mode = "min" if opened.spec.study.direction == "minimize" else "max"
    epoch = newest and best_epoch(newest[1]["state"]["history"], opened.spec.study.metric, mode)
    found = find_checkpoint(folders, epoch) if epoch else None
    if found is None:
        made = any(folder.is_dir() for folder in folders)
        problem = "has no readable checkpoint of its best epoch"
        if made and not list_checkpoints(folders):
            problem = "has no checkpoints any more: `hpo clean` or study.disk_quota has removed them"
        raise StudyError(f"trial {number} {problem}\n  fix: train it anew with `--from-scratch`")
    return found[1]
