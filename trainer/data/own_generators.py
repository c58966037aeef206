"""Finds, seeds and restores the random generators that data sets, samplers and collate functions hold."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.seeding import derive_seed

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random

# Separates the seeds of these generators from other uses of the same seed.
_OWN_STREAM = 0x09E4
# Limits of the search: a generator may be in a data set, one that it wraps, a transform or a list of these.
_DEPTH, _ENTRIES, _OBJECTS = 6, 64, 500
_LEAVES = (Tensor, np.ndarray, str, bytes, int, float, complex, type, ModuleType, FunctionType)
_GLOBAL = frozenset(
    id(item)
    for item in (
        torch.default_generator,
        np.random.mtrand._rand,  # noqa: SLF001
        random._inst,  # noqa: SLF001
    )
)


def own_generators(*holders: Any) -> list[Generator]:
    """The generators in the attributes of these objects and of what they hold, without the global ones."""
    found: list[Generator] = []
    seen, level = set(_GLOBAL), list(holders)
    for _ in range(_DEPTH):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if item is None or issubclass(kind, _LEAVES) or id(item) in seen or len(seen) > _OBJECTS:
                continue
            seen.add(id(item))
            if issubclass(kind, Generator) and not issubclass(kind, random.SystemRandom):
                found.append(item)
            else:
                below += _held(item)
        level = below
    return found


def seed_own(generators: Iterable[Generator], *parts: int) -> None:
    """Seed each generator from ``parts`` and its index."""
    for place, generator in enumerate(generators):
        seed = derive_seed(*parts[:1], _OWN_STREAM, *parts[1:], place)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        elif isinstance(generator, np.random.RandomState):  # its own ``seed`` works with only one bit generator
            generator.set_state(dict(type(generator._bit_generator)(seed).state))  # noqa: SLF001
        else:
            generator.seed(seed)


def seeds_of(generators: Iterable[Generator]) -> list[int]:
    """One seed from the present state of each generator; the states stay as they are."""
    generators = list(generators)
    with kept_generators(generators):
        return [_drawn(generator) for generator in generators]


@contextmanager
def kept_generators(generators: Iterable[Generator]) -> Iterator[None]:
    """Restore the present states of these generators at the end of the block."""
    before = [(generator, _state_of(generator)) for generator in generators]
    try:
        yield
    finally:
        for generator, state in before:
            _put_back(generator, state)


def _held(item: Any) -> Iterator[Any]:
    """The objects that an object holds; runs none of its own code, which could open a file or call a server."""
    kind = type(item)
    if issubclass(kind, dict):
        return islice(dict.values(item), _ENTRIES)
    if issubclass(kind, list):
        return islice(list.__iter__(item), _ENTRIES)
    if issubclass(kind, tuple):
        return islice(tuple.__iter__(item), _ENTRIES)
    if issubclass(kind, partial):
        return islice((item.func, *item.args, *item.keywords.values()), _ENTRIES)
    if issubclass(kind, MethodType):
        return iter((item.__self__,))
    # A proxy for another object, which it may have to make first.
    if any("__class__" in vars(each) for each in kind.__mro__[:-1]):
        return iter(())
    try:
        return islice(dict.values(object.__getattribute__(item, "__dict__")), _ENTRIES)
    except Exception:  # noqa: BLE001 - it has no ``__dict__``, or computes it, which may raise anything
        return iter(())


def _drawn(generator: Generator) -> int:
    if isinstance(generator, torch.Generator):
        return int(torch.randint(2**31, (), generator=generator, device=generator.device))
    return int(
        generator.integers(2**31)
        if isinstance(generator, np.random.Generator)
        else generator.randint(0, 2**31 - 1)
    )


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _put_back(generator: Generator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
