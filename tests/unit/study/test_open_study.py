"""Who is refused a study, or fails to open it, leaves no file of its database open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from hpo.config.study_modules import forget_modules
from hpo.errors import HpoError
from hpo.storage.ledger import Owner
from hpo.storage.outage import DatabaseError
from hpo.study import open_study
from hpo.study.joining import join_study
from hpo.study.open_study import load_study, start_study
from tests.support.commands import MODEL
from tests.support.studies import Studies


def files_of(study: Studies) -> list[Path]:
    found = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    return [file for file in found if file.is_relative_to(study.folder)]


def fail(*_: object) -> NoReturn:
    raise DatabaseError("the disk is full")


def with_other_config(studies: Studies) -> None:
    start_study(studies.spec("model.dropout=0.2"))


def with_other_code(studies: Studies) -> None:
    with studies.open() as (view,):
        view.study.ask()
    (studies.folder / "parts.py").write_text(MODEL.replace("nn.Tanh()", "nn.ReLU()"))
    forget_modules(studies.folder)  # as `hpo.run` does in a notebook
    start_study(studies.spec())


def where_starting_fails(studies: Studies) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_study, "begin", fail)
        start_study(studies.spec())


def where_loading_fails(studies: Studies) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_study, "import_models", fail)
        load_study(studies.spec(), Owner.current())


def with_another_name(studies: Studies) -> None:
    load_study(studies.spec("study.name=other", f"run.storage={studies.spec().storage_url}"))


def joining_with_other_config(studies: Studies) -> None:
    join_study(studies.spec("model.dropout=0.2"))


@pytest.mark.parametrize(
    "refused",
    [
        with_other_config,
        with_other_code,
        where_starting_fails,
        where_loading_fails,
        with_another_name,
        joining_with_other_config,
    ],
)
def test_nothing_stays_open(studies: Studies, refused: Callable[[Studies], None]) -> None:
    start_study(studies.spec()).storage.close()
    with pytest.raises(HpoError) as caught:  # which keeps the frames, as a notebook does
        refused(studies)
    assert caught.tb
    assert files_of(studies) == []


@pytest.mark.parametrize("part", ["make_sampler", "make_pruner", "make_scheduler", "import_models"])
def test_a_key_error_of_a_part_is_not_one_of_the_database(
    studies: Studies, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("of a plugin")

    with studies.open() as (view,):
        monkeypatch.setattr(open_study, part, broken)
        with pytest.raises(KeyError, match="of a plugin"):
            load_study(view.spec, Owner.current())
