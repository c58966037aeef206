"""Opens a study database; makes its folder and tables if they are missing, and brings them up to date."""

import functools
from pathlib import Path

import sqlalchemy as sa

from hpo.errors import StudyError
from hpo.storage import engines as database
from hpo.storage.engines import display_url
from hpo.storage.ledger import Owner
from hpo.storage.outage import Patience
from hpo.storage.schema import Tables, bring_up_to_date, create_schema, refuse_plain_study, tables_of
from hpo.storage.study_storage import StudyStorage


def open_storage(
    url: str,
    *,
    create: bool,
    study: str | None = None,
    owner: Owner | None = None,
    pooler: Path | None = None,
) -> StudyStorage:
    """Open a study database.

    Args:
        url: ``sqlite:///file``, ``postgresql://…`` or ``mysql://…``.
        create: Make the database's folder and tables if they are missing; the main process does so before any
            worker starts.
        study: Name of the study for which tables would be made; None for any.
        owner: On whose behalf this process runs trials; None if it runs none. With an owner it waits for a
            database that is away, because the main process has already reached it.
        pooler: The folder of a pooler to connect through (`hpo.storage.pooler`); None for none.

    Raises:
        InputError: The URL can't be used.
        StudyError: The database can't be reached, or doesn't exist and ``create`` is False.
        PlainStudyError: Another program has made the study, and the database has none of our tables.
    """
    parsed = database.normalize_url(url)
    file = database.sqlite_file(parsed)
    shown = display_url(url)
    with database.explained(parsed):
        if file is not None and not create and not file.exists():
            raise database.no_file(file, shown)
        if file is not None and create:
            file.parent.mkdir(parents=True, exist_ok=True)
        reach = functools.partial(_reach, parsed, owner, pooler, create=create, study=study)
        return reach() if owner is None else Patience(shown).run(reach)


def _reach(
    url: sa.URL, owner: Owner | None, pooler: Path | None, *, create: bool, study: str | None
) -> StudyStorage:
    text = url.render_as_string(hide_password=False)
    there = tables_of(url, pooler)
    if there is Tables.MISSING and not create:
        raise StudyError(f"{display_url(text)}: the database has no study of hpo\n  fix: `hpo run` makes it")
    if there is Tables.OUTDATED:
        bring_up_to_date(url)
    elif there is Tables.MISSING:
        if study is not None:
            refuse_plain_study(url, study)
        create_schema(url)
    storage = StudyStorage(text, owner)
    if pooler is not None:
        storage.connect_through(pooler)
    return storage
