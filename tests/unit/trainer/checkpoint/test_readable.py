"""What a checkpoint may hold: exactly what can be read back, with NumPy's scalars as Python's."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import pathlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.unit.trainer.support import assert_same, make_model, make_trainer, quick, regression, through_file
from trainer import Callback
from trainer.callbacks import Checkpoint
from trainer.checkpoint.manager import newest_checkpoint
from trainer.checkpoint.readable import UnreadableError, readable
from trainer.recorded import Metrics


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Own(torch.Tensor):
    pass


class Point(NamedTuple):
    x: int
    y: int


KEPT: dict[str, Any] = {
    "none": None,
    "big": 10**50,
    "text": "a\ud800",
    "bytes": b"a",
    "complex": 1j,
    "set": {1, 2},
    "tuple": (1, (2.0, [True])),
    "keys": {1: 2, (3, 4): 5, None: 6},
    "ordered": collections.OrderedDict(a=1),
    "counter": collections.Counter("aab"),
    "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "parameter": nn.Parameter(torch.ones(1)),
    "buffer": nn.Buffer(torch.ones(1)),
    "sparse": torch.eye(2).to_sparse(),
    "generator": random.getstate(),
    "module": make_model().state_dict(),
}

CONVERTED = {
    "float64": (np.float64(0.1), 0.1),
    "float32": (np.float32(0.5), 0.5),
    "int64": (np.int64(3), 3),
    "bool": (np.bool_(True), True),
    "complex": (np.complex64(1j), 1j),
    "text": (np.str_("a"), "a"),
    "list": ([1, np.float64(2)], [1, 2.0]),
    "tuple": ((np.int8(1), (np.int8(2),)), (1, (2,))),
    "set": ({np.int64(1)}, {1}),
    "key": ({np.int64(1): [np.float64(2)]}, {1: [2.0]}),
    "ordered": (collections.OrderedDict(a=np.float64(1)), collections.OrderedDict(a=1.0)),
    "metrics": (Metrics(a=1), {"a": 1.0}),
}

REFUSED: dict[str, Any] = {
    "array": np.ones(2),
    "date": datetime.date(2020, 1, 1),
    "NumPy's date": np.datetime64("2020"),
    "long": np.longdouble(1),
    "enum": Colour.RED,
    "decimal": decimal.Decimal(1),
    "path": pathlib.PurePosixPath("a"),
    "own text": Text("a"),
    "own tensor": torch.ones(1).as_subclass(Own),
    "named tuple": Point(1, 2),
    "default": collections.defaultdict(int, a=1),
    "deque": collections.deque([1]),
    "frozen set": frozenset([1]),
    "module": nn.Linear(1, 1),
    "function": len,
    "class": int,
    "generator": torch.Generator(),
    "range": range(3),
    "empty bytes": b"",
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_can_be_read_back_is_handed_on_as_it_is(kind: str) -> None:
    value = KEPT[kind]
    assert readable(value) is value
    assert type(through_file({"value": value})["value"]) is type(value)


@pytest.mark.parametrize("kind", CONVERTED)
def test_scalars_of_numpy_become_plain(kind: str) -> None:
    value, expected = CONVERTED[kind]
    result = readable({"value": value})
    assert_types(result["value"], expected)
    assert_types(through_file(result)["value"], expected)


def assert_types(value: Any, expected: Any) -> None:
    assert (type(value), value) == (type(expected), expected)
    for one, other in zip(leaves(value), leaves(expected), strict=True):
        assert type(one) is type(other)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for pair in value.items() for item in pair for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list | tuple | set) else [value]


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused_by_the_keys_that_lead_to_it(kind: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - torch, pickle and copyreg raise several
        through_file({"value": REFUSED[kind]})
    name = type(REFUSED[kind]).__qualname__
    with pytest.raises(
        UnreadableError, match=rf"^user_state\.mine\[1\] is a [\w.]*{name}, which can't be read back"
    ):
        readable({"user_state": {"mine": [0, REFUSED[kind]]}})


def test_what_contains_itself_is_refused() -> None:
    loop: dict[str, Any] = {}
    loop["again"] = loop
    with pytest.raises(UnreadableError, match=r"^a\.again\.again is nested too deep, or contains itself"):
        readable({"a": loop})


def test_a_type_that_the_user_declared_safe_is_kept() -> None:
    with torch.serialization.safe_globals([Colour]):
        assert readable({"a": Colour.RED})["a"] is Colour.RED


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
leaf = plain | st.binary(min_size=1) | st.binary().map(bytearray) | st.floats().map(np.float64)


@given(
    st.recursive(leaf, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner))
)
@quick(80)
def test_every_tree_comes_back_from_a_file_as_it_was_made_readable(tree: Any) -> None:
    made = readable({"tree": tree})
    assert_same(through_file(made), made)


class Keeps(Callback):
    """Has state of any kind."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"seen": [0, self.value]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["seen"][1]


@pytest.mark.parametrize("background", [False, True])
def test_a_run_ends_at_the_first_checkpoint_that_could_not_be_read_back(tmp_path: Path, background: bool) -> None:
    trainer = make_trainer([Keeps(datetime.date(2020, 1, 1)), Checkpoint(tmp_path, background=background)])
    with pytest.raises(UnreadableError, match=r"^callbacks\.Keeps\.seen\[1\] is a datetime\.date, "):
        trainer.fit(regression(8), regression(4))
    assert trainer.state.epoch == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("background", [False, True])
def test_numbers_of_numpy_anywhere_in_a_run_come_back_plain(tmp_path: Path, background: bool) -> None:
    def made(*callbacks: Callback) -> Any:
        model = make_model()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=np.float64(0.01), betas=(np.float64(0.9), 0.99), weight_decay=np.float32(0.5)
        )
        scheduler = LambdaLR(optimizer, lambda epoch: np.float64(0.5) ** epoch)
        return make_trainer(callbacks, model=model, optimizer=optimizer, scheduler=scheduler)

    def note(trainer: Any) -> None:
        trainer.state.user_state["best"] = {np.int64(1): np.float64(0.25)}

    trainer = made(Keeps(np.float64(2.5)), Checkpoint(tmp_path, background=background))
    trainer.callbacks.register("on_epoch_end", note)
    trainer.fit(regression(8), regression(4))
    found = newest_checkpoint([tmp_path])
    assert found is not None
    assert found[1]["state"]["user_state"] == {"best": {1: 0.25}}
    fresh = made(Keeps(0.0), Checkpoint(tmp_path))
    fresh.load_state_dict(found[1])
    state = fresh.state_dict()
    assert (state["callbacks"]["Keeps"], state["optimizer"]["param_groups"][0]["weight_decay"]) == (
        {"seen": [0, 2.5]},
        0.5,
    )


def test_what_a_callback_adds_to_a_checkpoint_is_checked_too(tmp_path: Path) -> None:
    class Adds(Callback):
        def on_save_checkpoint(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"made": decimal.Decimal(1)}

    with pytest.raises(UnreadableError, match=r"^mine\.made is a decimal\.Decimal"):
        make_trainer([Adds(), Checkpoint(tmp_path)]).fit(regression(8), regression(4))
