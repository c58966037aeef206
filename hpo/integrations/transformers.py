"""A callback for the Trainer of Transformers: it reports, stops, saves and resumes a trial through its session."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError("needs Transformers: pip install 'hpo-service[transformers]'") from error

from hpo.errors import StudyError
from hpo.integrations.bridge import Bridge
from hpo.trial.script_trial import ScriptTrial, session_of
from hpo.trial.session import Session

#: Measured with each evaluation, and nothing of the model.
_SPEED: Final = ("_runtime", "_per_second", "_jit_compilation_time", "_model_preparation_time")
#: Pickled by Transformers, and not read to resume.
_LEFT_OUT: Final = frozenset({"training_args.bin"})
_MEASURES: Final = "let `compute_metrics` of the trainer return {!r}"
_EVALUATES: Final = "give the trainer an `eval_dataset`, and have it train up to an evaluation"


class HPOCallback(TrainerCallback):
    """Trains a trial by the Trainer of Transformers.

    Each evaluation while it trains is an epoch of the trial, numbered from 1, whether ``eval_strategy`` is
    ``"epoch"`` or ``"steps"``; an evaluation of several datasets is one. After it the trainer saves, and what it
    has saved becomes the trial's checkpoint; so it does for saves of the trainer's own and where the run is to
    stop, after the running step: the training resumes at that step::

        callback = HPOCallback(trial)
        trainer = Trainer(model, arguments, callbacks=[callback], …)
        trainer.train(resume_from_checkpoint=callback.load_checkpoint())

    Args:
        trial: What the function gets as `trial`.
    """

    def __init__(self, trial: Session | ScriptTrial) -> None:
        trial = session_of(trial)
        self._bridge = Bridge(trial, "trainer.train(resume_from_checkpoint={})")
        self._trial = trial
        self._measured: dict[str, float] = {}
        self._trains = self._leaves = False
        self._begun_at = self._reported_at = 0

    def load_checkpoint(self) -> str | None:
        """Where `train` is to resume: a folder in the trial's own; None at the beginning.

        Raises:
            StudyError: The trial has been trained already.
            Exception: What `Session.load_checkpoint` raises.
        """
        saved = self._bridge.load()
        if saved is None:
            return None
        self._reported_at = saved["reported_at"]
        return str(unpacked(saved, self._trial.folder / f"resume-{saved['step']}"))

    # ---- of Transformers

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Check what the trainer is to do.

        Raises:
            StudyError: It trains twice, on another device, to a shared folder, without evaluations, or would not
                resume.
        """
        self._bridge.begin()
        on_cpu = "`TrainingArguments(use_cpu=trial.device.type == 'cpu')`"
        self._bridge.check_device(args.device, max(args.n_gpu, args.world_size), on_cpu)
        self._bridge.check_folder(args.output_dir or ".", "`TrainingArguments(output_dir=trial.folder)`")
        _check_strategies(args)
        self._trains, self._begun_at = True, state.global_step
        if not self._trial.max_epochs:
            self._trial.max_epochs = _evaluations(args, state)

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Show life."""
        self._trial.show_life()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Show life."""
        self._trial.show_life()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Look whether the trial is to end; the trainer then saves, or evaluates first where that is due."""
        if _is_last(state, control) or _evaluates_next(args, state, control):
            self._trial.show_life()
        elif self._trial.should_stop:
            self._leaves = control.should_save = True

    def on_evaluate(
        self,
        _args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any],
        **_: Any,
    ) -> None:
        """Keep what was measured; it is reported when the trainer has saved."""
        if not self._trains or state.global_step == self._begun_at or _is_beyond(state):
            return
        self._measured |= {
            name: value
            for name, value in metrics.items()
            if name == self._trial.metric or not (name == "epoch" or name.endswith(_SPEED))
        }
        control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Report what was measured, and save what the trainer has saved.

        Raises:
            TrainingStoppedError: The trial is to end.
        """
        measured, self._measured = self._measured, {}
        if _is_beyond(state) or (not measured and _evaluates_next(args, state, control)):
            return  # a training that resumed before an epoch's evaluation would skip that evaluation
        if measured:
            self._bridge.report(measured, _MEASURES.format(self._trial.metric))
            self._reported_at = state.global_step
        folder = Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        saved = {"files": _files(folder), "step": state.global_step, "reported_at": self._reported_at}
        self._trial.write_checkpoint(saved, batch=state.global_step - self._reported_at)
        if args.save_strategy == "no":
            shutil.rmtree(folder)
        if self._leaves:
            self._bridge.leave()
        if measured and not _is_last(state, control) and self._trial.should_stop:
            control.should_training_stop = True

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Refuse a training without an evaluation.

        Raises:
            StudyError: It was one.
        """
        self._trains = False
        self._bridge.check_reported(_EVALUATES)


def unpacked(saved: Mapping[str, Any], folder: Path) -> Path:
    """Write the files of a checkpoint as Transformers had saved them.

    Args:
        saved: What a trial has saved: ``torch.load(path, weights_only=True)["saved"]`` of its checkpoint.
        folder: The folder to write to; made if it is missing.

    Returns:
        The folder, which ``from_pretrained`` can read.
    """
    for name, content in saved["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.cpu().numpy().tobytes())
    return folder


def _files(folder: Path) -> dict[str, Tensor]:
    """The files of a folder by relative path, as tensors of bytes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in _LEFT_OUT)
    return {path.relative_to(folder).as_posix(): _content(path) for path in paths}


def _content(path: Path) -> Tensor:
    content = bytearray(path.read_bytes())
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _check_strategies(args: TrainingArguments) -> None:
    if args.eval_strategy == "no":
        raise StudyError(
            'the trainer never evaluates: `eval_strategy` is "no"\n'
            '  fix: `TrainingArguments(eval_strategy="epoch")`, or "steps" with `eval_steps`'
        )
    if args.save_only_model or args.save_strategy == "best":
        written = "`save_only_model`" if args.save_only_model else '`save_strategy="best"`'
        raise StudyError(
            f"the trainer saves too little to resume: {written}\n"
            '  fix: write `save_strategy="no"` in its place: the callback saves after each evaluation'
        )


def _is_last(state: TrainerState, control: TrainerControl) -> bool:
    """Whether the training ends with this step."""
    return bool(control.should_training_stop or state.global_step >= state.max_steps)


def _is_beyond(state: TrainerState) -> bool:
    """Whether this is the extra step that the trainer takes when it resumes at the end of ``max_steps``."""
    return bool(state.global_step > state.max_steps)


def _evaluates_next(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> bool:
    """Whether an epoch of the training ends with this step and its evaluation follows."""
    epoch = float(state.epoch or 0)
    ends = epoch.is_integer() or control.should_epoch_stop or _is_last(state, control)
    return bool(args.eval_strategy == "epoch" and ends and args.eval_delay <= epoch)


def _evaluations(args: TrainingArguments, state: TrainerState) -> int:
    """How many epochs (evaluations) the trial has at the end of the training."""
    if args.eval_strategy == "steps":
        return int(-(-state.max_steps // (state.eval_steps or 1)))
    return int(state.num_train_epochs)
