"""Reads study files: turns YAML and overrides into a validated and frozen StudySpec.

Imports neither torch nor optuna.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from hpo.config.conditions import Condition, conditions_of, refuse_interpolated, widest
from hpo.config.defaults import complete, without_dependent, without_nulls
from hpo.config.file_paths import RENAME, absolute, anchored, home, no_text, normal, quoted, too_long
from hpo.config.identity import identity
from hpo.config.interpolation import escaped
from hpo.config.marks import COMMAND_LINE, Marks
from hpo.config.overrides import apply_override
from hpo.config.paths import Keys, PathError, assign, copy_plain, lookup, same, split_path
from hpo.config.schema import StudyFile, TrainerSection
from hpo.config.schema_loader import LoaderSection
from hpo.config.schema_run import RunSection
from hpo.config.schema_space import CategoricalParam, ParamSpec, label
from hpo.config.schema_study import StudySection
from hpo.config.validation import interpolated, validated
from hpo.config.yaml_source import read_yaml
from hpo.errors import InputError, each_error, together

_INNER_SPACE: Final = re.compile(r"(?<=\$\{)\s+|\s+(?=\})")
#: The environment variable with the database's URL, for study files and options that give none.
STORAGE_ENV: Final = "HPO_STORAGE"


@dataclass(frozen=True)
class StudySpec:
    """A study file, read, overridden and validated.

    Attributes:
        path: Absolute path of the YAML file.
        config: The whole file with interpolations resolved and defaults filled in.
    """

    path: Path
    config: StudyFile
    _raw: dict[str, Any] = field(repr=False, compare=False)
    _marks: Marks = field(repr=False, compare=False)

    @property
    def folder(self) -> Path:
        """The folder of the YAML file, from which import paths and relative paths are resolved."""
        return self.path.parent

    @property
    def study(self) -> StudySection:
        """The `study` section."""
        return self.config.study

    @property
    def run(self) -> RunSection:
        """The `run` section."""
        return self.config.run

    @property
    def loader(self) -> LoaderSection:
        """The `loader` section of the base config."""
        return self.config.loader

    @property
    def trainer(self) -> TrainerSection:
        """The `trainer` section of the base config."""
        return self.config.trainer

    @property
    def seed(self) -> int:
        """The seed that training starts from: ``trainer.seed``, else ``study.sampler.seed``."""
        return self.study.sampler.seed if self.trainer.seed is None else self.trainer.seed

    @cached_property
    def search_space(self) -> Mapping[str, ParamSpec]:
        """The entries of `search_space` by dotted path, in the file's order, as parameters are stored.

        Choices that are lists or mappings are labels, and bounds that depend on other parameters are the widest
        that they can be; `config` has the entries as they are written.
        """
        return widest(self.config.search_space, self.base_config(), self.error)

    @cached_property
    def where(self) -> tuple[Condition, ...]:
        """The conditions on every trial: the expressions of `where`, and bounds that depend on parameters."""
        return conditions_of(self.config.where, self.config.search_space, self.base_config(), self.error)

    def values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters as a config has them: labels become copies of the lists and mappings they stand for."""
        entries = self.config.search_space
        return {
            path: copy_plain(entry.choice(value))
            if isinstance(entry := entries.get(path), CategoricalParam)
            else value
            for path, value in params.items()
        }

    @property
    def output_dir(self) -> Path:
        """The absolute folder for everything that the study writes."""
        given = self.run.output_dir
        inside = Path("runs", self.study.name) if given is None else home(given)
        return Path(normal(self.folder / inside))

    @property
    def storage_url(self) -> str:
        """The database's URL: the study file's, else that of ``HPO_STORAGE``, else of a SQLite file.

        A relative path of a SQLite file is relative to the YAML's folder.
        """
        given = self.run.storage or os.environ.get(STORAGE_ENV)
        if not given:
            return f"sqlite:///{quoted(self.output_dir / 'study.db')}"
        return anchored(given, self.folder)

    @property
    def defines_by_run(self) -> bool:
        """Whether the study's function draws its parameters itself, as Optuna's objectives do: there is
        `objective` and no `search_space`. Then the function names the parameters, and none is in the config.
        """
        return self.config.objective is not None and not self.search_space

    @property
    def trial_epochs(self) -> int | None:
        """The epochs of a whole trial, if they are known and the same for all trials; else None."""
        return None if self.searches_length else self.trainer.known_epochs

    @property
    def searches_length(self) -> bool:
        """Whether the searched parameters decide how many epochs a trial has."""
        searched = any(map(self._searched_by, ("max_epochs", "max_steps", "validate_every")))
        return searched or "trainer" in self.search_space

    @property
    def longest_trial(self) -> int | None:
        """The most epochs that a trial may have; None if not known."""
        trainer, paths = self.trainer, self._searched_by("max_epochs")
        in_passes = trainer.validate_every is None and not self._searched_by("validate_every")
        if not in_passes or "trainer" in self.search_space:
            return self.trial_epochs
        ends: list[Any] = [trainer.max_epochs]
        for path in paths:
            entry = self.search_space[path]
            ends += entry.choices if isinstance(entry, CategoricalParam) else [entry.high]
        plain = paths in ([], ["trainer.max_epochs"], [self._written("max_epochs")[2:-1]])
        return max(ends) if plain and all(isinstance(end, int) for end in ends) else self.trial_epochs

    @property
    def seed_paths(self) -> list[str]:
        """The searched paths that set a trial's seed, or that its interpolation uses."""
        return self._searched_by("seed")

    def _searched_by(self, name: str) -> list[str]:
        """The searched paths that set a value of `trainer`, or that its interpolation uses."""
        written = self._written(name)
        return [path for path in self.search_space if path == f"trainer.{name}" or f"${{{path}}}" in written]

    def _written(self, name: str) -> str:
        """A value of `trainer` as it is written, without spaces inside the braces of interpolations."""
        return _INNER_SPACE.sub("", str((self._raw.get("trainer") or {}).get(name)))

    @property
    def has_same_data(self) -> bool:
        """Whether all trials have the same data: its section has neither searched values nor interpolations."""
        searched = any(split_path(path)[0] == "data" for path in self.search_space)
        return not searched and "${" not in json.dumps(self._raw.get("data"), default=str)

    def resolve(self, params: Mapping[str, object] | None = None) -> dict[str, Any]:
        """The config of one trial: the base config with these dotted parameters, interpolations resolved.

        Lengths that depend on the data stay as text, see `hpo.config.lengths`.

        Returns:
            Plain containers that the caller may change, with an entry for each section, None if the file leaves it
            out; without `study`, `run`, `search_space` and `where`. Parameters that a function draws itself are
            the entry `params`.

        Raises:
            InputError: A parameter leads nowhere, or its value does not fit.
        """
        if self.defines_by_run:
            base = self.config.model_dump(exclude={"study", "run", "search_space"})
            return {**base, "params": dict(params or {})}
        raw, marks = copy_plain(self._raw), self._marks
        # Escaped: its interpolations could refer to values that a choice replaces.
        raw["search_space"] = self._plain_space
        values = self._set_values(params or {})
        # A whole section is set before its values.
        for path in sorted(values, key=lambda each: len(split_path(each))):
            _assign(raw, marks, path, values[path])
        try:
            config = validated(raw, marks)
        except InputError as error:
            raise together([self._of_parameter(each, values) for each in each_error(error)]) from error
        return config.model_dump(exclude={"study", "run", "search_space", "where"})

    def _of_parameter(self, error: InputError, values: Mapping[str, Any]) -> InputError:
        """An error of a trial's config; for a parameter's value, located at the parameter's entry."""
        if error.path not in values or error.path not in self.search_space:
            return error
        return self._marks.error(error.problem, _entry(error.path), value=error.value, fix=error.fix)

    @cached_property
    def _plain_space(self) -> dict[str, Any]:
        dumped = self.config.model_dump(mode="json", include={"search_space"})["search_space"]
        space: dict[str, Any] = escaped(dumped)
        return space

    def _set_values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The same as `values`, but interpolations in a list or mapping are resolved with the other parameters."""
        values = self.values(params)
        chosen = {path: params[path] for path, value in values.items() if isinstance(value, dict | list)}
        if not any("${" in json.dumps(lookup(self._raw, _entry(path)), default=str) for path in chosen):
            return values
        raw, above = copy_plain(self._raw), [split_path(path) for path in chosen]
        for path, value in values.items():
            if not any(split_path(path)[: len(keys)] == keys for keys in above):
                _assign(raw, self._marks, path, value)
        resolved = interpolated(raw, self._marks)
        for path, name in chosen.items():
            for at, choice in enumerate(getattr(self.config.search_space.get(path), "choices", ())):
                if same(label(choice), name):
                    values[path] = copy_plain(lookup(resolved, (*_entry(path), "choices", at)))
        return values

    def base_config(self) -> dict[str, Any]:
        """The whole base config, with `study`, `run` and `search_space`.

        JSON types only, but numbers may be infinite or NaN, as in Python's json.
        """
        return self.config.model_dump(mode="json")

    def config_hash(self) -> str:
        """SHA-256 of the study's identity in hexadecimal, see `hpo.config.identity`.

        Defaults are left out, so that a file keeps its hash when the schema gets a new key.
        """
        config = self.config.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps(identity(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def location(self, path: str) -> tuple[str, int | None]:
        """The file (as the person named it, or `command line`) and line where a dotted path was written."""
        return self._marks.locate(split_path(path))

    def is_written(self, path: str) -> bool:
        """Whether a person wrote a dotted path, in the file or as an override."""
        return self._marks.is_written(split_path(path))

    def error(self, problem: str, *, path: str, value: object = "", fix: str = "") -> InputError:
        """An InputError at a dotted path of this study file."""
        return self._marks.error(problem, split_path(path), value=value, fix=fix)

    def with_options(
        self,
        *,
        n_trials: int | None = None,
        timeout: float | str | None = None,
        workers: int | None = None,
        devices: str | Sequence[str] | None = None,
        on: str | None = None,
        agents: str | None = None,
        storage: str | None = None,
        output_dir: str | Path | None = None,
    ) -> "StudySpec":
        """This spec with options of the command line in place of the file's values; None keeps the file's value.

        Relative paths in options start at the current folder, unlike those in the file.

        Raises:
            InputError: An option's value does not fit.
        """
        if output_dir is not None and not str(output_dir):
            fix = "name a folder, or leave the option out"
            raise InputError("is empty", file=COMMAND_LINE, path="--output-dir", fix=fix)
        for name, option in (("storage", storage), ("output_dir", output_dir)):
            if "\0" in str(option):
                problem, fix = "holds the character NUL, which no path may have", "leave it out"
                raise InputError(problem, file=COMMAND_LINE, path=f"run.{name}", value=repr(option), fix=fix)
        given: dict[str, Any] = {
            "n_trials": n_trials,
            "timeout": timeout,
            "workers": workers,
            "devices": list(devices) if isinstance(devices, tuple) else devices,
            "on": on,
            "agents": agents,
            "storage": anchored(storage, Path.cwd()) if isinstance(storage, str) else storage,
            "output_dir": str(Path.cwd() / home(str(output_dir)))
            if isinstance(output_dir, str | Path)
            else output_dir,
        }
        raw, marks = copy_plain(self._raw), self._marks
        for name, value in given.items():
            if value is not None:
                section = "study" if name in StudySection.model_fields else "run"
                raw[section][name] = value
                marks = marks.override((section, name))
        return assembled(self.path, raw, marks)


def load_spec(path: Path, overrides: Sequence[str] = (), *, require_search_space: bool = False) -> StudySpec:
    """Read a study file and apply ``key=value`` overrides.

    Validates the structure in full; `hpo.checks.check` checks import paths and their arguments, which needs torch.

    Args:
        path: The YAML file.
        overrides: ``dotted.path=value``; the value is YAML.
        require_search_space: Refuse a file with nothing to search. (An `objective` passes: whether it draws its
            parameters is known once it is imported.)

    Raises:
        InputError: The file or an override can't be used.
    """
    raw, marks = read_overridden(path, overrides)
    spec = assembled(absolute(path), raw, marks)
    if require_search_space and not spec.search_space and not spec.defines_by_run:
        fix = "add for example `search_space: {optimizer.lr: {type: float, low: 1e-5, high: 0.1, log: true}}`"
        raise marks.error("there is nothing to search", ("search_space",), fix=fix)
    return spec


def read_overridden(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Marks]:
    """Read a study file, with defaults and overrides, and where each value was written; without validation.

    Raises:
        InputError: The file can't be read, or an override can't be used.
    """
    source = read_yaml(path)
    raw, marks = without_nulls(source.data, Marks(source.file, source.lines))
    raw = complete(raw)
    for text in overrides:
        raw, marks = without_nulls(*apply_override(raw, marks, text))
        raw = complete(without_dependent(raw, marks))
    return raw, marks


def assembled(path: Path, raw: dict[str, Any], marks: Marks) -> StudySpec:
    """Create the spec of a study file that has been read; the path is absolute.

    Raises:
        InputError: It can't be used.
    """
    if (problem := no_text(path)) is not None:
        raise InputError(
            problem, file=marks.file, fix=f"{RENAME}, or set a locale of UTF-8, such as LC_ALL=C.UTF-8"
        )
    spec = StudySpec(path=path, config=validated(raw, marks), _raw=raw, _marks=marks)
    file = spec.storage_url.partition("?")[0].partition("///")[2] if spec.storage_url.startswith("sqlite") else ""
    for key, place in (("output_dir", spec.output_dir), ("storage", Path(file))):
        if (problem := too_long(place)) is not None:
            raise spec.error(problem, path=f"run.{key}", value=str(place), fix="write a shorter one")
    refuse_interpolated(raw, spec.config.search_space, spec.error)
    if spec.search_space or spec.config.where:
        _ = spec.where  # computed here to report their errors
    return spec


def _entry(path: str) -> Keys:
    return ("search_space", path)


def _assign(raw: dict[str, Any], marks: Marks, path: str, value: Any) -> None:
    """Set a parameter in a config, in place; its value is already resolved, so it is escaped."""
    try:
        assign(raw, split_path(path), escaped(value))
    except PathError as error:
        raise marks.error(str(error), _entry(path), value=value) from error
