"""Shows a study repeatedly for `hpo status --watch`, from the database alone."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime

from hpo.config.spec import StudySpec
from hpo.console.live import Picture, StudyView, seconds_left
from hpo.console.output import flushed
from hpo.console.screen import Screen, is_drawable
from hpo.console.snapshot import Look, Looks
from hpo.console.tally import viewed
from hpo.storage.outage import DatabaseAwayError
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.outcome import UNFINISHED, finite
from hpo.study.status import best_in_words
from hpo.wording import best_list, study_progress


def watch(spec: StudySpec, interval: float, *, json_: bool) -> None:
    """Show a study repeatedly until all its trials have ended.

    A terminal shows a picture, the last of which stays; a file gets a line for each change. It waits for a
    database that can't be reached.

    Args:
        spec: The study file.
        interval: Seconds between two looks.
        json_: Print each look as one line of JSON: ``time``, ``problem`` (null, or why nothing could be read), and
            the ``status`` of `hpo.console.snapshot.Look`.

    Raises:
        StudyError: There is no such study, or it has been deleted.
    """
    with load_study(spec) as opened:
        looks = Looks(opened)
        with contextlib.closing(_view(opened, json_=json_)) as view:
            while True:
                found, problem = _look(opened, looks)
                try:
                    view.show(found, problem)
                except OSError:  # the output's reader is gone
                    return
                if found is not None and found.ended:
                    return
                time.sleep(interval)


def _look(opened: OpenStudy, looks: Looks) -> tuple[Look | None, str]:
    """Read the study: its state, or None and the reason."""
    try:
        with opened.storage.patience.whole():
            return looks.look(), ""
    except DatabaseAwayError as error:
        return None, f"the database is unreachable; waiting for it: {error.problem}"
    except KeyError:
        opened.refuse_deleted()
        raise


def _view(opened: OpenStudy, *, json_: bool) -> _Lines | _Drawing:
    if json_:
        return _Lines(_as_json, every=True)
    if is_drawable():
        return _Drawing(opened)
    return _Lines(lambda found, problem: _as_line(opened, found, problem), every=False)


class _Lines:
    """Prints a line for each look, or only for looks with news."""

    def __init__(self, make: Callable[[Look | None, str], str], *, every: bool) -> None:
        self._make = make
        self._every = every
        self._last = ""

    def show(self, found: Look | None, problem: str) -> None:
        """Print the state; raises OSError if the reader is gone."""
        line = self._make(found, problem)
        if self._every or line != self._last:
            with flushed():
                print(line)
        self._last = line

    def close(self) -> None:
        """Do nothing: the lines are printed already."""


def _as_json(found: Look | None, problem: str) -> str:
    status = {} if found is None else found.status
    data = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "problem": problem or None, **status}
    return json.dumps(finite(data), allow_nan=False)


def _as_line(opened: OpenStudy, found: Look | None, problem: str) -> str:
    if found is None:
        return problem
    status = found.status
    done, of, unit = study_progress(status)
    parts = [f"{done}/{of} {unit}"]
    parts += [f"{status[name]} {name}" for name in UNFINISHED if status[name]]
    parts += [f"{count} {name}" for name, count in status["outcomes"].items() if count]
    parts += [f"{title} {text}" for title, text in best_in_words(opened.spec, status)]
    return ", ".join(parts)


class _Drawing:
    """Redraws a picture; the last one stays."""

    def __init__(self, opened: OpenStudy) -> None:
        self._opened = opened
        self._screen = Screen()
        self._found: Look | None = None
        self._problem = ""
        self._screen.open()

    def show(self, found: Look | None, problem: str) -> None:
        """Draw the state; raises OSError if the terminal is closed."""
        self._found, self._problem = found or self._found, problem
        self._screen.show(self._picture, now=True)

    def close(self) -> None:
        """Leave the last picture."""
        self._screen.close(None if self._found is None else self._picture())

    def _picture(self) -> Picture:
        found = self._found or Look({}, {}, set(), {}, {})
        return Picture(study_view(self._opened, found, self._problem))


def study_view(opened: OpenStudy, found: Look, problem: str = "") -> StudyView:
    """The view of a study's state, for a picture.

    Args:
        opened: The study.
        found: The state; None before the database has answered for the first time.
        problem: Why the state could not be read; empty if it could.
    """
    study, status = opened.spec.study, found.status
    if not status:
        notices = [problem] if problem else []
        return StudyView(study.name, study.goals, (0, study.n_trials, "trials"), notices=notices)
    running = status["running_trials"]
    several = len({entry["host"] for entry in running}) > 1
    workers = [viewed(entry, with_host=several) for entry in running]
    best = best_list(status["best"])
    done, of, unit = study_progress(status)
    left = max(0, of - done)
    notices = [problem] if problem else [] if workers or not left else ["no trial is running"]
    return StudyView(
        study.name,
        study.goals,
        (done, of, unit),
        status["outcomes"],
        status["waiting"],
        status["paused"],
        best,
        front=len(best) if len(study.goals) > 1 else 0,
        workers=workers,
        left_s=None
        if unit == "epochs"
        else seconds_left(max(0, left - len(workers)), list(found.seconds.values()), workers),
        notices=notices,
    )
