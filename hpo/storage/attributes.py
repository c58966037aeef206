"""Every attribute that hpo stores on a study or a trial: its key, who holds it, and what it means.

Keys are Optuna's user attributes where other tools may want to read them, and its system attributes where only hpo
does; `hpo dashboard` shows the user attributes in words (`hpo.dashboard.shown`).
A test refuses such a key anywhere else.
"""

from typing import Final

#: What every key begins with that is hpo's own.
PREFIX: Final = "hpo:"

# ---- of a study: user attributes
#: How many trials a study may claim; its budget.
BUDGET_ATTR: Final = "hpo:n_trials"
#: How many epochs all its trials may train together; its other budget.
EPOCHS_ATTR: Final = "hpo:n_epochs"
#: How many grants its scheduler has given.
GRANTED_ATTR: Final = "hpo:granted"
#: How many failed trials were told to wait again: what was decided before that is not granted.
RETRIES_ATTR: Final = "hpo:retries"
#: What its scheduler has stored for its later decisions.
SCHEDULER_ATTR: Final = "hpo:scheduler"
#: Epochs of a run to its end, where every trial has as many.
MAX_EPOCHS_ATTR: Final = "hpo:max_epochs"
#: The study file that it was started with, as one mapping.
CONFIG_ATTR: Final = "hpo:config"
#: Hash of what that file says about the search.
HASH_ATTR: Final = "hpo:config_hash"
#: How its search space was widened, a mapping each time: the trials before that, the changes, the new hash.
WIDENED_ATTR: Final = "hpo:widened"
#: The code that it has had, by hash, the latest last.
CODE_ATTR: Final = "hpo:code"

# ---- of a study: system attributes
#: Its initial trials are there: all of them, or it has none.
BEGUN_ATTR: Final = "hpo:begun"
#: The process that adds its initial trials.
INITIAL_TRIALS_ATTR: Final = "hpo:initial_trials"
#: The latest request that its agents leave: a text that differs from all before it (`hpo stop`).
STOP_ATTR: Final = "hpo:stop"
#: Begins the key of when a submitted driver's time is over, in seconds since 1970; the submission's id follows.
DEADLINE_ATTR: Final = "hpo:deadline:"

# ---- of a trial: user attributes
#: How it ended, where Optuna's state does not say: an `Outcome`.
OUTCOME_ATTR: Final = "hpo:outcome"
#: Why it failed, in a line.
REASON_ATTR: Final = "hpo:reason"
#: Where in the code it failed.
TRACEBACK_ATTR: Final = "hpo:traceback"
#: The worker that a failed trial ran on.
WORKER_ATTR: Final = "hpo:worker"
#: Its best epoch: metrics, checkpoint, and whether it is within the bounds.
BEST_ATTR: Final = "hpo:best"
#: Its predicted loss beside what it ended at.
PREDICTION_ATTR: Final = "hpo:prediction"
#: The epoch at whose end the pruner decided to stop it.
PRUNED_ATTR: Final = "hpo:pruned_at"
#: Epochs that a paused trial has finished; of a finished trial, those after which the study's end has pruned it.
PAUSED_ATTR: Final = "hpo:paused"
#: The epoch at whose end the scheduler decided to pause it, stored before that is acted on.
PAUSE_AT_ATTR: Final = "hpo:pause_at"
#: What its scheduler has granted it, the latest last: up to which epoch, and why; see `hpo.storage.grants`.
GRANTS_ATTR: Final = "hpo:grants"
#: Where it began, if it is a fork of another trial; see `hpo.storage.lineage`.
FORK_ATTR: Final = "hpo:fork"
#: Its seed, threads and the like: what its run had beside its config.
RUN_ATTR: Final = "hpo:run"
#: The earlier trial with the same parameters whose value it has.
SAME_AS_ATTR: Final = "hpo:same_as"
#: How long its attempts took: how many there were, the epochs they trained, and the seconds in and around these.
TIMING_ATTR: Final = "hpo:timing"
#: The last attempt that trained it again from its first epoch, without a checkpoint.
STARTED_AGAIN_ATTR: Final = "hpo:started_again"
#: In how many parts each of its batches was computed, after it ran out of memory.
PARTS_ATTR: Final = "hpo:micro_batches"
#: The last attempt before a person let it wait again (`hpo.study.retry`): deaths until then don't count.
RETRIED_ATTR: Final = "hpo:retried_after"
#: It has the study file's own values.
BASELINE_ATTR: Final = "hpo:baseline"

# ---- of a trial: system attributes
#: It comes from elsewhere, and does not count against the budget.
IMPORTED_ATTR: Final = "hpo:imported"
#: The study and trial that it was imported from.
ORIGIN_ATTR: Final = "hpo:imported_from"
#: The pruner's first decision against it; see `hpo.search.predicted_loss.audit.Condemned`.
CONDEMNED_ATTR: Final = "hpo:condemned"
#: Of each bound, whether an epoch came nearer to it than the first did; left out where there has been one epoch.
NEARER_ATTR: Final = "hpo:nearer_to_bounds"
#: Begins the key under which Optuna keeps how far a trial violates a bound.
CONSTRAINT_ATTR: Final = "constraints:"
