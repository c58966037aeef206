"""What the table of callbacks says of each is true, and nothing that it must know of is forgotten."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from hpo.trial.callbacks import CALLBACKS
from hpo.trial.place import RunPlace
from hpo.trial.trackers import Shown
from tests.support.studies import Studies
from trainer import Callback, callbacks

#: They are for Python code: no study file can give them what they need, or hpo does the same itself.
NOT_OFFERED = {"ConfigSaver", "LRFinder"}


def shown(studies: Studies) -> Shown:
    spec = studies.spec()
    return Shown(spec, RunPlace(studies.folder / "attempt-1", "trial-0", {"optimizer.lr": 0.1}), spec.resolve())


def test_every_shipped_callback_has_a_row() -> None:
    shipped = {name for name in callbacks.__all__ if name[0].isupper()}
    missing = shipped - {row.kind.__name__ for row in CALLBACKS.values()} - NOT_OFFERED
    assert not missing, (
        f"no study file can name {sorted(missing)}: add a row to CALLBACKS in hpo/trial/callbacks.py"
    )


def test_every_file_of_a_callback_is_exported() -> None:
    folder = Path(callbacks.__file__).parent
    defined = {
        name
        for path in folder.glob("*.py")
        for name, kind in vars(__import__(f"trainer.callbacks.{path.stem}", fromlist=["_"])).items()
        if path.stem != "__init__" and inspect.isclass(kind) and issubclass(kind, Callback)
        if kind.__module__ == f"trainer.callbacks.{path.stem}" and not name.startswith("_")
    }
    bases = {base.__name__ for name in callbacks.__all__ if name[0].isupper() for base in bases_of(name)}
    missing = defined - set(callbacks.__all__) - bases
    assert not missing, f"{sorted(missing)} can't be imported from trainer.callbacks: add to its __init__"


def bases_of(name: str) -> tuple[type, ...]:
    return tuple(inspect.getmro(getattr(callbacks, name))[1:])


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_row_gives_what_it_says_and_the_class_takes_it(studies: Studies, name: str) -> None:
    row, taken = CALLBACKS[name], inspect.signature(CALLBACKS[name].kind).parameters
    filled = row.fill(shown(studies), {})
    assert set(row.given) <= filled.keys() <= taken.keys()
    assert set(row.given) <= taken.keys()
    assert not set(row.given) & inspect.signature(row.offered).parameters.keys()


@pytest.mark.parametrize("name", [name for name, row in CALLBACKS.items() if row.given])
def test_what_is_given_replaces_what_was_written(studies: Studies, name: str) -> None:
    row = CALLBACKS[name]
    written = row.fill(shown(studies), dict.fromkeys(row.given, "written"))
    assert "written" not in [written[argument] for argument in row.given]


def test_what_is_required_is_on() -> None:
    assert [name for name, row in CALLBACKS.items() if row.required and not row.default] == []
