"""Pruners by name on a real study: each builds, and ends what Optuna's own would."""

from __future__ import annotations

import optuna
import pytest
from optuna import pruners
from optuna.trial import TrialState

from hpo.errors import InputError
from hpo.search.predicted_loss.pruner import PredictedLossPruner
from hpo.search.pruners import PRUNERS, make_pruner
from hpo.study.open_study import OpenStudy
from tests.support.studies import Studies

QUICK = {
    "none": "",
    "median": "n_startup_trials: 1, n_warmup_steps: 0",
    "percentile": "percentile: 50.0, n_startup_trials: 1",
    "successive_halving": "min_resource: 1, reduction_factor: 2",
    "hyperband": "min_resource: 1, reduction_factor: 2",
    "threshold": "upper: 5.0",
    "patient": "patience: 1, wrapped_pruner: {name: threshold, upper: 5.0}",
    "wilcoxon": "p_threshold: 0.3, n_startup_steps: 1",
    "predicted_loss": "alpha: 0.3",
}


def own(name: str) -> pruners.BasePruner:
    """What a person would write with Optuna alone."""
    return {
        "none": pruners.NopPruner,
        "median": lambda: pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0),
        "percentile": lambda: pruners.PercentilePruner(50.0, n_startup_trials=1),
        "successive_halving": lambda: pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
        "hyperband": lambda: pruners.HyperbandPruner(min_resource=1, max_resource=4, reduction_factor=2),
        "threshold": lambda: pruners.ThresholdPruner(upper=5.0),
        "patient": lambda: pruners.PatientPruner(pruners.ThresholdPruner(upper=5.0), patience=1),
        "wilcoxon": lambda: pruners.WilcoxonPruner(p_threshold=0.3, n_startup_steps=1),
        "predicted_loss": lambda: PredictedLossPruner(max_epochs=4, alpha=0.3),
    }[name]()


def ends(study: optuna.Study, view: OpenStudy | None = None) -> list[int]:
    """The step at which each of some trials, better and worse, is ended; 0 for none."""
    ended = []
    for level in (1.0, 9.0, 2.0, 0.5, 8.0, 7.0, 0.4):
        trial = study.ask()
        at = 0
        for step in range(1, 5):
            trial.report(level + 0.1 * step, step)
            if trial.should_prune():
                at = step
                break
        study.tell(trial, None if at else level, TrialState.PRUNED if at else TrialState.COMPLETE)
        ended.append(at)
    return ended


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("name", PRUNERS)
def test_each_pruner_ends_what_optunas_own_ends(studies: Studies, name: str) -> None:
    overrides = (f"study.pruner={{name: {name}, {QUICK[name]}}}", "trainer.max_epochs=4", "study.n_trials=20")
    with studies.open(*overrides) as (view,):
        seen = ends(view.study)
    assert seen == ends(optuna.create_study(study_name="tiny", pruner=own(name)))
    assert any(seen) == (name != "none")


@pytest.mark.parametrize("kind", PRUNERS.values())
def test_each_pruner_goes_by_its_class_name_too(studies: Studies, kind: type[pruners.BasePruner]) -> None:
    name = next(short for short, known in PRUNERS.items() if known is kind)
    spec = studies.spec(f"study.pruner={{name: {kind.__name__}, {QUICK[name]}}}")
    assert isinstance(make_pruner(spec), kind)


def test_hyperband_knows_from_the_start_how_long_training_is(studies: Studies) -> None:
    hyperband = make_pruner(studies.spec("study.pruner=hyperband", "trainer.max_epochs=27"))
    assert isinstance(hyperband, pruners.HyperbandPruner)
    assert hyperband._max_resource == 27
    assert len(hyperband._pruners) == 4
    given = make_pruner(studies.spec("study.pruner={name: hyperband, max_resource: 9}"))
    assert isinstance(given, pruners.HyperbandPruner)
    assert given._max_resource == 9
    assert isinstance(make_pruner(studies.spec("study.pruner={name: hyperband, max_resource: auto}")), type(given))


SEARCHED = "search_space={trainer.max_epochs: {type: int, low: 3, high: 90}}"


