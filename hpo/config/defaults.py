"""Completes a study file: spells out shorthands and fills in defaults, so that interpolations can name them."""

from typing import Any, Final

from hpo.config.marks import Marks
from hpo.config.paths import copy_plain
from hpo.config.schema import TrainerSection
from hpo.config.schema_loader import LoaderSection
from hpo.config.schema_run import ResourcesSection, RunSection
from hpo.config.schema_study import (
    AUTO,
    NO_PRUNER,
    OWN_METRIC,
    PrunerSection,
    SamplerSection,
    StudySection,
    is_no_scheduler,
)

#: Keys whose defaults depend on other keys.
_DEPENDENT: Final = (
    *(("study", name) for name in ("metric", "n_trials", "pruner", "scheduler")),
    ("trainer", "max_epochs"),
)
#: Keys of `study` that choose something by its name.
_NAMED: Final = ("sampler", "pruner", "scheduler")
#: The scheduler of a study that has only a budget of epochs (docs/search.md).
_OF_EPOCHS: Final = "freeze_thaw"


def without_nulls(raw: dict[str, Any], marks: Marks) -> tuple[dict[str, Any], Marks]:
    """Remove null keys of `study`, as if they were left out: so an override can take a key of the file back.

    These are the keys that choose by name, and `n_trials` if there is `epochs` in its place.
    """
    study = raw.get("study")
    if isinstance(study, dict):
        names = _NAMED if study.get("epochs") is None else (*_NAMED, "n_trials")
        for name in names:
            if name in study and study[name] is None:
                del study[name]
                marks = marks.without(("study", name))
    return raw, marks


def without_dependent(raw: dict[str, Any], marks: Marks) -> dict[str, Any]:
    """Remove the defaults that depend on keys which an override may have set; `complete` fills them in again."""
    for section, name in _DEPENDENT:
        if isinstance(raw.get(section), dict) and not marks.is_written((section, name)):
            raw[section].pop(name, None)
    return raw


def complete(raw: dict[str, Any]) -> dict[str, Any]:
    """Spell out shorthands and fill in the schema's defaults, so that interpolations can name them."""
    for name in ("run", "loader", "trainer", "metrics", "callbacks", "search_space", "where"):
        if raw.get(name) is None:
            raw.pop(name, None)
    _fill_run(raw)
    _fill_training(raw)
    if isinstance(study := raw.get("study"), dict):
        _fill_study(raw, study)
    return raw


def _fill_study(raw: dict[str, Any], study: dict[str, Any]) -> None:
    if raw.get("objective") is not None and not raw.get("search_space") and study.get("objectives") is None:
        study.setdefault("metric", OWN_METRIC)
    for name in _NAMED:
        if isinstance(study.get(name), str):
            study[name] = {"name": study[name]}
    _fill(study, "sampler", SamplerSection().model_dump())
    several = study.get("objectives") is not None
    if _is_given_epochs_alone(raw, study):
        study["scheduler"] = {"name": _OF_EPOCHS}
    unpruned = several or not is_no_scheduler(study.get("scheduler"))
    _fill(study, "pruner", {"name": NO_PRUNER} if unpruned else PrunerSection().model_dump())
    epochs = study.get("epochs")
    if isinstance(epochs, int) and epochs > 0:
        study.setdefault("n_trials", epochs)  # each trial trains at least one epoch
    for name, field_info in StudySection.model_fields.items():
        if name not in ("name", "direction", "sampler", "pruner") and not (several and name == "metric"):
            study.setdefault(name, copy_plain(field_info.default))


def _is_given_epochs_alone(raw: dict[str, Any], study: dict[str, Any]) -> bool:
    """Whether a study of the Trainer has only `epochs`, and leaves open how trials share them."""
    if raw.get("objective") is not None or study.get("objectives") is not None or study.get("epochs") is None:
        return False
    if any(key in study for key in ("n_trials", "pruner", "scheduler")):
        return False
    return isinstance(study["sampler"], dict) and study["sampler"].get("name") == AUTO


def _fill_run(raw: dict[str, Any]) -> None:
    _fill(raw, "run", RunSection().model_dump())
    if isinstance(run := raw["run"], dict):
        run["resources"] = {} if run["resources"] is None else run["resources"]
        _fill(run, "resources", ResourcesSection().model_dump())


def _fill_training(raw: dict[str, Any]) -> None:
    if raw.get("objective") is None:
        _fill(raw, "loader", LoaderSection().model_dump())
    else:
        _fill(raw, "trainer", {"max_epochs": None})  # the function decides
    trainer = raw.get("trainer")
    if isinstance(trainer, dict) and trainer.get("max_steps") is not None:
        trainer.setdefault("max_epochs", None)  # then only the steps limit the run
    _fill(raw, "trainer", TrainerSection().model_dump())


def _fill(parent: dict[str, Any], name: str, defaults: dict[str, Any]) -> None:
    section = parent.setdefault(name, {})
    if isinstance(section, dict):
        for key, value in defaults.items():
            section.setdefault(key, value)
