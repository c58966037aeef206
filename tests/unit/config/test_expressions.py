"""Expressions over parameters: what they are made of, what they come to, and where they are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hpo.config.conditions import Condition
from hpo.config.expressions import ExpressionError, arithmetic, parsed
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec, load_spec
from hpo.errors import InputError
from hpo.study.initial_trials import base_point
from hpo.study.queue import checked_point

POINT: dict[str, Any] = {
    "m.a": 64,
    "m.b": 4,
    "o.x": 0.1,
    "o.name": "sgd",
    "m.w": "[8, 16]",
    "m.n": None,
    "m.t": True,
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("m.a % m.b == 0", True),
        ("m.a // m.b > 16", False),
        ("m.b <= m.a <= 64", True),
        ("m.b < m.a < 64", False),
        ("o.x + 0.2 <= 0.3", True),
        ("o.x * 3 == 0.3", True),
        ("o.x + 0.2 > 0.3", False),
        ("o.x * 3 % 0.1 == 0 and o.x * 7 % o.x == 0", True),
        ("0.3 % o.x == 0 and 0.7 % o.x == 0 and -0.3 % o.x == 0", True),
        ("0.3 // o.x == 3 and 0.3 // 0.1 >= 3 and -0.7 // o.x == -7", True),
        ("0.35 // o.x == 3 and 0.35 % o.x == 0.05 and -0.35 // o.x == -4 and -0.35 % o.x == 0.05", True),
        ("m.a % 0.1 == 0 and m.a // 0.5 == 128 and 0.3 // m.a == 0 and 0.3 % m.a == 0.3", True),
        ("0.3 % (m.b - 4) == 0 or 0.3 // (m.b - 4) == 0", False),
        ("o.name in ['sgd', 'adam'] and not m.b == 3", True),
        ("o.name not in ('sgd',) or m.b ** 2 == 16", True),
        ("m.w == [8, 16]", True),
        ("m.w in [[8], [16]]", False),
        ("m.n == null and m.t == true and m.t != 1", True),
        ("-m.b + +5 == 1", True),
        ("m.missing > 3", True),
        ("m.missing > 3 and m.a == 1", True),
        ("m.a / (m.b - 4) > 1", False),
        ("m.b ** 9 ** 9 > 1", False),
        ("m.n < 3", False),
        ("(m.b - 68) ** 0.5 < 3", False),
        ("(m.b - 4) ** -1 < 3", False),
    ],
)
def test_what_an_expression_comes_to(text: str, holds: bool) -> None:
    assert Condition(text, "where[0]", text).holds(POINT) is holds


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("m.a > f(m.b)", 7, "a call"),
        ("m.a > m.b.real()", 7, "a call"),
        ("m.a = 3", 5, "invalid syntax"),
        ("m.a > 'x'.join", 7, "an attribute of a value"),
        ("m.a > (lambda: 3)", 8, "a function"),
        ("3 if m.a else 4", 1, "if … else"),
        ("m.a > m.b @ 2", 7, "MatMult"),
        ("[x for x in m.a]", 1, "this can't stand"),
        ("f'{m.a}' == 'b'", 1, "a formatted text"),
        ("m.a in m.b", 8, "after `in` comes a list"),
        ("m.a > b'x'", 7, "this can't"),
        ("m.a > ...", 7, "this can't"),
        ("(" * 500 + "m.a" + ")" * 500, 1, "characters"),
        ("-" * 900 + "m.a", 1, ""),
        ("", 1, "not an expression"),
    ],
)
def test_what_is_none_says_where(text: str, column: int, problem: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parsed(text * (2 if "characters" in problem else 1))
    assert problem in str(caught.value)
    assert caught.value.column == column or not problem or "nested" in str(caught.value)
    assert caught.value.fix


@given(st.data())
def test_an_interval_holds_every_value(data: st.DataObject) -> None:
    numbers = st.integers(1, 9).map(str) | st.sampled_from(["m.a", "m.b", "m.c"])
    pairs = lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//"]), inner)  # noqa: E731
    text = data.draw(
        st.recursive(numbers, lambda inner: pairs(inner).map(lambda x: f"({x[0]} {x[1]} {x[2]})"), max_leaves=6)
    )
    known = {
        name: sorted(data.draw(st.tuples(st.integers(1, 20), st.integers(1, 20))))
        for name in ("m.a", "m.b", "m.c")
    }
    found = arithmetic(text)
    assert found.interval is not None
    try:
        low, high = found.interval({name: (each[0], each[1]) for name, each in known.items()})
    except ExpressionError:  # a divisor that may be zero
        return
    point = {name: data.draw(st.integers(*each)) for name, each in known.items()}
    assert low - 1e-9 <= found.value(point) <= high + 1e-9


# ---- in a study file

BASE: dict[str, Any] = {
    "study": {"name": "s"},
    "data": {"_target_": "data.load"},
    "model": {"_target_": "model.Net", "hidden": 64, "heads": 4, "layers": 2},
    "loss": {"_target_": "torch.nn.MSELoss"},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
}
ENTRIES: dict[str, Any] = {
    "model.hidden": {"type": "int", "low": 8, "high": 128},
    "model.heads": {"type": "categorical", "choices": [1, 2, 4, 8]},
    "optimizer.lr": {"type": "float", "low": 1e-4, "high": 1e-1, "log": True},
}


def spec_of(folder: Path, where: Any = (), **entries: Any) -> StudySpec:
    path = folder / "study.yaml"
    space = {**ENTRIES, **{name.replace("__", "."): entry for name, entry in entries.items()}}
    head = "where: " + (
        yaml.safe_dump(list(where), default_flow_style=True) if not isinstance(where, str) else where
    )
    path.write_text(head.strip() + "\n" + yaml.safe_dump({**BASE, "search_space": space}, sort_keys=False))
    return load_spec(path)


@pytest.mark.parametrize(
    ("where", "said", "fix"),
    [
        ("model.hiden % 2 == 0", "column 1: `model.hiden` is not searched", "did you mean `model.hidden`?"),
        (
            "model.hidden % model.layers == 0",
            "column 16: `model.layers` is not searched",
            r"`\$\{model.layers\}` .* 2;",
        ),
        ("model.hidden.real > 1", "column 1: `model.hidden.real` is not searched", "did you mean `model.hidden`"),
        ("abs(model.hidden) > 1", "column 1: a call can't stand", "use parameters"),
        (
            '"model.hidden > ${model.heads}"',
            r"`\$\{model.heads\}` is the base config's value",
            "write `model.heads`,",
        ),
        (
            '"model.hidden > ${ model.heads }"',
            r"`\$\{model.heads\}` is the base config's value",
            "write `model.heads`,",
        ),
        ("\"model[''] > 1\"", r"column 1: `model\[\]` is not searched", "searched are"),
        ("model.hidden", "is a value, and nothing that holds or not", "write a comparison"),
        ("1 < 2", "names no parameter", "searched are"),
        ("[1]", "must be a list of expressions", "write for example"),
    ],
)
def test_what_is_wrong_with_where_is_said_with_its_place(tmp_path: Path, where: str, said: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        spec_of(tmp_path, where)
    assert caught.match(rf"study.yaml:1: where(\[0\])?: {said}")
    assert caught.match(f"fix: .*{fix}")


def test_a_parameter_that_python_has_no_name_for_is_written_in_brackets(tmp_path: Path) -> None:
    free = {"type": "float", "low": 0.5, "high": 2.0}
    bounded = {"type": "float", "low": "model.params['lambda'] / 2", "high": 2.0}
    entries = {"model.params.lambda": free, "model.params.my-x": bounded}
    spec = spec_of(tmp_path, ["model.params['lambda'] <= model.params['my-x'] * model['heads']"], **entries)
    assert spec.search_space["model.params.my-x"].low == 0.25  # type: ignore[union-attr]
    in_where, bound = spec.where
    assert in_where.names == {"model.params.lambda", "model.params.my-x", "model.heads"}
    assert bound.names == {"model.params.lambda", "model.params.my-x"}
    point = {"model.params.lambda": 1.0, "model.params.my-x": 0.25, "model.heads": 2}
    assert [in_where.holds(point), bound.holds(point)] == [False, False]
    assert in_where.holds({**point, "model.heads": 4})


def test_a_parameter_in_brackets_without_quotes_is_named_as_the_search_space_has_it(tmp_path: Path) -> None:
    free = {"type": "float", "low": 0.5, "high": 2.0}
    spec = spec_of(tmp_path, ["model.params[rate] >= 1"], **{"model.params[rate]": free})
    assert spec.where[0].names == {"model.params[rate]"}


@pytest.mark.parametrize(
    ("where", "said", "fix"),
    [
        ("model.lambda > 1", "column 7: is not an expression", r"write `['lambda']` in place of `.lambda`"),
        ("model.my-x > 1", "column 1: `model.my` is not searched", "did you mean `model['my-x']`?"),
        (
            "model.params['my-z'] > 1",
            "column 1: `model.params.my-z` is not searched",
            "model['lambda'], model['my-x']",
        ),
        ("1 < 2", "names no parameter", "model['my-x'], loss..weight"),
    ],
)
def test_the_fix_shows_how_such_a_parameter_is_written(tmp_path: Path, where: str, said: str, fix: str) -> None:
    free = {"type": "float", "low": 0.5, "high": 2.0}
    with pytest.raises(InputError) as caught:
        spec_of(tmp_path, [where], **{"model.lambda": free, "model.my-x": free, "loss..weight": free})
    assert said in caught.value.problem
    assert fix in caught.value.fix


def test_a_text_of_the_config_is_written_in_quotes_in_where(tmp_path: Path) -> None:
    kind = {"type": "categorical", "choices": ["torch.nn.MSELoss", "torch.nn.L1Loss"]}
    with pytest.raises(InputError) as caught:
        spec_of(tmp_path, ["model.kind == loss._target_"], model__kind=kind)
    assert caught.value.fix.startswith('write `"${loss._target_}"`, in quotes, for its value in the config, ')
    spec = spec_of(tmp_path, ['model.kind == "${loss._target_}"'], model__kind=kind)
    assert spec.where[0].text == 'model.kind == "torch.nn.MSELoss"'


def test_where_may_name_what_the_config_holds(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, ["model.hidden % ${model.layers} == 0"])
    assert spec.where[0].text == "model.hidden % 2 == 0"
    assert "where" not in spec.resolve()
    assert load_spec(spec.path, ['where=["model.hidden > 9"]']).where[0].text == "model.hidden > 9"


def test_a_bound_is_as_wide_as_what_it_depends_on(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        model__inner={"type": "int", "low": "model.heads * 2", "high": "model.hidden // 2", "log": True},
        model__deep={"type": "int", "low": 2, "high": "model.inner", "step": 4},
        optimizer__eta={"type": "float", "low": 0, "high": "optimizer.lr / 10"},
    )
    space = SearchSpace.from_spec(spec)
    assert [(space.params[path].low, space.params[path].high) for path in list(ENTRIES)[:1]] == [(8, 128)]  # type: ignore[union-attr]
    inner, deep, eta = (space.params[path] for path in ("model.inner", "model.deep", "optimizer.eta"))
    assert (inner.low, inner.high) == (2, 64)  # type: ignore[union-attr]
    assert (deep.low, deep.high) == (2, 62)  # type: ignore[union-attr]
    assert (eta.low, eta.high) == (0.0, 0.01)  # type: ignore[union-attr]
    point = {"model.hidden": 32, "model.heads": 4, "model.inner": 16, "model.deep": 14, "optimizer.lr": 0.01}
    for eta_value, violated in ((0.001, None), (0.0011, "optimizer.eta ≤ optimizer.lr / 10")):
        found = space.violated({**point, "optimizer.eta": eta_value})
        assert (found.text if found else None) == violated
    assert (
        space.violated({**point, "optimizer.eta": 0.0, "model.inner": 17}).text
        == "model.inner ≤ model.hidden // 2"
    )  # type: ignore[union-attr]
    assert (
        space.violated({**point, "optimizer.eta": 0.0, "model.inner": 7}).place == "search_space[model.inner].low"
    )  # type: ignore[union-attr]
    assert space.distributions["model.inner"].high == 64  # type: ignore[attr-defined]


def test_rounding_takes_no_value_from_a_bound(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        model__base={"type": "categorical", "choices": [100]},  # 100 * 0.29 = 28.999999999999996, 100 * 1.1 > 110
        model__inner={"type": "int", "low": "model.base * 1.1", "high": 110},
        model__deep={"type": "int", "low": 2, "high": "model.base * 0.29"},
        model__rate={"type": "float", "low": 0.0, "high": "model.base * 0.29", "step": 1.0},
    )
    inner, deep, rate = (spec.search_space[f"model.{name}"] for name in ("inner", "deep", "rate"))
    assert (inner.low, inner.high) == (110, 110)  # type: ignore[union-attr]
    assert (deep.low, deep.high) == (2, 29)  # type: ignore[union-attr]
    assert (rate.low, rate.high) == (0.0, 29.0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"low": 1, "high": "model.hiden"}, r"\[model.x\].high: column 1: `model.hiden` is not searched"),
        ({"low": 1, "high": "model.x"}, "bounds depend on each other: model.x → model.x"),
        ({"low": 1, "high": "model.hidden % 2"}, "is not a number that a range can end at"),
        ({"low": 1, "high": "model.hidden / (model.heads - 2)"}, "column 17: may be divided by zero"),
        ({"low": "model.heads", "high": 20, "step": 2}, "steps count from `low`"),
        ({"low": 200, "high": "model.hidden"}, "is empty for every trial: it ends at 200 and 128"),
        ({"low": "model.heads - 1", "high": 20, "log": True}, "a logarithmic range starts above zero"),
        ({"low": 1, "high": "${model.hidden}"}, r"`\$\{model.hidden\}` is the base config's value"),
        ({"low": 1, "high": "model.hidden * 1e308"}, "has no end: its numbers are too large"),
        ({"low": 1, "high": "wide"}, "must be a whole number"),
        ({"low": 1, "high": "model.kind"}, "`model.kind` has choices that are no numbers"),
    ],
)
def test_a_bound_that_can_be_none_is_refused(tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    kind = {"type": "categorical", "choices": ["a", 3]}
    with pytest.raises(InputError, match=said):
        spec_of(tmp_path, model__x={"type": "int", **entry}, model__kind=kind)


def test_what_people_give_satisfies_the_conditions(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, ["model.hidden % model.heads == 0", "model.heads >= 4"])
    space, sampler = SearchSpace.from_spec(spec), None
    whole = {"model.hidden": 33, "model.heads": 4, "optimizer.lr": 0.01}
    with pytest.raises(
        InputError, match=r"where\[0\]: violates a condition .* model.heads = 4, model.hidden = 33\n"
    ):
        checked_point(space, sampler, whole)  # type: ignore[arg-type]
    assert checked_point(space, sampler, {"model.hidden": 32}) == {"model.hidden": 32}  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no point with model.heads=2 satisfies `where`"):
        checked_point(space, sampler, {"model.heads": 2})  # type: ignore[arg-type]
    assert base_point(spec, space)["model.hidden"] == 64
    with pytest.raises(InputError, match=r"where\[0\]: the base config can't be the first trial"):
        base_point(load_spec(spec.path, ["model.hidden=66"]), space)


def test_a_choice_can_not_follow_another_parameter(tmp_path: Path) -> None:
    choices = {"type": "categorical", "choices": [{"_target_": "torch.nn.ReLU", "size": "${model.hidden}"}, None]}
    with pytest.raises(InputError, match=r"choices: `\$\{model.hidden\}` is the base config's value"):
        spec_of(tmp_path, model__kind=choices)
    own = {"type": "categorical", "choices": ["${model.layers}", 7]}
    spec = spec_of(tmp_path, model__layers=own)
    assert spec.config.search_space["model.layers"].choices == (2, 7)  # type: ignore[union-attr]
