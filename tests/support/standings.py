"""Standings for tests of schedulers: by hand, drawn by hypothesis, or grown by a scheduler's own grants."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.scheduler import New, Next, Resume, Scheduler, Standing, Wait
from hpo.search.schedulers.seen import Seen

SPACE: Mapping[str, BaseDistribution] = {
    "optimizer.lr": FloatDistribution(1e-5, 1e-1, log=True),
    "model.layers": IntDistribution(1, 5),
    "optimizer._target_": CategoricalDistribution(["SGD", "AdamW"]),
    "optimizer.momentum": FloatDistribution(0.0, 0.99),
}
CONDITIONS = {"optimizer.momentum": {"optimizer._target_": ["SGD"]}}


def seen(
    number: int, values: Sequence[float] | Mapping[int, float] = (), state: str = "paused", **more: Any
) -> Seen:
    """A trial whose n-th value is that of epoch n, with a learning rate of its own."""
    by_step = values if isinstance(values, Mapping) else dict(enumerate(values, start=1))
    params = more.pop("params", {"optimizer.lr": 1e-5 * 1.1 ** (number + 1)})
    return Seen(number, params, by_step, state, **{"kinds": ("breadth",), **more})  # type: ignore[arg-type]


def standing(trials: Sequence[Seen] = (), **more: Any) -> Standing:
    """A study of a small space with a horizon of 27 epochs."""
    given = {"space": SPACE, "conditions": CONDITIONS, "horizon": 27, **more}
    return Standing(read=lambda: trials, **given)


@st.composite
def spaces(draw: Any) -> tuple[dict[str, BaseDistribution], dict[str, dict[str, list[Any]]]]:
    """Spaces of any kinds of parameters, some of them under conditions on choices before them."""
    kinds: list[Callable[[], BaseDistribution]] = [
        lambda: FloatDistribution(-1.0, 2.0),
        lambda: FloatDistribution(1e-4, 10.0, log=True),
        lambda: FloatDistribution(0.0, 1.0, step=0.25),
        lambda: FloatDistribution(0.5, 0.5),
        lambda: IntDistribution(-2, 5),
        lambda: IntDistribution(1, 64, log=True),
        lambda: IntDistribution(0, 100, step=10),
        lambda: CategoricalDistribution(["a", "b", None, True, 2.5]),
        lambda: CategoricalDistribution([64, 16, 32]),
        lambda: CategoricalDistribution(["only"]),
    ]
    space = {
        f"p{k}": kind() for k, kind in enumerate(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6)))
    }
    conditions = {}
    for name in list(space)[1:]:
        choices = {o: d for o, d in space.items() if o < name and isinstance(d, CategoricalDistribution)}
        if choices and draw(st.booleans()):
            other = draw(st.sampled_from(sorted(choices)))
            values = draw(st.lists(st.sampled_from(choices[other].choices), min_size=1, max_size=2))
            conditions[name] = {other: values}
    return space, conditions


@st.composite
def standings(draw: Any) -> Standing:
    """Studies at any moment: every state, curves with gaps, NaN and infinities, imported trials, any budget."""
    space, conditions = draw(spaces())
    horizon = draw(st.sampled_from([1, 2, 9, 50]))
    encoding = Encoding(space, conditions)
    values = st.one_of(st.floats(-5, 5), st.sampled_from([math.nan, math.inf, -math.inf, 1.0]))
    trials = []
    for number in range(draw(st.integers(0, 12))):
        units = [[draw(st.floats(0, 1)) for _ in range(len(encoding))]]
        params = encoding.params(encoding.snap(_array(units))[0])
        state = draw(st.sampled_from(["waiting", "running", "paused", "ended"]))
        curve = draw(st.dictionaries(st.integers(1, horizon), values, max_size=8))
        if max(curve, default=0) == horizon:
            state = "ended"
        until = draw(st.sampled_from([None, horizon]))
        imported = state == "ended" and draw(st.booleans())
        kinds = draw(st.lists(st.sampled_from(["", "initial", "breadth", "promotion", "model"]), max_size=3))
        whole = max(curve, default=0) == horizon
        source = draw(st.sampled_from([None, "pilot", "older"])) if imported else None
        marks = {"whole": whole, "imported": imported, "source": source}
        marks["taken_over"] = state == "ended" and draw(st.booleans())
        trials.append(Seen(number, params, curve, state, until, kinds, **marks))
    return Standing(
        read=lambda: trials,
        space=space,
        conditions=conditions,
        horizon=draw(st.sampled_from([None, horizon])),
        minimize=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        planned=draw(st.sampled_from([1, 4, 64])),
        n_trials=draw(st.sampled_from([None, len(trials), len(trials) + 3])),
        n_epochs=draw(st.sampled_from([None, 0, 40, 10_000])),
    )


def _array(rows: Sequence[Sequence[float]]) -> Any:
    import numpy as np

    return np.array(rows, dtype=np.float64).reshape(len(rows), -1)


def grown(
    scheduler: Scheduler, start: Standing, loss: Callable[[Mapping[str, Any], int], float], most: int = 10_000
) -> tuple[Standing, list[Next]]:
    """A study after one worker has done what the scheduler grants, until it waits, and the grants."""
    now, answers = start, []
    while len(answers) < most:
        answer = scheduler.next(now)
        answers.append(answer)
        if isinstance(answer, Wait):
            break
        now = after(now, answer, loss)
    return now, answers


def after(now: Standing, answer: New | Resume, loss: Callable[[Mapping[str, Any], int], float]) -> Standing:
    """A standing when a grant has been trained; a sampler would draw the first trial's parameters."""
    horizon = now.horizon or 27
    goal, trials = answer.until or horizon, list(now.trials)
    if isinstance(answer, New):
        params = trials[0].params if answer.params is None else answer.params
        trials.append(Seen(len(trials), params, {}, "running"))
    number = answer.number if isinstance(answer, Resume) else len(trials) - 1
    old = trials[number]
    values = {**old.values, **{epoch: loss(old.params, epoch) for epoch in range(old.epochs + 1, goal + 1)}}
    dead, whole = not math.isfinite(values[goal]), goal == horizon
    trials[number] = replace(
        old,
        values=values,
        state="ended" if dead or whole else "paused",
        until=answer.until,
        kinds=(*old.kinds, answer.why.kind),
        whole=whole,
    )
    return replace(now, read=lambda: trials, state=now.state if answer.state is None else answer.state)
