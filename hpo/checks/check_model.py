"""Checks before a run that the Trainer can train a study's model, and that files of weights exist."""

from __future__ import annotations

from typing import Final

from hpo.config.file_paths import home
from hpo.config.paths import join_path
from hpo.config.schema_space import CategoricalParam
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET, TargetResolver
from hpo.trial.lightning_module import refuse_lightning

_WEIGHTS: Final = "trainer.weights.path"


def check_model(spec: StudySpec, *, search: bool) -> None:
    """Refuse a model that needs its own trainer, also among the choices of the search space.

    Raises:
        InputError: A model is a LightningModule.
    """
    entry = SearchSpace.from_spec(spec).params.get(f"model.{TARGET}") if search else None
    others = entry.choices if isinstance(entry, CategoricalParam) else ()
    resolver = TargetResolver(spec.folder)
    for target in ((spec.config.model or {}).get(TARGET), *others):
        if isinstance(target, str):
            refuse_lightning(spec, resolver.resolve(target))


def check_weights(spec: StudySpec, *, search: bool) -> None:
    """Refuse a file of weights that does not exist, also among the choices of the search space.

    Not checked if an engine places agents: their machines may have the file.

    Raises:
        InputError: There is no such file.
    """
    if spec.run.on is not None:
        return
    entry = spec.config.search_space.get(_WEIGHTS) if search else None
    choices = entry.choices if isinstance(entry, CategoricalParam) else ()
    places = [join_path(("search_space", _WEIGHTS, "choices", at)) for at in range(len(choices))]
    for place, path in zip((_WEIGHTS, *places), (spec.trainer.weights.path, *choices), strict=True):
        if isinstance(path, str) and not (file := spec.folder / home(path)).is_file():
            problem = f"there is no file {file}"
            fix = "name a file of this model's weights, from the study file's folder, or leave it out"
            raise spec.error(problem, path=place, value=path, fix=fix)
