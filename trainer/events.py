"""The events of a run, in firing order.

Every hook takes the trainer as its first argument; what a hook may read or change is in ``trainer.state``. By the
order of this table, the runner checks that metrics are written before they are read.
"""

from types import MappingProxyType
from typing import Final

EVENTS: Final = MappingProxyType(
    {
        "setup": "Once per fit, validate or test, before anything else; model and optimizer are built.",
        "on_before_load_checkpoint": "Before a checkpoint is applied; takes (trainer, checkpoint), may change it.",
        "on_load_checkpoint": "After a checkpoint was applied; takes (trainer, checkpoint).",
        "on_fit_start": "Before the first epoch of this fit; a resumed state is already loaded.",
        "on_train_epoch_start": "Before the first batch of an epoch; not again when an epoch is resumed inside.",
        "on_train_batch_start": "`state.batch` is on the device and may be replaced.",
        "on_before_zero_grad": "Before gradients are cleared.",
        "on_after_zero_grad": "Gradients are None.",
        "on_before_forward": "Before the step is computed.",
        "on_after_forward": "`state.outputs` and `state.loss` are set, not recorded yet, and may be replaced.",
        "on_before_backward": "`state.loss` may be replaced; what was recorded stays as it was.",
        "on_after_backward": "Gradients are set; those of a loss scaled for fp16 are still scaled.",
        "on_before_optimizer_step": "Gradients are unscaled; the place to measure or clip them.",
        "on_after_optimizer_step": "Weights are updated; `state.step` is the one before. Not if fp16 overflowed.",
        "on_before_scheduler_step": "Before the scheduler, per step or per epoch as it was built.",
        "on_after_scheduler_step": "The learning rate of the next step or epoch is set.",
        "on_train_batch_end": "`state.step` and `state.batch_index` count this batch; its skips end here.",
        "on_log_steps": (
            "With StepMetrics, every so many steps and at the epoch's end; takes (trainer, records), of the steps "
            "since the last time: hooks below priority 79 may add to them, loggers show them."
        ),
        "on_train_epoch_end": "All batches are done; metrics still lie on the device; validation may be skipped.",
        "on_validation_start": "The model is in eval mode, gradients are off; `state.evaluating` says which data.",
        "on_validation_batch_start": "`state.batch` is the batch to evaluate; it may be replaced.",
        "on_before_validation_forward": "Before the step is computed for a validation batch.",
        "on_after_validation_forward": "As on_after_forward: not recorded yet, and may be replaced.",
        "on_validation_batch_end": "`state.outputs` and `state.loss` are set and recorded.",
        "on_validation_end": "All validation batches are done; `state.evaluated` holds the numbers.",
        "on_epoch_end": "`state.metrics` holds this epoch's numbers and may be added to; `state.epoch` counts it.",
        "on_before_log_metrics": (
            "Inside on_epoch_end, at priority 80; takes (trainer, metrics), the last place to add to or drop from "
            "what is logged and kept in the history."
        ),
        "on_log_metrics": "Right after; takes (trainer, metrics): loggers write the epoch's one record.",
        "on_save_checkpoint": "A checkpoint is being made; takes (trainer, checkpoint), may add to it.",
        "on_after_save_checkpoint": "A checkpoint is on disk; takes (trainer, path).",
        "on_test_start": "As on_validation_start, for the test set.",
        "on_test_batch_start": "As on_validation_batch_start.",
        "on_before_test_forward": "As on_before_validation_forward.",
        "on_after_test_forward": "As on_after_validation_forward.",
        "on_test_batch_end": "As on_validation_batch_end.",
        "on_test_end": "All test batches are done; `state.evaluated` holds the numbers.",
        "on_predict_start": "As on_validation_start, for `Trainer.predict`.",
        "on_predict_batch_start": "`state.batch` is the batch to predict for; it may be replaced.",
        "on_predict_batch_end": "`state.outputs` is what is predicted; it may be replaced.",
        "on_predict_end": "All batches are done.",
        "on_exception": "Training raised; takes (trainer, error). The error propagates then, type unchanged.",
        "on_fit_end": "Always, after the last epoch or an exception; `state.stop_reason` says why.",
        "teardown": "Always and last; each callback's failure is kept from the others.",
    }
)

EVENT_ORDER: Final = MappingProxyType({name: index for index, name in enumerate(EVENTS)})

#: The priority within ``on_epoch_end`` at which the log events fire.
LOG_PRIORITY: Final = 80
#: The events that fire inside ``on_epoch_end``, at ``LOG_PRIORITY``.
LOG_EVENTS: Final = ("on_before_log_metrics", "on_log_metrics")
