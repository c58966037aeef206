"""From the text of `--on` to an engine."""

from __future__ import annotations

import pytest

from hpo.errors import InputError
from hpo.execution.engines import by_name, local
from hpo.execution.engines.by_name import Address, address_of, engine_of


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines that read every kind of text, of this one's module."""
    monkeypatch.setattr(by_name, "_MODULES", {"local": "local", "ray": "local", "slurm": "local"})
    monkeypatch.setattr(local, "KEYS", ("nodes", "time", "gres"))


@pytest.mark.parametrize(
    ("text", "place", "options"),
    [
        ("local", "", {}),
        (" slurm: nodes=4, time=1:30:00 ", "", {"nodes": "4", "time": "1:30:00"}),
        ("slurm:nodes=a,b,gres=gpu:2", "", {"nodes": "a,b", "gres": "gpu:2"}),
        ("ray:local,nodes=3", "local", {"nodes": "3"}),
        ("ray://head:10001", "ray://head:10001", {}),
        ("ray://head:10001,nodes=3", "ray://head:10001", {"nodes": "3"}),
        ("slurm:time=a=b", "", {"time": "a=b"}),
    ],
)
def test_a_text_is_read(text: str, place: str, options: dict[str, str]) -> None:
    kind = text.strip().partition(":")[0]
    assert address_of(text) == Address(text, kind, place, options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "slrum:x=3",
            "--on: there is no engine named 'slrum'\n  value: slrum:x=3\n  fix: did you mean `slurm`",
        ),
        ("", "--on: there is no engine named ''"),
        (
            "slurm:node=3",
            "--on: the engine `slurm` has no key 'node'\n  value: slurm:node=3\n  fix: did you mean `nodes`?",
        ),
        ("slurm:nodes=3,nodes=4", "--on: `nodes` stands there twice"),
        ("slurm:nodes=", "--on: `nodes` has no value"),
    ],
)
def test_a_text_that_fits_no_engine_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        address_of(text)
    assert str(caught.value).startswith(message)


def test_this_machine_has_no_other_place() -> None:
    with pytest.raises(InputError, match="write `local`"):
        engine_of(address_of("local:elsewhere"))