def test_where_the_length_is_searched_hyperband_takes_that_of_the_longest_trial(studies: Studies) -> None:
    hyperband = make_pruner(studies.spec("study.pruner=hyperband", SEARCHED))
    assert isinstance(hyperband, pruners.HyperbandPruner)
    assert hyperband._max_resource == 90
    unknown = "search_space={trainer.validate_every: {type: int, low: 3, high: 90}}"
    with pytest.raises(InputError, match="needs `max_resource`"):
        make_pruner(studies.spec("study.pruner=hyperband", unknown))


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("trainer.max_epochs=50",), 5),
        (("trainer.max_epochs=9",), 0),
        ((SEARCHED,), 9),
        (("trainer.max_epochs=null", "trainer.max_steps=100"), 0),
        (("study.pruner={name: median, n_warmup_steps: 2}", "trainer.max_epochs=50"), 2),
    ],
)
def test_median_leaves_the_first_tenth_alone(studies: Studies, overrides: tuple[str, ...], steps: int) -> None:
    median = make_pruner(studies.spec("study.pruner=median", *overrides))
    assert isinstance(median, pruners.MedianPruner)
    assert median._n_warmup_steps == steps


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("name", [name for name in PRUNERS if name not in ("none", "patient")])
def test_patient_wraps_each_pruner(studies: Studies, name: str) -> None:
    wrapped = f"{{name: {name}, {QUICK[name]}}}"
    text = f"study.pruner={{name: patient, patience: 1, wrapped_pruner: {wrapped}}}"
    with studies.open(text, "trainer.max_epochs=4", "study.n_trials=20") as (view,):
        seen = ends(view.study)
    patient = pruners.PatientPruner(own(name), patience=1)
    assert seen == ends(optuna.create_study(study_name="tiny", pruner=patient))


def test_patient_wraps_a_pruner_by_name_or_with_arguments_or_none(studies: Studies) -> None:
    def wrapped(text: str) -> object:
        patient = make_pruner(studies.spec(f"study.pruner={{name: patient, patience: 2, wrapped_pruner: {text}}}"))
        assert isinstance(patient, pruners.PatientPruner)
        return patient._wrapped_pruner

    assert isinstance(wrapped("median"), pruners.MedianPruner)
    hyperband = wrapped("{name: hyperband}")
    assert isinstance(hyperband, pruners.HyperbandPruner)
    assert hyperband._max_resource == 3
    assert wrapped("null") is None


@pytest.mark.parametrize("name", ["none", "None", "NopPruner", "median", "MedianPruner"])
def test_a_pruner_prunes_unless_it_is_none_by_any_of_its_names(studies: Studies, name: str) -> None:
    spec = studies.spec(f"study.pruner={{name: '{name}'}}")
    assert spec.study.pruner.prunes is not isinstance(make_pruner(spec), pruners.NopPruner)


@pytest.mark.parametrize(
    ("options", "path", "problem", "fix"),
    [
        ("percentile", "study.pruner", "needs the argument percentile", "add `percentile: …`"),
        ("medain", "study.pruner.name", "no pruner has this name", "did you mean `median`?"),
        ("{name: median, warmup: 3}", "study.pruner.warmup", "takes no such argument", "n_warmup_steps"),
        ("{name: median, a..b: 3}", "study.pruner[a..b]", "takes no such argument", "n_warmup_steps"),
        ("{name: patient, patience: 1}", "study.pruner", "needs the argument wrapped_pruner", "add"),
        (
            "{name: patient, patience: 1, wrapped_pruner: 3}",
            "study.pruner.wrapped_pruner",
            "must be a pruner",
            "{name: median}",
        ),
        (
            "{name: patient, patience: 1, wrapped_pruner: percentile}",
            "study.pruner.wrapped_pruner",
            "needs the argument percentile",
            "add",
        ),
        ("threshold", "study.pruner", "refuses its arguments", "Optuna's documentation"),
        ("{name: percentile, percentile: 200.0}", "study.pruner", "refuses its arguments", "Optuna's"),
        ("{name: hyperband, min_resource: 0}", "study.pruner", "min_resource is 0: give at least 1", "Optuna's"),
        (
            "{name: hyperband, max_resource: auto, reduction_factor: 1}",
            "study.pruner",
            "reduction_factor is 1: give at least 2",
            "Optuna's",
        ),
        (
            "{name: patient, patience: 1, wrapped_pruner: {name: hyperband, max_resource: -3}}",
            "study.pruner.wrapped_pruner",
            "max_resource is -3: give at least 1",
            "Optuna's",
        ),
        (
            "{name: patient, patience: 1, min_delta: .nan, wrapped_pruner: median}",
            "study.pruner.min_delta",
            "must be a number",
            "write a number",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_its_fix(
    studies: Studies, options: str, path: str, problem: str, fix: str
) -> None:
    with pytest.raises(InputError) as caught:
        make_pruner(studies.spec(f"study.pruner={options}"))
    assert (caught.value.path, caught.value.file) == (path, "command line")
    assert problem in caught.value.problem
    assert fix in caught.value.fix
