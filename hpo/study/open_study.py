"""Creates and loads studies: `OpenStudy` joins a study file with its storage, Optuna's study and the scheduler."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self, cast

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from hpo.config.code import code_identity
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.errors import InputError, OtherCodeError, StudyError
from hpo.search.history import most_shown
from hpo.search.pruners import make_pruner
from hpo.search.samplers import ExhaustiveSampler, import_models, make_sampler
from hpo.search.schedulers.by_name import make_scheduler
from hpo.search.schedulers.pruner import PrunerScheduler
from hpo.search.schedulers.scheduler import Scheduler
from hpo.search.schedulers.seen import Seen
from hpo.search.try_out import try_out
from hpo.search.valid_points import check_where
from hpo.storage import ledger
from hpo.storage.attributes import BUDGET_ATTR, EPOCHS_ATTR, MAX_EPOCHS_ATTR, WIDENED_ATTR
from hpo.storage.budget import claimable, count_trials
from hpo.storage.cache import StudyCache
from hpo.storage.engines import display_url
from hpo.storage.ledger import Owner
from hpo.storage.opening import open_storage
from hpo.storage.optuna_private import id_of_study, storage_of, user_attrs_of
from hpo.storage.recovery import Sightings, requeue_dead
from hpo.storage.schema import PlainStudyError
from hpo.storage.settling import Hear, Settled, not_heard
from hpo.storage.study_end import set_budgets
from hpo.storage.study_storage import StudyStorage
from hpo.study.code_record import CodeRecord, code_fix, code_problem, keep_code
from hpo.study.config_record import keep_code_and_config, not_ours, stored_config, wider_config
from hpo.study.folders import refuse_output_of_others, stop_note
from hpo.study.initial_trials import begin, check_initial_trials
from hpo.study.note import write_note
from hpo.study.progress import StudyProgress
from hpo.study.queue import budget_of
from hpo.study.ranking import study_directions
from hpo.study.undeclared import refuse_what_needs_a_space
from hpo.study.widened import has_older_space, store_wider
from trainer.data.seeding import derive_seed

_TRAINING_STREAM: Final = 0x71
#: Seconds after which a worker reads again which trials others have finished.
MAX_AGE: Final = 0.2


@dataclass(frozen=True)
class OpenStudy:
    """An open study: the study file, the storage, and Optuna's study on it.

    Attributes:
        spec: The study file.
        space: Its search space.
        storage: The storage; fenced where this process owns trials.
        study: Optuna's study on that storage.
        notes: Notes for the user about the start, one line each.
        scheduler: Decides which trials run, and for how long.

    As a context manager it closes the storage at the end of the block.
    """

    spec: StudySpec
    space: SearchSpace
    storage: StudyStorage
    study: optuna.Study
    notes: Sequence[str] = ()
    scheduler: Scheduler = field(default_factory=PrunerScheduler)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.storage.close()

    @functools.cached_property
    def progress(self) -> StudyProgress:
        """Its trials as columns, which each look brings up to date."""
        minimize = self.spec.study.direction == "minimize"
        return StudyProgress(self.storage, self.study_id, minimize=minimize)

    @functools.cached_property
    def seen(self) -> dict[int, tuple[FrozenTrial, Seen]]:
        """By number, the ended and paused trials and how a scheduler sees them; a cache of `standing_of`."""
        return {}

    @property
    def study_id(self) -> int:
        """Optuna's id of the study."""
        return id_of_study(self.study)

    def trial_seed(self, number: int, params: Mapping[str, Any]) -> int:
        """Seed of a trial's training: the searched one, else one in [0, 2**32) from the study's and the number.

        Args:
            number: The trial's number.
            params: Its parameters.
        """
        if any(path in params for path in self.spec.seed_paths):
            searched = self.spec.resolve(params)["trainer"]["seed"]
            if searched is not None:
                return int(searched)
        return derive_seed(self.spec.seed, _TRAINING_STREAM, number) % 2**32

    def budget(self) -> int:
        """Trials that the study is to bring to an end, as stored by the latest `hpo run`."""
        return int(self.study.user_attrs.get(BUDGET_ATTR, self.spec.study.n_trials))

    def count(self, *states: TrialState) -> int:
        """How many trials are in these states now."""
        with self.storage.engine.connect() as conn:
            return count_trials(conn, self.study_id, states)

    def running(self) -> int:
        """How many trials run now, without paused ones."""
        with self.storage.engine.connect() as conn:
            return len(ledger.running_trials(conn, self.study_id))

    def has_paused(self) -> bool:
        """Whether a trial is paused now."""
        with self.storage.engine.connect() as conn:
            return ledger.has_paused(conn, self.study_id)

    def claimable(self) -> int:
        """How many trials could be taken now: those that wait, and those of the budget not claimed yet."""
        with self.storage.engine.connect() as conn:
            return claimable(conn, self.study_id)

    def refuse_other_code(self) -> None:
        """Refuse to continue where the study's code or search space is newer than this worker's.

        Raises:
            OtherCodeError: A person has accepted other code, or has widened the search space.
        """
        attrs, owner = user_attrs_of(self.study), self.storage.owner
        record = CodeRecord.of(attrs)
        if owner is not None and has_older_space(attrs, self.spec):
            raise OtherCodeError(
                "the study's search space was widened, and this worker has the study file from before\n"
                "  fix: bring the widened file here, and run it"
            )
        if record is not None and owner is not None and owner.code != record.hash:
            problem = code_problem(record, code_identity(self.spec))
            raise OtherCodeError(f"{problem}\n  fix: {code_fix(self.spec)}")

    def refuse_deleted(self) -> None:
        """Refuse to read a study that has been deleted meanwhile.

        Raises:
            StudyError: The study has been deleted.
        """
        try:
            self.storage.get_study_name_from_id(self.study_id)
        except KeyError:
            raise StudyError(f"the study {self.spec.study.name} has been deleted") from None

    def forget_looks(self) -> None:
        """Make the next read of the trials find all that has been stored until then."""
        cast("StudyCache", storage_of(self.study)).forget_looks()

    def requeue_dead(
        self,
        sightings: Sightings | None = None,
        spare: Collection[int] = (),
        heard: Hear = not_heard,
    ) -> list[Settled]:
        """Requeue the trials whose workers are dead, by the limits of the study file: `hpo.storage.recovery`."""
        run = self.spec.run
        return requeue_dead(
            self.storage,
            self.study_id,
            grace=run.lost_after,
            max_retries=run.max_retries,
            sightings=sightings,
            spare=spare,
            heard=heard,
            stop_note=self.stop_note,
        )

    def stop_note(self, number: int, attempt: int) -> str | None:
        """Why an attempt ended through no fault of its trial, if that could only be noted in its folder."""
        return stop_note(self.spec, number, attempt)


