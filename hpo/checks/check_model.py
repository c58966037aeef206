"""Checks that a study's model is one that the Trainer trains, before anything runs."""

from __future__ import annotations

from hpo.config.schema_space import CategoricalParam
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET, TargetResolver
from hpo.trial.lightning_module import refuse_lightning


def check_model(spec: StudySpec, *, search: bool) -> None:
    """Refuse a model that has a trainer of its own, also among those that the search space may set.

    Raises:
        InputError: It is a LightningModule.
    """
    entry = SearchSpace.from_spec(spec).params.get(f"model.{TARGET}") if search else None
    others = entry.choices if isinstance(entry, CategoricalParam) else ()
    resolver = TargetResolver(spec.folder)
    for target in ((spec.config.model or {}).get(TARGET), *others):
        if isinstance(target, str):
            refuse_lightning(spec, resolver.resolve(target))
