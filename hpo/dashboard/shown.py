"""Makes optuna-dashboard show readable attributes of our studies, on pages that fit a phone."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.dashboard.whole import whole_answer
from hpo.storage.attributes import (
    BASELINE_ATTR,
    BEST_ATTR,
    CONFIG_ATTR,
    OUTCOME_ATTR,
    PAUSED_ATTR,
    PREFIX,
    REASON_ATTR,
    SAME_AS_ATTR,
    STARTED_AGAIN_ATTR,
    WORKER_ATTR,
)
from hpo.storage.lineage import forked_from
from hpo.storage.optuna_private import TRIALS, CachedStorage, id_of_trial
from hpo.storage.outlines import outlined_trials
from hpo.study.internals import UNASKED, unasked_metrics
from hpo.study.ranking import is_feasible, is_ranked

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from hpo.storage.study_storage import StudyStorage

#: Our attributes that are shown, with the names that they have there.
_SHOWN: Final = {
    OUTCOME_ATTR: "outcome",
    REASON_ATTR: "reason",
    WORKER_ATTR: "worker",
    SAME_AS_ATTR: "same as trial",
    STARTED_AGAIN_ATTR: "started again in attempt",
    BASELINE_ATTR: "values of the study file",
    PAUSED_ATTR: "paused after epoch",
}
_DIGITS: Final = 6
#: The key of earlier versions of Optuna from which optuna-dashboard reads whether a trial is outside the bounds.
_VIOLATIONS: Final = "constraints"


class ShownStorage(CachedStorage):
    """A study's storage as the dashboard reads it: with metrics in place of hpo's internal attributes.

    A trial's attributes are the metrics of its best epoch that the study asks for, its outcome if Optuna's state
    does not tell it, where it paused or was forked, and all attributes that others have stored. A study's
    attributes don't have those of hpo: the note has the study file. Stored data does not change, and writes of the
    dashboard are stored as they are.

    Args:
        storage: The storage to read and write.
    """

    def __init__(self, storage: StudyStorage) -> None:
        super().__init__(storage)
        self._stored = storage
        self._unasked: dict[int, frozenset[str]] = {}

    def get_all_studies(self) -> list[Any]:
        """All studies; see `optuna.storages.BaseStorage`."""
        studies = self._stored.get_all_studies()
        for study in studies:  # a fresh copy for this caller
            study.user_attrs = _others(study.user_attrs)
        return studies

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """A trial; see `optuna.storages.BaseStorage`."""
        with self._stored.single_statements() as conn:
            study_id = conn.execute(sa.select(TRIALS.c.study_id).where(TRIALS.c.trial_id == trial_id)).scalar()
        trial = self._stored.get_trial(trial_id)
        return shown(trial, UNASKED if study_id is None else self.unasked(study_id))

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """The best trial within the bounds, if there is one; see `optuna.storages.BaseStorage`."""
        best = self._stored.get_best_trial(study_id)
        if not is_feasible(best):
            best = self._best_within_bounds(study_id) or best
        return shown(best, self.unasked(study_id))

    def _best_within_bounds(self, study_id: int) -> FrozenTrial | None:
        (direction,) = self._stored.get_study_directions(study_id)
        sign = -1 if direction == StudyDirection.MAXIMIZE else 1
        within = filter(is_ranked, outlined_trials(self._stored, study_id))
        best = min(within, key=lambda trial: (sign * trial.values[0], trial.number), default=None)
        return None if best is None else self._stored.get_trial(id_of_trial(best))

    def get_all_trials(
        self,
        study_id: int,
        deepcopy: bool = True,  # noqa: ARG002 - each is a copy
        states: Container[TrialState] | None = None,
    ) -> list[FrozenTrial]:
        """The trials in these states; see `optuna.storages.BaseStorage`."""
        trials = self._stored.get_all_trials(study_id, deepcopy=False, states=states)
        return [shown(trial, self.unasked(study_id)) for trial in trials]

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Add a trial; to rename a study the dashboard copies its trials, so a copy gets all stored attributes."""
        if template_trial is not None:
            template_trial = self._stored.get_trial(id_of_trial(template_trial))
        return self._stored.create_new_trial(study_id, template_trial)

    def unasked(self, study_id: int) -> frozenset[str]:
        """The metrics that are not shown, because the study does not ask for them."""
        if study_id not in self._unasked:
            config = self._stored.get_study_user_attrs(study_id).get(CONFIG_ATTR) or {}
            self._unasked[study_id] = unasked_metrics(config)
        return self._unasked[study_id]


