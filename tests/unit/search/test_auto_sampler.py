"""`sampler: auto`: what it stands for, that a study keeps it, and where it is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpo.config.space import SearchSpace
from hpo.errors import InputError
from hpo.report.data import study_report
from hpo.report.sections import overview
from hpo.search.auto_sampler import chosen_sampler
from hpo.search.samplers import make_sampler
from hpo.study.status import study_status
from tests.support.commands import STUDY, hpo, hpo_json, make_study
from tests.support.studies import Studies
from tests.unit.search.test_samplers import CONDITIONAL, play, quiet

pytestmark = pytest.mark.full

__all__ = ["quiet"]

AUTO = ("study.sampler={name: auto, seed: 3}", "study.n_trials=30")
GOALS = "study.objectives={val_loss: minimize, seconds: minimize}"


@pytest.mark.parametrize(
    ("text", "more", "name", "why"),
    [
        (STUDY, (), "curve_gp", "one objective"),
        (CONDITIONAL, (), "tpe", "conditions"),
        (STUDY, (GOALS, "study.pruner=none"), "tpe", "several objectives"),
    ],
)
def test_it_depends_on_goals_and_space(
    studies: Studies, text: str, more: tuple[str, ...], name: str, why: str
) -> None:
    found = chosen_sampler(studies.spec(*AUTO, *more, text=text))
    assert found.name == name
    assert found.why is not None
    assert why in found.why
    larger = chosen_sampler(studies.spec("study.sampler=auto", "study.n_trials=3000", *more, text=text))
    assert larger == found


def test_a_sampler_that_is_named_is_no_choice(studies: Studies) -> None:
    found = chosen_sampler(studies.spec("study.sampler=random"))
    assert (found.name, found.why, str(found)) == ("random", None, "random")


def test_it_draws_what_the_sampler_of_that_name_draws(studies: Studies) -> None:
    drawn = []
    for name in ("auto", "curve_gp"):
        with studies.open(f"study.sampler={{name: {name}, seed: 3}}", "study.n_trials=30", at=name) as (view,):
            drawn.append(play(view, 11))
            assert study_status(view)["sampler"]["name"] == "curve_gp"
    assert drawn[0] == drawn[1]


def test_it_takes_no_arguments(studies: Studies) -> None:
    spec = studies.spec("study.sampler={name: auto, n_startup_trials: 3}")
    with pytest.raises(InputError, match="auto takes no arguments"):
        make_sampler(spec, SearchSpace.from_spec(spec))


def test_people_see_which_it_is(tmp_path: Path, studies: Studies) -> None:
    file = make_study(tmp_path)
    said = "curve_gp (auto: one objective, no parameter under a condition)"
    assert said in hpo("check", file, "study.sampler=auto").stdout
    assert hpo_json("check", file, "study.sampler=auto")["sampler"]["name"] == "curve_gp"
    assert "sampler" not in hpo("check", file).stdout
    with studies.open(*AUTO) as (view,):
        assert said in overview(study_report(view))
        path = view.spec.path
    assert said in hpo("status", path, *AUTO).stdout


def test_people_see_the_scheduler_beside_it(studies: Studies) -> None:
    """With `freeze_thaw` it is what draws; the sampler alone would say otherwise."""
    more = (*AUTO, "study.scheduler=freeze_thaw", "study.pruner=none")
    with studies.open(*more) as (view,):
        shown, path = overview(study_report(view)), view.spec.path
    said = re.compile(r"scheduler\W.*freeze_thaw", re.DOTALL)
    assert said.search(shown)
    assert said.search(hpo("status", path, *more).stdout)
