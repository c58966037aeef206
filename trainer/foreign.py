"""Translates event names and returned flags of other training systems into those of this package, for errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from trainer.events import EVENTS

#: Names of hooks in pytorch-template, OLMo-core, Cerebras Model Zoo, Megatron-Bridge, fastai v1, Keras, Lightning
#: and transformers that are no events here, each with the event that is meant.
FOREIGN: Final = MappingProxyType(
    {
        "on_train_begin": "on_fit_start",
        "on_train_start": "on_fit_start",
        "on_fit_begin": "on_fit_start",
        "on_train_end": "on_fit_end",
        "on_train_epoch_begin": "on_train_epoch_start",
        "on_epoch_begin": "on_train_epoch_start",
        "on_epoch_start": "on_train_epoch_start",
        "on_batch_begin": "on_train_batch_start",
        "on_batch_start": "on_train_batch_start",
        "on_train_batch_begin": "on_train_batch_start",
        "on_train_step_start": "on_train_batch_start",
        "on_batch_end": "on_train_batch_end",
        "on_train_step_end": "on_train_batch_end",
        "on_forward_begin": "on_before_forward",
        "on_forward_end": "on_after_forward",
        "on_loss_begin": "on_after_forward",
        "on_loss_end": "on_before_backward",
        "on_backward_begin": "on_before_backward",
        "on_backward_end": "on_after_backward",
        "on_step_begin": "on_before_optimizer_step",
        "on_pre_optimizer_step": "on_before_optimizer_step",
        "on_optimizer_step": "on_after_optimizer_step",
        "on_step_end": "on_after_optimizer_step",
        "on_before_optimizer_zero_grad": "on_before_zero_grad",
        "on_after_optimizer_zero_grad": "on_after_zero_grad",
        "on_val_begin": "on_validation_start",
        "on_val_start": "on_validation_start",
        "on_val_end": "on_validation_end",
        "on_eval_start": "on_validation_start",
        "on_eval_end": "on_validation_end",
        "on_evaluate": "on_validation_end",
        "on_validate_start": "on_validation_start",
        "on_validate_end": "on_validation_end",
        "on_val_batch_start": "on_validation_batch_start",
        "on_val_batch_end": "on_validation_batch_end",
        "on_eval_step_start": "on_validation_batch_start",
        "on_eval_step_end": "on_validation_batch_end",
        "on_validate_batch_start": "on_validation_batch_start",
        "on_validate_batch_end": "on_validation_batch_end",
        "on_test_begin": "on_test_start",
        "on_test_step_start": "on_test_batch_start",
        "on_test_step_end": "on_test_batch_end",
        "on_save": "on_after_save_checkpoint",
        "on_checkpoint_save": "on_after_save_checkpoint",
        "on_checkpoint_load": "on_load_checkpoint",
        "on_save_trainer_state": "on_save_checkpoint",
        "on_load_trainer_state": "on_load_checkpoint",
        "on_log": "on_log_metrics",
        "on_error": "on_exception",
        "on_fit_exception": "on_exception",
        "on_train_exception": "on_exception",
        "on_validate_exception": "on_exception",
        "on_data_init_start": "setup",
        "post_attach": "setup",
        "pre_train": "on_fit_start",
        "pre_epoch": "on_train_epoch_start",
        "pre_load_batch": "on_train_batch_start",
        "pre_step": "on_train_batch_start",
        "pre_optim_step": "on_before_optimizer_step",
        "post_train_batch": "on_train_batch_end",
        "post_step": "on_train_batch_end",
        "post_epoch": "on_epoch_end",
        "post_train": "on_fit_end",
        "pre_log_metrics": "on_before_log_metrics",
        "post_checkpoint_saved": "on_after_save_checkpoint",
        "post_checkpoint_loaded": "on_load_checkpoint",
    }
)

#: Flags that fastai's handlers return, and similar ones, with the code to write instead.
_FLAGS: Final = MappingProxyType(
    {
        "skip_bwd": 'state.skip("backward")',
        "skip_backward": 'state.skip("backward")',
        "skip_step": 'state.skip("optimizer_step")',
        "skip_zero": 'state.skip("zero_grad")',
        "skip_validate": 'state.skip("validation")',
        "stop_epoch": "state.stop_epoch()",
        "stop_training": 'state.stop("reason")',
        "stop": 'state.stop("reason")',
        "should_stop": 'state.stop("reason")',
        "last_input": "state.batch = …",
        "last_target": "state.batch = …",
        "last_output": "state.outputs = …",
        "last_loss": "state.loss = …",
    }
)


def is_hook_name(name: str) -> bool:
    """Whether a method of this name must be meant as a hook: ``on_…``, or a hook of another system."""
    return name.startswith("on_") or name in FOREIGN


def nearest(name: str) -> str:
    """The end of an error text that refuses ``name``: the event that is meant."""
    if name in FOREIGN:
        return f"; what happens there is {FOREIGN[name]!r} here"
    close = difflib.get_close_matches(name, EVENTS, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; the events are {', '.join(EVENTS)}"


def refuse_flags(hook: Callable[..., Any], returned: Any) -> None:
    """Refuse a hook's return value that must be meant as a request: True, or a mapping of flags.

    Any other value is ignored: a registered function may happen to return something.

    Raises:
        TypeError: The value is meant as a request; the text says how to make one.
    """
    if returned is True:
        words = [_FLAGS["stop"]]
    elif isinstance(returned, Mapping) and returned:
        words = [_FLAGS.get(str(flag), f"state.metrics[{flag!r}] = …") for flag in returned]
    else:
        return
    raise TypeError(
        f"{getattr(hook, '__qualname__', hook)} returned {returned!r}, and what a hook returns is not read; write "
        + ", ".join(f"trainer.{word}" for word in dict.fromkeys(words))
    )