@contextlib.contextmanager
def closing_on_error(storage: StudyStorage) -> Iterator[None]:
    """Close a storage if the block raises, since its caller then does not get it."""
    try:
        yield
    except BaseException:
        storage.close()
        raise


def start_study(
    spec: StudySpec, *, keep_budget: bool = False, accept_code_change: bool = False, widen: bool = False
) -> OpenStudy:
    """Create the study, or open it to resume it, and give it its budget of trials.

    Args:
        spec: The study file.
        keep_budget: Keep the budget of a study that has one, and do not compare its code with the code here; for a
            process that does not train while others may.
        accept_code_change: If the code has changed since the study was started, store the change and continue.
        widen: If the search space is wider than it was, store that and continue; see `hpo.config.widening`.

    Raises:
        InputError: The sampler, the pruner or the space can't be used, or the study was started with another
            config or other code.
        StudyError: The storage can't be opened.
    """
    refuse_what_needs_a_space(spec)
    refuse_output_of_others(spec)
    space = SearchSpace.from_spec(spec)
    check_where(spec, space)
    sampler, scheduler, pruner = make_sampler(spec, space), make_scheduler(spec), make_pruner(spec)
    try_out(spec, space, sampler, pruner)
    check_initial_trials(spec, space)
    storage = _opened_storage(spec, create=True)
    with closing_on_error(storage):
        study, is_new = _created_or_loaded(spec, storage, sampler, pruner)
        wider = None if is_new else wider_config(spec, study, widen=widen)
        opened = OpenStudy(spec, space, storage, study, scheduler=scheduler)
        accepted = [] if is_new or keep_budget else _settle_code(opened, accept=accept_code_change)
        widened = [] if wider is None else [store_wider(spec, study, storage, stored_config(spec), wider)]
        _show_widened(study, space)
        set_budget = not keep_budget or BUDGET_ATTR not in study.user_attrs
        if set_budget:  # before the first trial is added
            _set_budgets(opened)
        if is_new:
            write_note(opened)
        opened = replace(opened, notes=[*widened, *accepted, *begin(spec, space, storage, study)])
        if set_budget and isinstance(sampler, ExhaustiveSampler):  # trials were enqueued beside the grid's points
            storage.set_budget(opened.study_id, budget_of(spec, study))
        if study.user_attrs.get(MAX_EPOCHS_ATTR) != spec.trial_epochs:
            study.set_user_attr(MAX_EPOCHS_ATTR, spec.trial_epochs)
        return opened


