"""Every attribute that hpo stores on a study or a trial: its key, and what its value means.

Attributes that other tools may want to read are user attributes of Optuna's; those that only hpo reads are system
attributes. `hpo dashboard` shows the user attributes in words (`hpo.dashboard.shown`). A test makes sure that no
other module spells out such a key.
"""

from typing import Final

#: Begins every key of hpo's own.
PREFIX: Final = "hpo:"

# ---- of a study: user attributes
#: How many trials a study may claim; its budget.
BUDGET_ATTR: Final = "hpo:n_trials"
#: How many epochs all its trials may train together; its other budget.
EPOCHS_ATTR: Final = "hpo:n_epochs"
#: How many grants its scheduler has given.
GRANTED_ATTR: Final = "hpo:granted"
#: How many times failed trials have been made to wait again: a grant that was decided before the last is refused.
RETRIES_ATTR: Final = "hpo:retries"
#: What its scheduler has stored for its later decisions.
SCHEDULER_ATTR: Final = "hpo:scheduler"
#: Epochs of a trial that trains to its end, if they are the same for all trials.
MAX_EPOCHS_ATTR: Final = "hpo:max_epochs"
#: The study file that it was started with, as one mapping.
CONFIG_ATTR: Final = "hpo:config"
#: Hash of what that file says about the search.
HASH_ATTR: Final = "hpo:config_hash"
#: Each widening of its search space, as a mapping: the trials before it, the changes, the new hash.
WIDENED_ATTR: Final = "hpo:widened"
#: The versions of its code, by hash, the latest last.
CODE_ATTR: Final = "hpo:code"

# ---- of a study: system attributes
#: All its initial trials have been added, or it has none.
BEGUN_ATTR: Final = "hpo:begun"
#: The process that adds its initial trials.
INITIAL_TRIALS_ATTR: Final = "hpo:initial_trials"
#: The latest request that its agents leave (`hpo stop`): a text that differs from all earlier ones.
STOP_ATTR: Final = "hpo:stop"
#: Begins the key, with the submission's id after it, of a submitted driver's deadline in seconds since 1970.
DEADLINE_ATTR: Final = "hpo:deadline:"

# ---- of a trial: user attributes
#: How it ended, if Optuna's state does not say so: an `Outcome`.
OUTCOME_ATTR: Final = "hpo:outcome"
#: Why it failed, in a line.
REASON_ATTR: Final = "hpo:reason"
#: Where in the code it failed.
TRACEBACK_ATTR: Final = "hpo:traceback"
#: The worker that a failed trial ran on.
WORKER_ATTR: Final = "hpo:worker"
#: Its best epoch: metrics, checkpoint, and whether it is within the bounds.
BEST_ATTR: Final = "hpo:best"
#: Its predicted final loss, and the actual one.
PREDICTION_ATTR: Final = "hpo:prediction"
#: The epoch at whose end the pruner decided to stop it.
PRUNED_ATTR: Final = "hpo:pruned_at"
#: Epochs that a paused trial has finished; kept when the study's end prunes the trial.
PAUSED_ATTR: Final = "hpo:paused"
#: The epoch at whose end the scheduler decided to pause it, stored before the trial pauses.
PAUSE_AT_ATTR: Final = "hpo:pause_at"
#: Its scheduler's grants, the latest last: up to which epoch, and why; see `hpo.storage.grants`.
GRANTS_ATTR: Final = "hpo:grants"
#: For a fork of another trial, where it began; see `hpo.storage.lineage`.
FORK_ATTR: Final = "hpo:fork"
#: What its run used beside its config: seed, threads and the like.
RUN_ATTR: Final = "hpo:run"
#: The earlier trial with the same parameters whose value it took over.
SAME_AS_ATTR: Final = "hpo:same_as"
#: How long its attempts took: how many there were, the epochs they trained, and the seconds in and around these.
TIMING_ATTR: Final = "hpo:timing"
#: The last attempt that trained it again from its first epoch, for lack of a checkpoint.
STARTED_AGAIN_ATTR: Final = "hpo:started_again"
#: The number of parts in which each of its batches was computed, after it ran out of memory.
PARTS_ATTR: Final = "hpo:micro_batches"
#: The last attempt before a person requeued it (`hpo.study.retry`): deaths up to then don't count.
RETRIED_ATTR: Final = "hpo:retried_after"
#: It has the parameter values of the study file itself.
BASELINE_ATTR: Final = "hpo:baseline"

# ---- of a trial: system attributes
#: It was trained elsewhere, and does not count against the budget.
IMPORTED_ATTR: Final = "hpo:imported"
#: The study and trial that it was imported from.
ORIGIN_ATTR: Final = "hpo:imported_from"
#: The pruner's first decision against it; see `hpo.search.predicted_loss.audit.Condemned`.
CONDEMNED_ATTR: Final = "hpo:condemned"
#: For each bound, whether a later epoch came nearer to it than the first one; missing after a single epoch.
NEARER_ATTR: Final = "hpo:nearer_to_bounds"
#: Begins the keys under which Optuna stores how far a trial violates a bound.
CONSTRAINT_ATTR: Final = "constraints:"
