"""Defines hpo.Study, which turns ordinary classes and values into a study file."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpo.api.values import PlainWriter
from hpo.checks.filesystems import writing_error
from hpo.config.marks import Marks
from hpo.config.paths import Keys, show
from hpo.config.spec import StudySpec, load_spec
from hpo.errors import InputError, each_error
from trainer.files import replacing

_HEADER: Final = "# Written by hpo.Study"
#: An example of an item of each section that is a mapping by name.
_BY_NAME: Final = {
    "metrics": '"accuracy": accuracy',
    "callbacks": '"early_stopping": {"patience": 5}, "mine": hpo.Call(MyCallback)',
    "search_space": '"optimizer.lr": hpo.Float(1e-5, 0.1, log=True)',
}


class Study:
    """A study made of ordinary classes and values, without a study file.

    ```python
    if __name__ == "__main__":  # needed where the classes stand in this very file
        study = hpo.Study(
            "digits",
            n_trials=20,
            data=load_digits,
            model=hpo.Call(MLP, dropout=0.1),
            loss=nn.CrossEntropyLoss,
            optimizer=hpo.Call(torch.optim.AdamW, lr=1e-3),
            trainer={"max_epochs": 10},
            search_space={"optimizer.lr": hpo.Float(1e-5, 1e-1, log=True), "model.hidden": hpo.Int(8, 256)},
        )
        result = hpo.run(study, workers=4)
    ```

    `hpo.run` writes it to ``NAME.yaml`` in its folder, and every command takes that file. The arguments are the
    sections of a study file. Workers import classes and functions by name, so these must be at the top level of a
    module. Workers can't import from a notebook's cells: write such code to a file, with ``%%writefile model.py``.

    Args:
        name: The study's name.
        data: Returns the data sets: a class or function, or an `hpo.Call` of one with arguments. The next six
            arguments are given in the same way.
        model: Returns the module to train.
        optimizer: Returns the optimizer for the model's parameters.
        objective: A function that trains by itself, in place of data, model, loss and optimizer. `hpo.run` also
            takes such a function directly.
        loss: Called with (outputs, targets); or a class whose objects are.
        step: Called with (model, batch); replaces the loss.
        lr_scheduler: Returns the learning-rate scheduler for the optimizer; ``interval`` and ``warmup`` may be
            among its arguments.
        loader: How data sets are batched, such as ``{"batch_size": 64}``.
        trainer: How long and where to train, such as ``{"max_epochs": 20}``.
        metrics: Name → function of (outputs, targets).
        callbacks: Name → arguments of a built-in callback, True or False to turn it on or off, or an `hpo.Call` of
            a callback's class.
        search_space: Dotted path → `hpo.Float`, `hpo.Int` or `hpo.Categorical`.
        where: Expressions over searched parameters that hold in every trial, such as
            ``"model.hidden % model.heads == 0"``.
        folder: Folder of the study's file, its modules and ``runs/``. Default: the folder of the Python file that
            makes this object, or the current folder in a notebook.
        run: How it is run, such as ``{"workers": 4, "trial_timeout": "2h"}``; `hpo.run` may override it.
        **study: The keys of the ``study`` section: ``metric``, ``direction``, ``n_trials``, ``sampler``, …
    """

    def __init__(
        self,
        name: str,
        *,
        data: Any = None,
        model: Any = None,
        optimizer: Any = None,
        objective: Any = None,
        loss: Any = None,
        step: Any = None,
        lr_scheduler: Any = None,
        loader: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Mapping[str, Any] | None = None,
        search_space: Mapping[str, Any] | None = None,
        where: Sequence[str] = (),
        folder: str | Path | None = None,
        run: Mapping[str, Any] | None = None,
        **study: Any,
    ) -> None:
        self.name = name
        if folder is None:
            file = sys._getframe(1).f_globals.get("__file__")  # noqa: SLF001 - the only way to see who calls
            folder = Path(file).parent if file else Path()
        self.folder = _absolute(folder)
        self._targets = {"objective": objective, "data": data, "model": model, "loss": loss, "step": step}
        self._targets |= {"optimizer": optimizer, "lr_scheduler": lr_scheduler}
        self._metrics, self._callbacks, self._search_space = metrics, callbacks, search_space
        self._where = where
        self._plain = {"study": {"name": name, **study}, "run": run, "loader": loader, "trainer": trainer}

    def __repr__(self) -> str:
        return f"hpo.Study({self.name!r}, folder={str(self.folder)!r})"

    @property
    def path(self) -> Path:
        """The file that `hpo.run` writes the study to."""
        return self.folder / f"{self.name}.yaml"

    def spec(self, overrides: Sequence[str] = ()) -> StudySpec:
        """The validated study, as read from its file, with ``key=value`` overrides; writes nothing.

        Raises:
            InputError: Something in it can't be used, or a file that `hpo.Study` did not write is at `path`.
        """
        text, label = self.yaml(), f'hpo.Study("{self.name}")'
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "study.yaml")
            file.write_text(text, encoding="utf-8")
            try:
                spec = load_spec(file, overrides, require_search_space=True)
            except InputError as error:
                for each in {error, *each_error(error)}:
                    if each.file == str(file):
                        each.file, each.line = label, None
                raise
        if self.path.exists() and not self.path.read_text(errors="replace").startswith(_HEADER):
            fix = "move that file away, or give the study another name or `folder=`"
            raise InputError(f"{self.path} is in the way: this study's file goes there", file=label, fix=fix)
        marks = spec._marks  # noqa: SLF001 - the file is gone, what is written where stays
        return replace(spec, path=self.path, _marks=_WithoutLines(label, marks.lines, marks.overridden))

    def yaml(self) -> str:
        """The text of the study's file.

        Raises:
            InputError: A class or a value can't be written there.
        """
        try:
            text = OmegaConf.to_yaml(OmegaConf.create(self._config()))
        except OmegaConfBaseException as error:
            problem, path = str(error).partition("\n")[0], str(error.full_key or "")
            raise InputError(problem, path=path, fix="correct the text with `${` in it") from error
        name = " ".join(str(self.name).splitlines())  # a wrong name is reported when the text is read
        return f"{_HEADER}, anew at each run; every command takes it: hpo status {name}.yaml\n{text}"

    def write(self) -> Path:
        """Write the study's file, as `hpo.run` does; returns its path.

        Raises:
            InputError: Something in it can't be used, or the file can't be written.
        """
        self.spec()
        text = self.yaml()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as file:  # in one step: another run may read it
                file.write(text)
        except OSError as error:
            raise _unwritable(self, error) from error
        return self.path

    def _config(self) -> dict[str, Any]:
        writer = PlainWriter(self.folder)
        sections: dict[str, Any] = {
            name: writer.plain(section, (name,)) for name, section in self._plain.items() if section is not None
        }
        for name, target in self._targets.items():
            if target is not None:
                sections[name] = writer.node(target, (name,))
        named = {
            "metrics": (self._metrics, writer.node),
            "callbacks": (self._callbacks, writer.callback),
            "search_space": (self._search_space, writer.entry),
        }
        for name, (section, write) in named.items():
            if section is not None:
                items = _mapping(section, name).items()
                sections[name] = {key: write(value, (name, key)) for key, value in items}
        return {**sections, "where": writer.plain(self._where, ("where",))} if self._where else sections


def refuse_unwritable(study: Study) -> None:
    """Refuse a folder that a study's file can't be written to, before anything else is written.

    Raises:
        InputError: The folder can't be written to.
    """
    error = writing_error(study.folder)
    if error is not None:
        raise _unwritable(study, error) from error


def _unwritable(study: Study, error: OSError) -> InputError:
    problem = f"can't be written ({error.strerror or error})"
    fix = "give the study another `folder=`; that of a function stands beside its module: move this"
    return InputError(problem, file=study.path, fix=fix)


def _absolute(folder: Any) -> Path:
    """A given folder as an absolute path, relative to the current folder."""
    fix = "give a text or a `pathlib.Path`, or leave it out"
    if not isinstance(folder, str | Path):
        raise InputError("must be a path", path="folder", value=show(repr(folder)), fix=fix)
    if "\0" in str(folder):
        problem = "holds the character NUL, which no path may have"
        raise InputError(problem, path="folder", value=repr(folder), fix="leave it out")
    return Path(folder).absolute()


def _mapping(section: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(section, Mapping):
        fix = f"write `{name}={{{_BY_NAME[name]}}}`, each by its name"
        raise InputError("must be a mapping", path=name, value=show(repr(section)), fix=fix)
    return section


@dataclass(frozen=True)
class _WithoutLines(Marks):
    """Marks of a study that was not written line by line."""

    def locate(self, keys: Keys) -> tuple[str, int | None]:
        """Where a key was given, in the study or as an override; without a line."""
        return super().locate(keys)[0], None
