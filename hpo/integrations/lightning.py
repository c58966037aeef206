"""A callback for Lightning's Trainer: it reports, stops, saves and resumes a trial through its session."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder
    from lightning.pytorch.plugins.io import CheckpointIO
except ImportError as error:
    raise ImportError(
        "hpo.integrations.lightning needs Lightning: pip install 'hpo-service[lightning]'"
    ) from error

from hpo.errors import StudyError
from hpo.integrations.bridge import Bridge
from hpo.trial.script_trial import ScriptTrial, session_of
from hpo.trial.session import Session
from trainer.data.random_state import set_rng_state

#: Parts of Lightning's checkpoint that may contain any object and are not needed to resume: the trial itself has
#: its parameters.
_NOT_STATE: Final = ("hyper_parameters", "hparams_name", "hparams_type")
_LOGS: Final = "call `self.log({!r}, …)` in the module's `validation_step`"
_VALIDATES: Final = "give `fit` validation data, and let `max_epochs` or `max_steps` reach a validation"


class HPOCallback(EarlyStopping):
    """Trains a trial by Lightning's Trainer.

    Each validation is an epoch of the trial, numbered from 1, with all that `trainer.callback_metrics` holds then;
    without validation data each training epoch is one. The sanity check before training is none. After it the
    state of the training is saved. A pruned or paused trial ends with its epoch, as by early stopping; where the
    run is to stop the training ends after the running batch, and resumes after the last reported epoch::

        callback = HPOCallback(trial)
        trainer = Trainer(callbacks=[callback], default_root_dir=trial.folder / "lightning", …)
        trainer.fit(model, data, ckpt_path=callback.load_checkpoint())

    It is an `EarlyStopping` because Lightning calls these, and checkpoints, after the module's own
    ``on_train_epoch_end``, and takes no default of its own away for them.

    Args:
        trial: What the function gets as `trial`.
    """

    def __init__(self, trial: Session | ScriptTrial) -> None:
        trial = session_of(trial)
        super().__init__(monitor=trial.metric, mode=trial.mode, strict=False)
        self._bridge = Bridge(trial, "trainer.fit(…, ckpt_path={})")
        self._trial = trial
        self._due = False
        self._plateaus: dict[int, float] = {}
        self._resumed_at: int | None = None

    def load_checkpoint(self) -> str | None:
        """Where `fit` is to resume, for its ``ckpt_path``: a file in the trial's folder; None at the beginning.

        Raises:
            StudyError: The trial has been trained already.
            Exception: What `Session.load_checkpoint` raises.
        """
        saved = self._bridge.load()
        if saved is None:
            return None
        path = self._trial.folder / "resume.ckpt"
        torch.save(saved, path)
        return str(path)

    # ---- of Lightning

    def setup(self, trainer: Trainer, _module: LightningModule, stage: str) -> None:
        """Check what the trainer is to do, before it does anything.

        Raises:
            StudyError: It fits twice, on another device, to a shared folder, or would not resume.
        """
        if stage != "fit":
            return
        _check_no_search(trainer)
        self._bridge.begin()
        device = f"Trainer(accelerator={self._trial.device.type!r}, devices=1)"
        self._bridge.check_device(trainer.strategy.root_device, trainer.world_size, f"`{device}`")
        if trainer.loggers or trainer.checkpoint_callbacks:
            fix = "`Trainer(default_root_dir=trial.folder / 'lightning')`"
            self._bridge.check_folder(trainer.default_root_dir, fix)
        for each in trainer.checkpoint_callbacks:
            folder = str(getattr(each, "dirpath", None) or "")
            if folder and "://" not in folder:
                fix = f"leave `dirpath` of {type(each).__name__} out, or begin it with `trial.folder`"
                self._bridge.check_folder(folder, fix)
        # Last, so that all other callbacks have their state of the epoch's end when it is saved.
        trainer.callbacks = [*(each for each in trainer.callbacks if each is not self), self]

    def on_load_checkpoint(self, trainer: Trainer, _module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let Lightning's own checkpoints continue in this attempt's folder; else they forget their best one."""
        for each in trainer.checkpoint_callbacks:
            if each.state_key in checkpoint["callbacks"]:
                checkpoint["callbacks"][each.state_key]["dirpath"] = getattr(each, "dirpath", None)

    def on_fit_start(self, *_: Any) -> None:
        """Put the random generators to where they were saved: the first pass over the data begins after it."""
        if self._bridge.rng is not None:
            set_rng_state(self._bridge.rng)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Take the step of schedulers that watch a metric, which Lightning takes after the state is saved."""
        (self._trial.folder / "resume.ckpt").unlink(missing_ok=True)
        for index, value in self._plateaus.items():
            module.lr_scheduler_step(trainer.lr_scheduler_configs[index].scheduler, value)
        self._plateaus = {}
        self._resumed_at = None if self._bridge.rng is None else _batches(trainer)
        if not self._trial.max_epochs:
            self._trial.max_epochs = _validations(trainer)

    def on_train_batch_end(self, *_: Any) -> None:
        """Show life, and end the training where the trial is to end.

        Raises:
            TrainingStoppedError: It is.
        """
        if self._trial.should_stop:
            self._bridge.leave()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Show life."""
        self._trial.show_life()

    def on_validation_end(self, trainer: Trainer, _module: LightningModule) -> None:
        """Report a validation inside a training epoch; at its end, the training's metrics are awaited."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        if trainer.is_last_batch:
            self._due = True
        else:
            self._end(trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Report the validation at the end of a training epoch, or this epoch where nothing validates."""
        if _batches(trainer) == self._resumed_at:
            self._repeated(trainer)
        elif self._due or not trainer.enable_validation:
            self._due = False
            self._plateaus = _plateaus(trainer, module)
            self._end(trainer)
            self._plateaus = {}

    def on_train_end(self, *_: Any) -> None:
        """Refuse a training without a validation.

        Raises:
            StudyError: It was one.
        """
        self._bridge.check_reported(_VALIDATES)

    def state_dict(self) -> dict[str, Any]:
        """The steps of schedulers that follow on the epoch's end."""
        return {"plateaus": self._plateaus}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `state_dict`."""
        self._plateaus = state_dict["plateaus"]

    def _repeated(self, trainer: Trainer) -> None:
        """With ``max_steps``, Lightning ends the saved epoch again where it resumes: it is to count once."""
        assert self._bridge.rng is not None
        progress = trainer.fit_loop.epoch_progress
        for each in (progress.current, progress.total):
            each.processed = each.ready
        set_rng_state(self._bridge.rng)

    def _end(self, trainer: Trainer) -> None:
        """Report an epoch of the trial, save it, and stop where the trial is to end."""
        self._bridge.report(dict(trainer.callback_metrics), _LOGS.format(self._trial.metric))
        self._trial.write_checkpoint(_state_of(trainer))
        if not _has_ended(trainer) and self._trial.should_stop:
            trainer.should_stop = True


def _check_no_search(trainer: Trainer) -> None:
    if any(isinstance(each, LearningRateFinder) for each in trainer.callbacks):
        raise StudyError(
            "LearningRateFinder would set a training that resumes back to its beginning\n"
            "  fix: call `Tuner(other).lr_find(…)` before, with a Trainer without this callback"
        )


class _Kept(CheckpointIO):
    """Keeps a checkpoint in memory instead of writing it."""

    def __init__(self) -> None:
        self.checkpoint: dict[str, Any] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], *_: Any, **__: Any) -> None:
        self.checkpoint = checkpoint

    def load_checkpoint(self, *_: Any, **__: Any) -> dict[str, Any]:
        return self.checkpoint

    def remove_checkpoint(self, *_: Any) -> None:
        self.checkpoint = {}


def _state_of(trainer: Trainer) -> dict[str, Any]:
    """What Lightning would write into a checkpoint, without `_NOT_STATE`."""
    kept, own = _Kept(), trainer.strategy.checkpoint_io
    trainer.strategy.checkpoint_io = kept
    try:
        trainer.save_checkpoint(Path("kept"), weights_only=False)
    finally:
        trainer.strategy.checkpoint_io = own
    return {key: part for key, part in kept.checkpoint.items() if not key.endswith(_NOT_STATE)}


def _batches(trainer: Trainer) -> int:
    """Number of trained batches. (Steps are not counted: a module may step its optimizers without the Trainer.)"""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def _has_ended(trainer: Trainer) -> bool:
    """Whether the training ends here by itself."""
    passed = trainer.is_last_batch and 0 <= (trainer.max_epochs or 0) - 1 <= trainer.current_epoch
    return bool(trainer.should_stop or passed or 0 <= trainer.max_steps <= trainer.global_step)


def _plateaus(trainer: Trainer, module: LightningModule) -> dict[int, float]:
    """The values that Lightning will give to schedulers that watch a metric, by the scheduler's index."""
    if not module.automatic_optimization:
        return {}
    return {
        index: float(trainer.callback_metrics[each.monitor])
        for index, each in enumerate(trainer.lr_scheduler_configs)
        if each.reduce_on_plateau and each.interval == "epoch" and each.monitor in trainer.callback_metrics
        if (trainer.current_epoch + 1) % each.frequency == 0
    }


def _validations(trainer: Trainer) -> int:
    """Epochs of the trial to the end of the training; 0 where that is not known."""
    if not trainer.enable_validation:
        return max(trainer.max_epochs or 0, 0) if trainer.max_steps < 0 else 0
    every = trainer.check_val_every_n_epoch
    interval = getattr(trainer, "val_check_interval", None)  # there is none where it is a time
    at_the_end = isinstance(interval, float) and interval == 1.0  # 1 is each batch
    known = at_the_end and every and trainer.max_steps < 0
    return max(trainer.max_epochs or 0, 0) // (every or 1) if known else 0
