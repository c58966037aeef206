"""Joins an existing study: an agent works on it without changing its config, code or budget."""

from __future__ import annotations

from hpo.config.code import code_identity
from hpo.config.identity import identity, stored_identity
from hpo.config.paths import diff_configs
from hpo.config.spec import StudySpec
from hpo.storage.attributes import CONFIG_ATTR, HASH_ATTR
from hpo.storage.optuna_private import user_attrs_of
from hpo.study.code_record import CodeRecord, code_fix, code_problem
from hpo.study.open_study import OpenStudy, closing_on_error, load_study


def join_study(spec: StudySpec) -> OpenStudy:
    """Open a study that `hpo run` has started, to work on it.

    Args:
        spec: The study file as it is here.

    Raises:
        InputError: The study's config or code differs from those on this machine.
        StudyError: There is no such study.
    """
    opened = load_study(spec)
    with closing_on_error(opened.storage):
        _refuse_other_config(opened)
        _refuse_other_code(opened)
    return opened


def config_changes(opened: OpenStudy) -> list[str]:
    """How the config here differs from the study's stored one in what must not change; one line each."""
    stored = opened.study.user_attrs.get(CONFIG_ATTR)
    if stored is None:  # the study was not started by `hpo run`
        return []
    return diff_configs(stored_identity(stored), identity(opened.spec.base_config()))


def config_warning(opened: OpenStudy) -> str:
    """A warning that the trials ran with another config than the one here; empty if they did not."""
    # The search space does not matter to a trial that already has its parameters.
    changes = [change for change in config_changes(opened) if not change.startswith("search_space")]
    if not changes:
        return ""
    return "the trials ran with another config than the one here:\n    " + "\n    ".join(changes)


def _refuse_other_config(opened: OpenStudy) -> None:
    spec, stored = opened.spec, opened.study.user_attrs
    if HASH_ATTR not in stored:
        raise spec.error(
            f"the study {spec.study.name} was not started by `hpo run`",
            path="study.name",
            fix="start it with `hpo run`",
        )
    if changes := config_changes(opened):
        raise spec.error(
            f"the study's config is {stored[HASH_ATTR]}, and the config here is {spec.config_hash()}:\n    "
            + "\n    ".join(changes),
            path="study.name",
            fix="bring the study file here with which the study was started, and give the same overrides",
        )


def _refuse_other_code(opened: OpenStudy) -> None:
    record = CodeRecord.of(user_attrs_of(opened.study))
    if problem := code_problem(record, code_identity(opened.spec)):
        raise opened.spec.error(problem, path="study.name", fix=code_fix(opened.spec))
