"""A supervisor's chores in the storage: beating, taking trials back, counting trials, enforcing the disk quota."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, TypedDict, TypeVar

from hpo.errors import StudyError
from hpo.execution.beating import AgentBeats, beat_interval
from hpo.execution.launchers.launcher import Worker
from hpo.execution.messages import Notice
from hpo.execution.registered import Registered
from hpo.storage import agents, ledger
from hpo.storage.budget import Budgets
from hpo.storage.outage import DatabaseAwayError, DatabaseError
from hpo.storage.recovery import Sightings, holds_a_trial, settle_agent, settle_process
from hpo.storage.settling import Settled, StopNote, Verdict
from hpo.storage.study_end import prune_paused, read_budgets
from hpo.storage.study_storage import StudyStorage
from hpo.study.agents import end_dead_agents
from hpo.study.goals import goal_reached
from hpo.study.open_study import OpenStudy
from hpo.study.own_trials import own_trials
from hpo.study.retention import enforce_quota
from hpo.study.shared import mark_file
from hpo.study.taking import claimable
from hpo.wording import count_of

#: Checking the quota takes at most 1/10 of the time: the pause after a check is this many times its duration.
_QUOTA_SHARE: Final = 10

T = TypeVar("T")


class _Patience(TypedDict):
    """The study file's settings for trials that are taken back; see `hpo.storage.recovery`."""

    max_retries: int
    stop_note: StopNote