def shown(trial: FrozenTrial, unasked: Container[str]) -> FrozenTrial:
    """A copy of the trial with attributes for people, without the metrics in `unasked`.

    Its violations of the bounds get the key where optuna-dashboard looks for them.
    """
    stored = trial.user_attrs
    best = stored.get(BEST_ATTR) or {}
    metrics = {name: _rounded(value) for name, value in best.get("metrics", {}).items() if name not in unasked}
    epoch = {"best epoch": best["epoch"]} if best else {}
    named = {name: stored[key] for key, name in _SHOWN.items() if key in stored}
    trial = copy.copy(trial)
    trial.user_attrs = {**metrics, **epoch, **named, **_fork(trial), **_others(stored)}
    if violations := list(trial.constraints.values()):
        trial.system_attrs = {**trial.system_attrs, _VIOLATIONS: violations}
    return trial


def _fork(trial: FrozenTrial) -> dict[str, str]:
    fork = forked_from(trial)
    return {} if fork is None else {"fork": f"of trial {fork['parent']} after epoch {fork['epoch']}"}


def _others(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attrs.items() if not name.startswith(PREFIX)}


def _rounded(value: Any) -> Any:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


#: The dashboard's own layout is for wide screens: two columns that do not wrap, and lines that do not break. Its
#: classes change with its version, so these rules select elements and names of its components.
_NARROW: Final = """<style>@media (max-width: 700px) {
main { min-width: 0; max-width: calc(100vw - 57px); }
main .MuiGrid-item { flex-basis: 100% !important; max-width: 100% !important; }
main .MuiGrid-item .MuiGrid-item { padding-left: 0 !important; }
main h3 { font-size: 1.3rem !important; }
main h4 { font-size: 1.4rem !important; }
main h3, main h4, main p, main td, main th { overflow-wrap: anywhere; }
main fieldset:first-child { justify-content: flex-start !important; flex-wrap: wrap; }
main .MuiBox-root { min-width: 0; }
main .MuiBox-root:has(> .MuiDivider-vertical), main .MuiBox-root:has(> p + .MuiBox-root),
main .MuiBox-root:has(> .MuiBox-root > p + .MuiFormControl-root) { flex-direction: column; }
main .MuiBox-root:has(> ul > .MuiListSubheader-root) { width: 100%; min-width: 0; max-height: 11rem; flex: none; }
main .MuiBox-root:has(> ul > .MuiListSubheader-root) ul { width: 100% !important; }
main .MuiDivider-vertical { display: none; }
main .MuiBox-root:has(> .MuiDivider-vertical) { height: auto !important; }
main .MuiDivider-vertical + .MuiBox-root { overflow: visible !important; width: 100%; }
main p + .MuiBox-root, main p + .MuiBox-root * { overflow-wrap: anywhere; white-space: normal; }
}</style>
"""


def fitted(app: WSGIApplication) -> WSGIApplication:
    """The dashboard with pages that fit a narrow screen, too.

    Args:
        app: optuna-dashboard.
    """

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET" or not environ.get("PATH_INFO", "").startswith("/dashboard"):
            return app(environ, start_response)
        # Without partial or "not modified" answers, which would not be about the page with the rules.
        for key in ("HTTP_RANGE", "HTTP_IF_NONE_MATCH", "HTTP_IF_MODIFIED_SINCE"):
            environ.pop(key, None)
        status, headers, body = whole_answer(app, environ)
        body = body.replace(b"</head>", _NARROW.encode() + b"</head>", 1)
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]

    return answer
