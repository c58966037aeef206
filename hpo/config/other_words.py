"""Translates words of other tools (W&B sweeps, Ray Tune, Optuna, Lightning, transformers) for fixes in errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hpo.config.paths import Keys, show

_KEYS: Final = {
    "min": "low",
    "max": "high",
    "lower": "low",
    "upper": "high",
    "values": "choices",
    "categories": "choices",
    "options": "choices",
    "distribution": "type",
    "q": "step",
}
#: The type, and whether it is searched on a log scale. ``log_uniform`` is left out: its ends are exponents in W&B
#: but not in Ray.
_TYPES: Final = {
    "uniform": ("float", False),
    "double": ("float", False),
    "real": ("float", False),
    "quniform": ("float", False),
    "loguniform": ("float", True),
    "qloguniform": ("float", True),
    "log_uniform_values": ("float", True),
    "randint": ("int", False),
    "int_uniform": ("int", False),
    "lograndint": ("int", True),
    "choice": ("categorical", False),
}

#: Arguments of other trainers, and their places in a study file.
_OF_TRAINERS: Final = {
    "num_train_epochs": "trainer.max_epochs",
    "check_val_every_n_epoch": "trainer.validate_every",
    "val_check_interval": "trainer.validate_every",
    "accelerator": "trainer.device",
    "amp": "trainer.precision",
    "fp16": "trainer.precision",
    "bf16": "trainer.precision",
    "mixed_precision": "trainer.precision",
    "train_batch_size": "loader.batch_size",
    "per_device_train_batch_size": "loader.batch_size",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "lr_scheduler.warmup",
    "gradient_clip_val": "callbacks.gradient_clipping.max_norm",
    "max_grad_norm": "callbacks.gradient_clipping.max_norm",
    "accumulate_grad_batches": "callbacks.gradient_accumulation.batches",
    "gradient_accumulation_steps": "callbacks.gradient_accumulation.batches",
    "num_sanity_val_steps": "callbacks.sanity_validation.batches",
    "early_stopping": "callbacks.early_stopping",
    "patience": "callbacks.early_stopping.patience",
    "enable_checkpointing": "callbacks.checkpoint",
    "enable_progress_bar": "callbacks.progress_bar",
}

#: Arguments of Optuna's ``create_study`` and ``optimize``, and their places in a study file.
_OF_OPTUNA: Final = {
    "study_name": "study.name",
    "directions": "study.objectives",
    "n_jobs": "run.workers",
}

#: Arguments of Optuna's ``create_study`` and ``optimize`` that a study file does not need, and why.
_NOT_NEEDED: Final = {
    "catch": "a trial whose code raises ends as `error`, and the study continues",
    "load_if_exists": "the same command starts a study, and resumes it",
    "show_progress_bar": "a run shows its progress unless `--quiet` is given",
    "gc_after_trial": "each trial has a process of its own",
}

#: Other tools' values of ``trainer.precision``: Lightning's mixed precisions, and the names of types.
_PRECISIONS: Final = {
    "16": "fp16",
    "16-mixed": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "bf16-mixed": "bf16",
    "bfloat16": "bf16",
    "32": "fp32",
    "32-true": "fp32",
    "float32": "fp32",
    "no": "fp32",
}


def precision_here(value: Any) -> Any:
    """A study file's word for another tool's precision; any other value is returned as it is."""
    return _PRECISIONS.get(str(value).removeprefix("torch."), value)


def place_here(keys: Keys) -> str:
    """The place of a key of `trainer` or `study` that has another tool's name; empty for other keys."""
    words = {"trainer": _OF_TRAINERS, "study": _OF_OPTUNA}
    return words.get(str(keys[0]), {}).get(str(keys[1]), "") if len(keys) == 2 else ""


def fix_here(keys: Keys) -> str:
    """The fix for another tool's key: its place in a study file, or why it is not needed; empty for other keys."""
    if place := place_here(keys):
        return f"that is `{place}` here"
    needless = _NOT_NEEDED.get(str(keys[-1])) if keys[:-1] in ((), ("study",)) else None
    return f"leave it out: {needless}" if needless else ""


def translated(entry: Mapping[str, Any]) -> str:
    """Another tool's search-space entry on one line in a study file's words; empty if it can't be translated."""
    ours = {_KEYS.get(key, key): value for key, value in entry.items()}
    named = str(ours.get("type"))
    kind, is_log = _TYPES.get(named, (named if "type" in ours else _kind_of(ours), False))
    if len(ours) < len(entry) or (ours.keys() == entry.keys() and named not in _TYPES):
        return ""
    ours["type"] = kind
    if is_log:
        ours.setdefault("log", True)
    wanted = {"choices"} if kind == "categorical" else {"low", "high"}
    if kind not in ("float", "int", "categorical") or not wanted <= ours.keys():
        return ""
    keys = ["type", *(key for key in ours if key != "type")]
    return f"{{{', '.join(f'{key}: {show(ours[key])}' for key in keys)}}}"


def _kind_of(entry: Mapping[str, Any]) -> str:
    if "choices" in entry:
        return "categorical"
    ends = [entry.get("low"), entry.get("high")]
    return "int" if all(isinstance(end, int) and not isinstance(end, bool) for end in ends) else "float"