def _set_budgets(opened: OpenStudy) -> None:
    """Store how many trials and epochs the study may have; with a larger budget an ended study resumes."""
    opened.storage.begin_grants(opened.study_id)
    budgets = {BUDGET_ATTR: budget_of(opened.spec, opened.study), EPOCHS_ATTR: opened.spec.study.epochs}
    set_budgets(opened.storage, opened.study_id, budgets)


def load_study(spec: StudySpec, owner: Owner | None = None, pooler: Path | None = None) -> OpenStudy:
    """Open a study that exists.

    Args:
        spec: The study file.
        owner: The owner that takes trials; None to only read the study.
        pooler: As of `hpo.storage.opening.open_storage`.

    Raises:
        StudyError: There is no such study; or an owner is given and the study's code is not the code here.
    """
    space = SearchSpace.from_spec(spec)
    if owner is not None:
        owner = replace(owner, code=code_identity(spec).hash)
    storage = _opened_storage(spec, create=False, owner=owner, pooler=pooler)
    if owner is None:
        cache = StudyCache(storage)
    else:
        cache = StudyCache(storage, max_age=MAX_AGE, most=most_shown(spec, space))
    with closing_on_error(storage):
        # Code of the study or of others: a KeyError of theirs is not one of the database.
        sampler, scheduler, pruner = make_sampler(spec, space), make_scheduler(spec), make_pruner(spec)
        try:
            study = optuna.load_study(storage=cache, study_name=spec.study.name, sampler=sampler, pruner=pruner)
            opened = OpenStudy(spec, space, storage, study, scheduler=scheduler)
            opened.refuse_other_code()
            cache.expect(opened.study_id, space.distributions)
            _show_widened(study, space)
        except KeyError:
            where = display_url(spec.storage_url)
            raise StudyError(
                f"no study named {spec.study.name} in {where}\n  fix: start it with `hpo run`"
            ) from None
        if owner is not None:
            import_models(spec)
        return opened


def _opened_storage(
    spec: StudySpec, *, create: bool, owner: Owner | None = None, pooler: Path | None = None
) -> StudyStorage:
    try:
        return open_storage(spec.storage_url, create=create, study=spec.study.name, owner=owner, pooler=pooler)
    except PlainStudyError as error:
        raise not_ours(spec) from error
    except InputError as error:
        raise spec.error(error.problem, path="run.storage", value=error.value, fix=error.fix) from error


def _settle_code(opened: OpenStudy, *, accept: bool) -> list[str]:
    """Refuse code that is not the study's, or accept it; returns notes for the user.

    Until the first trial has started, code may change freely and is stored anew.
    """
    record, code = CodeRecord.of(user_attrs_of(opened.study)), code_identity(opened.spec)
    problem = code_problem(record, code)
    if record is None or (problem and not _has_begun(opened)):
        keep_code(opened.study, code)
        return []
    if problem and not accept:
        raise opened.spec.error(problem, path="study.name", fix=code_fix(opened.spec))
    if problem:
        keep_code(opened.study, code, record)
        return [f"accepted: {problem}"]
    return []


def _has_begun(opened: OpenStudy) -> bool:
    """Whether a worker has ever taken a trial of the study."""
    with opened.storage.engine.connect() as conn:
        return ledger.has_begun(conn, opened.study_id)


def _show_widened(study: optuna.Study, space: SearchSpace) -> None:
    if WIDENED_ATTR in study.user_attrs:
        cast("StudyCache", storage_of(study)).show_as(space.distributions)


def _created_or_loaded(
    spec: StudySpec, storage: StudyStorage, sampler: BaseSampler, pruner: BasePruner
) -> tuple[optuna.Study, bool]:
    """The study, and whether it is new; a new one has its code and config stored."""
    try:
        study = optuna.create_study(
            storage=StudyCache(storage),
            study_name=spec.study.name,
            directions=study_directions(spec.study.goals),
            sampler=sampler,
            pruner=pruner,
        )
    except optuna.exceptions.DuplicatedStudyError:
        study = optuna.load_study(
            storage=StudyCache(storage), study_name=spec.study.name, sampler=sampler, pruner=pruner
        )
        return study, False
    keep_code_and_config(spec, study)
    return study, True
