"""Arguments that a sampler or a pruner fails with later are refused at the start, and nothing is stored."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from hpo.config.space import SearchSpace
from hpo.config.spec import load_spec
from hpo.errors import InputError
from hpo.search.pruners import make_pruner
from hpo.search.samplers import make_sampler
from hpo.search.try_out import try_out
from hpo.study.open_study import start_study
from tests.support.commands import make_study
from tests.unit.search.test_samplers import quiet

__all__ = ["quiet"]


@pytest.mark.parametrize(
    "sampler",
    [
        "{name: tpe, n_ei_candidates: 0}",
        "{name: TPESampler, n_ei_candidates: 0, n_startup_trials: 20}",
        "{name: cmaes, allow_pickle: true, popsize: -1}",
        "{name: nsgaiii, population_size: 4, dividing_parameter: -1}",
        "{name: partial_fixed, fixed_params: {model.hidden: 4}, base_sampler: {name: tpe, n_ei_candidates: 0}}",
    ],
)
def test_an_argument_that_fails_once_trials_are_known_is_refused(tmp_path: Path, sampler: str) -> None:
    spec = load_spec(make_study(tmp_path), [f"study.sampler={sampler}"])
    with pytest.raises(InputError, match="can't be used with these arguments: ") as refused:
        start_study(spec)
    assert (refused.value.path, refused.value.file) == ("study.sampler", "command line")
    assert refused.value.value
    assert "Optuna's documentation" in refused.value.fix
    assert not spec.output_dir.exists()


@pytest.mark.parametrize(
    ("sampler", "trials"),
    [
        ("tpe", 1),
        ("{name: tpe, n_ei_candidates: 4}", 11),
        ("{name: tpe, n_startup_trials: 3}", 4),
        ("{name: tpe, n_startup_trials: 5000}", 101),
        ("{name: partial_fixed, fixed_params: {model.hidden: 4}, base_sampler: tpe}", 11),
        ("{name: curve_gp, n_startup_trials: 4}", 1),
        ("{name: qmc, qmc_type: halton}", 1),
    ],
)
def test_a_sampler_with_arguments_draws_until_it_looks_at_other_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str, trials: int
) -> None:
    made = list[optuna.Study]()
    create = optuna.create_study

    def created(**arguments: object) -> optuna.Study:
        made.append(create(**arguments))  # type: ignore[arg-type]
        return made[0]

    monkeypatch.setattr(optuna, "create_study", created)
    spec = load_spec(make_study(tmp_path), [f"study.sampler={sampler}"])
    space = SearchSpace.from_spec(spec)
    try_out(spec, space, make_sampler(spec, space), make_pruner(spec))
    assert len(made[0].trials) == trials


def test_several_objectives_are_tried_out_too(tmp_path: Path) -> None:
    goals = "study.objectives={val_loss: minimize, mae: minimize}"
    options = [goals, "study.pruner=none", "study.sampler={name: nsgaii, population_size: 3, swapping_prob: 0.1}"]
    spec = load_spec(make_study(tmp_path), options)
    space = SearchSpace.from_spec(spec)
    try_out(spec, space, make_sampler(spec, space), make_pruner(spec))