class Upkeep:
    """Chores on the study's storage. While the database is away they are put off, and none is forgotten.

    Args:
        opened: The study; this process owns no trial.
        notify: Called with a worker's label (or an empty text) and what a person should know.
        registered: This process as an agent, for which each look beats; None if it has no row.

    Attributes:
        interval: Seconds between two looks, and between two beats.
    """

    def __init__(
        self,
        opened: OpenStudy,
        notify: Callable[[str, Settled | Notice], None],
        registered: Registered | None = None,
    ) -> None:
        self._opened = opened
        self._notify = notify
        self._registered = registered
        self.interval: Final = beat_interval(opened.spec.run.lost_after)
        self._beats = AgentBeats(opened.storage, registered, self.interval)
        self._next_look = self._next_quota = 0.0
        self._over_quota = False
        self._unsettled: list[tuple[int, Callable[[], object]]] = []
        self._settled: list[Settled] = []
        self._away = False
        self._sightings = Sightings()
        self._agents_seen = Sightings()
        self._waiting_for = 0

    @property
    def away(self) -> bool:
        """Whether the database was away at the last query."""
        return self._away

    def settle(self, label: str, pid: int, verdict: Verdict) -> None:
        """Requeue or fail the trial that a dead worker held, as soon as the database is there; see `settled`.

        If the trial's process lives on although it was killed, this is done once that process is gone.
        """
        hear = partial(self._hear, label)
        self._settle(pid, lambda: settle_process(*self._study, pid, verdict, **self._patience, heard=hear))

    def settle_agent(self, placement: str, verdict: Verdict) -> None:
        """As `settle`, for all trials of an agent that its engine has lost or killed."""
        hear = partial(self._hear, "")
        self._settle(0, lambda: settle_agent(*self._study, placement, verdict, **self._patience, heard=hear))

    def settled(self) -> list[Settled]:
        """The trials that have been settled since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def _settle(self, pid: int, settle: Callable[[], object]) -> None:
        self._unsettled.append((pid, settle))
        self._try(self._settle_all)

    def _hear(self, label: str, settled: Settled) -> None:
        self._settled.append(settled)
        self._notify(label, settled)

    @property
    def _study(self) -> tuple[StudyStorage, int]:
        return self._opened.storage, self._opened.study_id

    @property
    def _patience(self) -> _Patience:
        return {"max_retries": self._opened.spec.run.max_retries, "stop_note": self._opened.stop_note}

    def look(self, now: float, ours: Collection[Worker] = ()) -> None:
        """Beat, and take back trials whose workers elsewhere are dead, if it is time for the next look.

        Args:
            now: The monotonic clock.
            ours: This supervisor's workers; their trials are left to `settle`.
        """
        if now < self._next_look:
            return
        self._next_look = now + self.interval
        # Only if there is something to store: a chore without a query would make the database look reachable.
        if self._registered is not None or any(worker.held for worker in ours):
            self._try(lambda: self._beats.give(ours))
        if self._registered is not None:
            self._registered.keep_mark()
        self._try(self._end_dead_agents)
        if self._unsettled:
            self._try(self._settle_all)
        # A worker is the first to know that its trial process has ended; it is settled when the worker ends too.
        spared = [*(worker.trial_pid for worker in ours), *(pid for pid, _ in self._unsettled)]
        taken_back: list[Settled] = []  # filled also if the database goes away before the rest are taken back
        self._try(lambda: self._opened.requeue_dead(self._sightings, spared, taken_back.append))
        for settled in taken_back:
            self._notify("", settled)
        if now >= self._next_quota and not self._away:  # below the quota it makes no query
            self._try(self._keep_to_quota)
            self._next_quota = now + _QUOTA_SHARE * (time.monotonic() - now)

    def claimable(self) -> int:
        """How many trials workers could take now; 0 if that is unknown."""
        return self._try(lambda: claimable(self._opened)) or 0

    def is_claimable_or_unknown(self) -> bool:
        """Whether a worker could take a trial now; also True if that is unknown."""
        return self._try(lambda: claimable(self._opened, most=1)) != 0

    def running(self) -> int | None:
        """How many trials run now, on any machine; None if that is unknown."""
        return self._try(self._opened.running)

    def running_on(self, placements: Collection[str]) -> int:
        """How many trials run on the agents with these placement ids; 0 if that is unknown."""
        storage, study_id = self._study

        def count() -> int:
            with storage.engine.connect() as conn:
                there = [each for each in agents.open_agents(conn, study_id) if each.placement in placements]
                leases = [trial.lease for trial in ledger.running_trials(conn, study_id)]
            ids = {agent.agent_id for agent in there}
            return sum(lease is not None and lease.agent in ids for lease in leases)

        return self._try(count) or 0

    def stop_request(self) -> str | None:
        """The latest request that all agents leave, see `hpo.storage.agents`; None if that is unknown."""

        def read() -> str:
            with self._opened.storage.engine.connect() as conn:
                return agents.stop_request(conn, self._opened.study_id)

        return self._try(read)

    def goal_reached(self) -> str | None:
        """Why the study is done before its budget is used up; None if it is not done, or that is unknown."""
        study = self._opened.spec.study
        if study.target_value is None and study.stop_after_no_improvement is None:
            return None
        return self._try(lambda: goal_reached(study, own_trials(self._opened)))

    def is_more_to_come(self) -> bool:
        """Whether trials run, or could be taken, anywhere; also True if that is unknown."""
        # Running trials are counted again at the end: one may be taken between the first two queries.
        runs = bool(self._unsettled) or self.running() != 0
        return runs or self.is_claimable_or_unknown() or self.running() != 0

    def waits(self) -> bool:
        """As `is_more_to_come`, for a supervisor without workers; also reports how many trials run elsewhere."""
        running = None if self._unsettled else self.running()
        if running and running != self._waiting_for:
            self._notify("", Notice(f"waiting for {count_of(running, 'trial')} elsewhere"))
            self._waiting_for = running
        return bool(running) or self.is_more_to_come()

    def budgets(self) -> Budgets | None:
        """The study's budgets, for `end_study`; None if they are unknown."""
        return self._try(lambda: read_budgets(self._opened.storage, self._opened.study_id))

    def end_study(self, budgets: Budgets | None) -> bool:
        """Prune the trials that are still paused, because nothing is left to do.

        Args:
            budgets: The study's budgets, read before it was found that nothing is left to do.

        Returns:
            False if the budgets have changed since, or the database is away.
        """

        storage, study_id = self._study

        def prune() -> bool:
            for pruned in prune_paused(storage, study_id, budgets):
                self._notify("", pruned)
            return read_budgets(storage, study_id) == budgets

        return budgets is not None and self._try(prune) is True

    def _end_dead_agents(self) -> None:
        grace, storage, study = self._opened.spec.run.lost_after, self._opened.storage, self._opened.study_id
        for agent in end_dead_agents(storage, study, grace=grace, sightings=self._agents_seen):
            with contextlib.suppress(OSError):  # the file does no harm
                mark_file(self._opened.spec, agent).unlink(missing_ok=True)

    def leave(self, ending: str) -> None:
        """Store how this agent has ended; if the database is away, others see that its process is gone."""
        if self._registered is not None:
            registered = self._registered
            self._try(lambda: registered.end(ending))

    def _keep_to_quota(self) -> None:
        try:
            report = enforce_quota(self._opened)
        except (DatabaseAwayError, DatabaseError):
            raise
        except StudyError as error:  # a file that can't be removed
            said, over = str(error), True
        else:
            said, over = str(report or ""), report is not None and report.exceeded
        if said and not (over and self._over_quota):
            self._notify("", Notice(said))
        self._over_quota = over

    def _settle_all(self) -> None:
        for unsettled in list(self._unsettled):
            pid, settle = unsettled
            if not pid or not holds_a_trial(*self._study, pid):
                settle()
                self._unsettled.remove(unsettled)

    def _try(self, chore: Callable[[], T]) -> T | None:
        try:
            # Without patience: while it waited, the supervisor would handle neither signals nor its workers.
            with self._opened.storage.patience.whole():
                result = chore()
        except DatabaseAwayError as error:
            if not self._away:
                self._notify("", Notice(f"the database is unreachable; waiting for it: {error.problem}"))
            self._away = True
            return None
        if self._away:
            self._notify("", Notice("the database is reachable again"))
        self._away = False
        return result
