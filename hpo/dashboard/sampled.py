"""Shows optuna-dashboard only a sample of a large study's trials, so that a browser opens the page in seconds.

The page loads all trials that it gets, with their curves: for 50,000 trials, hundreds of megabytes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qs, urlsplit

import sqlalchemy as sa
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.dashboard.shown import ShownStorage, shown
from hpo.storage.optuna_private import TRIALS, id_of_study, id_of_trial, pareto_front
from hpo.storage.outlines import outlined_trials
from hpo.storage.pausing import paused_at
from hpo.study.ranking import is_feasible
from hpo.study.thinning import evenly

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from hpo.storage.study_storage import StudyStorage

#: A study with at most this many trials is shown whole; a larger one with this many.
MOST_TRIALS: Final = 1000
#: The most points of a curve in a larger study.
_MOST_POINTS: Final = 16
_ALL_STATES: Final = frozenset(TrialState)
_LAST_ID: Final = 2**31 - 1
#: Requests for pages that draw all trials at once. All others, such as downloads of tables, get the whole study.
_DRAWN: Final = re.compile(r"/api/studies/\d+(/param_importances|/plot/\w+)?/?")
_MOST_OPENED: Final = 50  # open trials of one page


class SampledStorage(ShownStorage):
    """A `ShownStorage` that samples the trials of a study with more than `MOST_TRIALS` trials.

    The sample has running and waiting trials, the best, the latest, and an even sample of the others. Their curves
    have at most 16 points.

    Args:
        storage: The storage to read.
        opened: Numbers of trials that a person has opened: they are in the sample, with their whole curves.
    """

    def __init__(self, storage: StudyStorage, opened: frozenset[int] = frozenset()) -> None:
        super().__init__(storage)
        self._opened = opened

    def get_all_studies(self) -> list[Any]:
        """All studies; large ones have an attribute that says which trials are shown."""
        studies = super().get_all_studies()
        counts = self._counts()
        for study in studies:
            count = counts.get(id_of_study(study), 0)
            if count > MOST_TRIALS:
                said = (
                    f"{MOST_TRIALS} of {count}: those under way, the best, the latest, and an even sample of the "
                    f"others; curves have {_MOST_POINTS} points. Any trial's number may stand in the address of a "
                    "trial's page, which has its whole curve once it is reloaded. The CSV has all trials."
                )
                study.user_attrs = {"trials shown": said, **study.user_attrs}
        return studies

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """The sampled trials, those that have not ended first.

        The page asks again for the trials from the first unfinished one in its list on. So as long as a trial has
        not ended it asks for all of them, and the sample may change.
        """
        if self._counts().get(study_id, 0) <= MOST_TRIALS:
            return super().get_all_trials(study_id, deepcopy, states)
        outlines = outlined_trials(self._stored, study_id)
        chosen = _chosen(outlines, self._stored.get_study_directions(study_id), self._opened)
        wanted = [state for state in _ALL_STATES if states is None or state in states]
        _, trials = self._stored.read_changes(study_id, after=_LAST_ID, among=chosen, states=wanted)
        found = [self._light(shown(trial, self.unasked(study_id))) for trial in trials]
        return sorted(found, key=lambda trial: (trial.state.is_finished(), trial.number))

    def _light(self, trial: FrozenTrial) -> FrozenTrial:
        """The trial with an even sample of its curve's points, the last one included."""
        steps = sorted(trial.intermediate_values)
        if len(steps) <= _MOST_POINTS or trial.number in self._opened:
            return trial
        trial.intermediate_values = {step: trial.intermediate_values[step] for step in evenly(steps, _MOST_POINTS)}
        return trial

    def _counts(self) -> dict[int, int]:
        query = sa.select(TRIALS.c.study_id, sa.func.count()).group_by(TRIALS.c.study_id)
        with self._stored.single_statements() as conn:
            return dict(cast("list[tuple[int, int]]", conn.execute(query).all()))


def _chosen(
    trials: Sequence[FrozenTrial], directions: Sequence[StudyDirection], opened: Container[int]
) -> set[int]:
    """The ids of the sample: up to a quarter each of trials under way, the best, the latest, and the others."""
    part = MOST_TRIALS // 4
    under_way = [trial for trial in trials if _is_under_way(trial)]
    under_way.sort(key=lambda trial: trial.state == TrialState.RUNNING)  # those are kept first
    settled = [trial for trial in trials if not _is_under_way(trial)]
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.values]
    sign = -1 if directions[0] == StudyDirection.MAXIMIZE else 1
    within = [trial for trial in complete if is_feasible(trial)] or complete
    best = sorted(within, key=lambda trial: sign * trial.values[0])
    front = pareto_front(within, directions) if len(directions) > 1 else []
    kept: dict[int, FrozenTrial] = {}
    for some in (
        [trial for trial in trials if trial.number in opened],
        under_way[-part:],
        front[:part],
        best[:part],
        _best_so_far(complete, sign)[-part:],
        settled[-part:],
    ):
        kept.update((trial.number, trial) for trial in some)
    others = [trial for trial in trials if trial.number not in kept]
    return {id_of_trial(trial) for trial in (*kept.values(), *evenly(others, MOST_TRIALS - len(kept)))}


def _is_under_way(trial: FrozenTrial) -> bool:
    """Whether a trial waits or trains; most of a study may be paused."""
    return not trial.state.is_finished() and paused_at(trial) is None


def _best_so_far(complete: Iterable[FrozenTrial], sign: int) -> list[FrozenTrial]:
    """The trials that were better than all before them, so that the line of the best value is right."""
    found: list[FrozenTrial] = []
    for trial in complete:
        if not found or sign * trial.values[0] < sign * found[-1].values[0]:
            found.append(trial)
    return found


def sampling(whole: WSGIApplication, light: Callable[[frozenset[int]], WSGIApplication]) -> WSGIApplication:
    """A dashboard that draws a sample of a study, and answers all other requests from the whole study.

    Args:
        whole: The dashboard on all trials.
        light: Creates a dashboard on a `SampledStorage`, for the trials that a person has opened.
    """
    light_of = functools.lru_cache(maxsize=8)(light)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        drawn = environ["REQUEST_METHOD"] == "GET" and _DRAWN.fullmatch(environ.get("PATH_INFO", ""))
        app = light_of(_opened(environ.get("HTTP_REFERER", ""))) if drawn else whole
        return app(environ, start_response)

    return answer


def _opened(page: str) -> frozenset[int]:
    """The numbers of the trials that are open on the page with this address."""
    try:
        numbers = parse_qs(urlsplit(page).query).get("numbers", [""])[0].split(",")
    except ValueError:
        return frozenset()
    return frozenset(int(number) for number in numbers[:_MOST_OPENED] if number.isdecimal() and len(number) < 10)
