"""Corrects the best trials on the page of a study with several objectives: the Pareto front within the bounds.

optuna-dashboard itself computes the front of all trials, even of those that it marks as outside the bounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs

from hpo.dashboard.whole import whole_answer
from hpo.storage.optuna_private import pareto_front
from hpo.storage.outlines import outlined_trials
from hpo.study.ranking import is_feasible, is_ranked

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from hpo.storage.study_storage import StudyStorage

_STUDY: Final = re.compile(r"/api/studies/(\d+)/?")


def within_bounds(app: WSGIApplication, storage: StudyStorage) -> WSGIApplication:
    """The dashboard with the Pareto front of the trials within the bounds, if there are any.

    Args:
        app: optuna-dashboard.
        storage: The storage with its studies.
    """

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        asked = _STUDY.fullmatch(environ.get("PATH_INFO", "")) if environ["REQUEST_METHOD"] == "GET" else None
        front = None if asked is None else _front(storage, int(asked[1]))
        if front is None:
            return app(environ, start_response)
        # The page asks only for trials that it does not have; the front may be among the others.
        status, headers, body = whole_answer(app, {**environ, "QUERY_STRING": ""})
        if status.startswith("200 "):
            body = _with_front(json.loads(body), front, _count_of_known(environ.get("QUERY_STRING", "")))
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body]

    return answer


def _with_front(detail: dict[str, Any], front: set[int], known: int) -> bytes:
    trials = detail["trials"]
    best = [trial for trial in trials if trial["number"] in front]
    return json.dumps({**detail, "best_trials": best, "trials": trials[known:]}).encode()


def _count_of_known(query: str) -> int:
    """How many trials the page already has."""
    after = parse_qs(query).get("after", ["0"])[0]
    return int(after) if after.isdecimal() else 0


def _front(storage: StudyStorage, study_id: int) -> set[int] | None:
    """The numbers of the trials on the front within the bounds; None if optuna-dashboard's own answer is right."""
    try:
        directions = storage.get_study_directions(study_id)
    except KeyError:  # the dashboard itself reports that there is no such study
        return None
    trials = outlined_trials(storage, study_id) if len(directions) > 1 else []
    within = [trial for trial in trials if is_ranked(trial)]
    if not within or all(map(is_feasible, trials)):
        return None
    return {trial.number for trial in pareto_front(within, directions)}
