"""The part of the storage that reads studies and trials; each method waits for a database that is away."""

from collections.abc import Collection, Container, Sequence
from typing import Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.storage import changes, study_rows
from hpo.storage.outage import patient
from hpo.storage.transactions import TransactionalStorage
from hpo.storage.trial_rows import (
    TrialRow,
    rows_of,
    rows_since,
    sampled_rows,
    system_attrs,
    trial_row,
    trial_rows,
    whole_trials,
)


class ReadingStorage(TransactionalStorage):
    """Optuna's storage with faster methods that read studies and trials."""

    @patient
    def get_study_id_from_name(self, study_name: str) -> int:
        """Find a study; KeyError if there is none of this name."""
        with self.single_statements() as conn:
            return study_rows.study_id(conn, study_name)

    @patient
    def get_study_name_from_id(self, study_id: int) -> str:
        """Read a study's name."""
        with self.single_statements() as conn:
            return study_rows.study_name(conn, study_id)

    @patient
    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        """Read the directions of a study's objectives."""
        with self.single_statements() as conn:
            return study_rows.study_directions(conn, study_id)

    @patient
    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        """Read a study's user attributes."""
        with self.single_statements() as conn:
            return study_rows.study_user_attrs(conn, study_id)

    @patient
    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        """Read a study's system attributes."""
        with self.single_statements() as conn:
            return study_rows.study_system_attrs(conn, study_id)

    @patient
    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Read a trial."""
        with self.single_statements() as conn:
            return whole_trials(conn, [trial_row(conn, trial_id)])[0]

    @patient
    def get_trial_system_attrs(self, trial_id: int) -> dict[str, Any]:
        """Read a trial's system attributes."""
        with self.single_statements() as conn:
            return system_attrs(conn, trial_id)

    @patient
    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        wanted = [state for state in TrialState if states is None or state in states]
        rows, trials = self.read_changes(
            study_id, after=trial_id_greater_than, among=included_trial_ids, states=wanted
        )
        if not rows:
            self.get_study_name_from_id(study_id)  # KeyError if there is no such study
        return trials

    @patient
    def read_changes(
        self,
        study_id: int,
        *,
        after: int,
        among: Collection[int],
        states: Collection[TrialState],
    ) -> tuple[list[TrialRow], list[FrozenTrial]]:
        """Read the trials whose id is above ``after`` or in ``among``.

        Args:
            study_id: The study.
            after: See above.
            among: See above.
            states: Trials in these states are read whole.

        Returns:
            The rows of all these trials, and the whole trials in ``states``.
        """
        with self.single_statements() as conn:
            rows = trial_rows(conn, study_id, after=after, among=among)
            return rows, whole_trials(conn, [row for row in rows if row.state in states])

    @patient
    def read_changes_since(
        self,
        study_id: int,
        change: int,
        *,
        after: int,
        among: Collection[int],
        states: Collection[TrialState],
    ) -> tuple[int, set[int], list[TrialRow], list[FrozenTrial]]:
        """As `read_changes`, and also read the trials with a change that is noted after an earlier one.

        All rows are of one moment, so a look that sees a new trial also sees what was stored with it.

        Returns:
            The latest change, the ids of the trials with a noted change, and what `read_changes` returns.
        """
        with self.single_statements() as conn:
            change, changed, rows = rows_since(conn, study_id, change, after=after, among=among)
            return change, changed, rows, whole_trials(conn, [row for row in rows if row.state in states])

    @patient
    def read_some(self, trial_ids: Sequence[int]) -> list[FrozenTrial]:
        """Some trials, whole, by id; missing ones are left out."""
        with self.single_statements() as conn:
            return whole_trials(conn, rows_of(conn, trial_ids))

    @patient
    def latest_change(self, study_id: int) -> int:
        """The latest noted change of a study; see `hpo.storage.changes`."""
        with self.single_statements() as conn:
            return changes.latest_change(conn, study_id)

    @patient
    def changes_since(self, study_id: int, after: int) -> tuple[int, set[int]]:
        """The latest noted change of a study, and the trials that have changed after an earlier one."""
        with self.single_statements() as conn:
            return changes.changes_since(conn, study_id, after)

    @patient
    def read_sample(
        self, study_id: int, *, most: int, maximize: bool, states: Collection[TrialState]
    ) -> tuple[int, list[TrialRow], list[FrozenTrial]]:
        """Read a study's trials for the first time; of a very large study, a sample (`hpo.storage.sample`).

        Args:
            study_id: The study.
            most: The most finished trials in the sample, beside the best.
            maximize: Whether its metric is maximized.
            states: Trials in these states are read whole.

        Returns:
            The highest id of the study's trials, the rows, and the whole trials in ``states``.
        """
        with self.single_statements() as conn:
            last, rows = sampled_rows(conn, study_id, most=most, maximize=maximize)
            return last, rows, whole_trials(conn, [row for row in rows if row.state in states])
