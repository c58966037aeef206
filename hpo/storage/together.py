"""The part of the storage that gathers several writes to a trial, and stores them in one transaction.

That takes little longer than a single write.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import sqlalchemy as sa
from optuna.exceptions import StorageInternalError

from hpo.errors import LeaseLostError
from hpo.storage.granting import GrantingStorage
from hpo.storage.grants import Grant, add_grant, has_grant
from hpo.storage.guarded import guarded_insert
from hpo.storage.leased import lease_lost
from hpo.storage.ledger import Executor, Owner
from hpo.storage.optuna_private import PARAMS, REPORTS, TRIAL_SYSTEM_ATTRS, TRIAL_USER_ATTRS, models
from hpo.storage.outage import patient

#: Columns of a reported value.
_REPORT: Final = ("step", "intermediate_value", "intermediate_value_type")


@dataclass(frozen=True)
class _Row:
    """A row of a trial: table, key column, values by column, and whether it replaces an existing row."""

    table: sa.Table
    key: str
    values: dict[str, Any]
    replace: bool

    @property
    def kind(self) -> tuple[sa.Table, str, tuple[str, ...], bool]:
        """Rows of the same kind are stored by one statement."""
        return self.table, self.key, tuple(self.values), self.replace


@dataclass
class _Gathered(threading.local):
    """What the current thread has written and not stored yet; ``trial_id`` is None if it stores immediately."""

    trial_id: int | None = None
    rows: list[_Row] = field(default_factory=list)


class GatheringStorage(GrantingStorage):
    """A `GrantingStorage` that can gather writes to a trial.

    Args:
        url: See `LeasedStorage`.
        owner: See `LeasedStorage`.
    """

    def __init__(self, url: str, owner: Owner | None) -> None:
        self._gathered = _Gathered()
        super().__init__(url, owner)

    @contextlib.contextmanager
    def together(self, trial_id: int) -> Iterator[None]:
        """Store this thread's writes to a trial in the block in one transaction: parameters, values, attributes.

        They are stored when the trial's state changes in the block, or else at its end; after an error too, unless
        the storage has raised it. Reads in the block do not show them. Of nested blocks, the outermost stores
        them.

        Raises:
            LeaseLostError: Another attempt has the trial; nothing is stored.
        """
        if self._gathered.trial_id is not None:
            yield
            return
        self._gathered.trial_id = trial_id
        try:
            yield
        except (LeaseLostError, StorageInternalError):
            self._gathered.rows.clear()
            raise
        finally:
            rows, self._gathered.rows, self._gathered.trial_id = self._gathered.rows, [], None
            if rows:
                self._store_rows(trial_id, rows)

    @patient
    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        """Store a reported value; it replaces an earlier value of the same step."""
        self.set_trial_intermediate_values(trial_id, {step: intermediate_value})

    @patient
    def set_trial_intermediate_values(self, trial_id: int, values: Mapping[int, float]) -> None:
        """Store reported values of several steps, all or none; they replace earlier values of the same steps."""
        self._write_rows(trial_id, _reports(values))

    @patient
    def extend(self, trial_id: int, grant: Grant, values: Mapping[int, float]) -> None:
        """Store another grant for a held trial, and values that it has reported, by step.

        Raises:
            OldGrantError: The grant is not the study's next one; nothing is stored.
            LeaseLostError: Another attempt has the trial.
        """
        self._untouched.clear()
        attempt = self.attempt_of(trial_id)
        with self.one_transaction() as conn:
            # The grant comes last, because all workers wait for a transaction that adds one.
            if not values:
                self._fence(conn, trial_id)
            elif not self._execute_rows(conn, trial_id, attempt, _reports(values)):
                raise lease_lost(trial_id)
            if not (self.patience.tries and has_grant(conn, trial_id, grant)):
                add_grant(conn, trial_id, grant)

    def rehearse_together(self, absent: int) -> None:
        """Execute the statements that store several rows, for a trial that does not exist."""
        param = {"param_value": 0.0, "distribution_json": ""}
        for table, key, values in (
            (PARAMS, "param_name", param),
            (TRIAL_USER_ATTRS, "key", {"value_json": ""}),
            (TRIAL_SYSTEM_ATTRS, "key", {"value_json": ""}),
        ):
            with contextlib.suppress(LeaseLostError), self.together(absent):
                for name in ("a", "b"):
                    self._write(table, absent, key, {key: name} | values, replace=table is not PARAMS)

    def _write(
        self, table: sa.Table, trial_id: int, key: str, values: dict[str, Any], *, replace: bool = True
    ) -> None:
        """Store or gather one row of a trial; when it is stored, raises if the trial may not be written to."""
        self._write_rows(trial_id, [_Row(table, key, values, replace)])

    def _write_rows(self, trial_id: int, rows: Sequence[_Row]) -> None:
        if self._gathered.trial_id == trial_id:
            self._gathered.rows += rows
        else:
            self._store_rows(trial_id, rows)

    @patient
    def _store_rows(self, trial_id: int, rows: Sequence[_Row]) -> None:
        self._untouched.clear()
        if self.owner is not None and trial_id not in self._held:
            self._explain_refusal(trial_id)
        with self.single_statements() if len(rows) == 1 else self.one_transaction() as conn:
            written = self._execute_rows(conn, trial_id, self._attempt(trial_id), rows)
        if not written:
            self._explain_refusal(trial_id)

    def _execute_rows(self, conn: Executor, trial_id: int, attempt: int | None, rows: Sequence[_Row]) -> bool:
        """Store rows in the caller's transaction; False if rows of one kind were refused, or existed already."""
        whose = {"trial": trial_id} if attempt is None else {"trial": trial_id, "attempt": attempt}
        stored = True
        for (table, key, columns, replace), group in itertools.groupby(rows, lambda row: row.kind):
            statement = guarded_insert(
                self.engine.name, table, columns, key, replace=replace, fenced=attempt is not None
            )
            new = [{f"new_{name}": value for name, value in row.values.items()} | whose for row in group]
            result = cast("sa.CursorResult[Any]", conn.execute(statement, new if len(new) > 1 else new[0]))
            if not result.rowcount and replace:
                return False
            stored = stored and bool(result.rowcount)  # an existing row is no reason to skip the following ones
        return stored


def _reports(values: Mapping[int, float]) -> list[_Row]:
    """The rows of reported values, by step."""
    stored = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr
    named = [(step, *stored(value)) for step, value in values.items()]
    return [_Row(REPORTS, "step", dict(zip(_REPORT, row, strict=True)), replace=True) for row in named]
