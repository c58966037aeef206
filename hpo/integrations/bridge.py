"""`Bridge`: what the callbacks for all libraries do with a trial's session: resume once, check, report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpo.errors import StudyError
from hpo.trial.session import Session, TrainingStoppedError
from trainer.data.random_state import kept_rng, rng_state


class Bridge:
    """One training of a trial by another library's trainer.

    Args:
        trial: The trial's session.
        training: The call that trains, for messages, such as ``trainer.fit(…, ckpt_path={})`` with a placeholder
            for the checkpoint.

    Attributes:
        trial: The trial's session.
        rng: The states of the random generators in the loaded checkpoint; None without one.
    """

    def __init__(self, trial: Session, training: str) -> None:
        self.trial = trial
        self.rng: dict[str, Any] | None = None
        self._training = training
        self._loaded = self._begun = False

    def load(self) -> Any | None:
        """What the session has saved; the random generators are not restored before training begins.

        So code that runs in between, such as a split of the data, draws the same numbers as in the first attempt.

        Raises:
            StudyError: The trial has been trained already.
            Exception: What `Session.load_checkpoint` raises.
        """
        if self._loaded or self.trial.history:
            raise StudyError(
                "one trial is one training, and this is another\n"
                f"  fix: call `{self._call}` once in the function, with one callback of its own"
            )
        self._loaded = True
        with kept_rng():
            saved = self.trial.load_checkpoint()
            if saved is not None:
                self.rng = rng_state()
        return saved

    @property
    def _call(self) -> str:
        return self._training.format("callback.load_checkpoint()")

    def begin(self) -> None:
        """Record that training begins.

        Raises:
            StudyError: It has begun before, or `load` was not called, so that it could not resume.
        """
        if not self._loaded:
            raise StudyError(
                "a trial whose worker is lost could not resume: the trainer does not know its checkpoint\n"
                f"  fix: write `{self._call}`"
            )
        if self._begun:
            raise StudyError(
                f"the callback trains one trial once\n  fix: call `{self._call}` once in the function"
            )
        self._begun = True

    def check_device(self, device: torch.device, processes: int, fix: str) -> None:
        """Refuse a device other than the trial's, and several devices.

        Args:
            device: The device on which the trainer trains.
            processes: How many devices or processes it trains on.
            fix: What to write instead.

        Raises:
            StudyError: It is not the trial's device alone.
        """
        own = self.trial.device
        if processes > 1:
            raise StudyError(f"it trains on {processes} devices, and a trial has one, {own}\n  fix: {fix}")
        if (device.type, device.index or 0) != (own.type, own.index or 0):
            raise StudyError(f"the trainer trains on {device}, and the trial's device is {own}\n  fix: {fix}")

    def check_folder(self, folder: Path | str, fix: str) -> None:
        """Refuse a folder that several trials would write to.

        Raises:
            StudyError: The folder is outside the trial's folder.
        """
        if not Path(folder).resolve().is_relative_to(self.trial.folder.resolve()):
            raise StudyError(f"the trainer writes to {folder}, as those of other trials do\n  fix: {fix}")

    def report(self, metrics: Mapping[str, Any], fix: str) -> None:
        """Report a validation as the trial's next epoch.

        Args:
            metrics: The metrics that it has measured.
            fix: How to make the study's metric one of them.

        Raises:
            StudyError: The study's metric is not among them.
            Exception: What `Session.take_report` raises.
        """
        metric = self.trial.metric
        if metric not in metrics:
            found = ", ".join(sorted(metrics)) or "nothing"
            raise StudyError(
                f"the validation has not measured {metric}, the study's metric, but {found}\n"
                f"  fix: name one of those in `study.metric`, or {fix}"
            )
        self.trial.take_report(self.trial.epoch + 1, metrics)

    def check_reported(self, fix: str) -> None:
        """Refuse a training that has ended without any validation.

        Raises:
            StudyError: There was no validation.
        """
        if not self.trial.history:
            raise StudyError(f"the training has ended without a validation: it has no value\n  fix: {fix}")

    def leave(self) -> None:
        """End the training immediately.

        Raises:
            TrainingStoppedError: Always; it ends the trial as its session says.
        """
        raise TrainingStoppedError(f"the trial is to end: {self.trial.stop_reason}")
