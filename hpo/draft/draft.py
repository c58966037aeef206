"""Drafts the files of a study from the names of a person's model or training function, and data."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import nn

from hpo.config.at_import import refuse_search_at_import
from hpo.config.schema_study import MAX_NAME
from hpo.config.targets import TargetResolver
from hpo.draft.arguments import Arguments, arguments_of
from hpo.draft.data import Look, is_data_class, look_at
from hpo.draft.losses import Loss
from hpo.draft.parts import MODULE, parts_text
from hpo.draft.script import script_of
from hpo.draft.study_text import Draft, study_text
from hpo.draft.trying import Fit, fit_to_data
from hpo.errors import InputError
from hpo.trial.named_in import draws_parameters
from hpo.trial.training_code import SESSION, takes_session
from trainer.error_text import error_text

#: The options of `hpo init` that name code.
FROM: Final = "--from"
DATA: Final = "--data"


@dataclass(frozen=True)
class Drafted:
    """A study's drafted files, and what a person must add.

    Attributes:
        texts: The text of each file, by name.
        missing: The dotted paths that a person must fill in, each with the reason.
        notes: Further notes for the person.
    """

    texts: dict[str, str]
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def draft_study(folder: Path, source: str, data: str | None, file: str, say: Callable[[str], None]) -> Drafted:
    """Draft a study for existing code.

    Args:
        folder: The study's folder, which imports start from.
        source: Import path of an nn.Module's class, a function that makes one, or a function that trains,
            ``module:Name`` or ``module.Name``.
        data: Import path of a function that returns the data, or of a Dataset's class; None: none is named.
        file: The study file's name.
        say: Called before each step that may take long.

    Raises:
        InputError: Named code does not exist, can't be imported, or can't be used in a study.
    """
    resolver = TargetResolver(folder)
    target, found = _named(resolver, source, FROM, say)
    if _is_function(found) and draws_parameters(found):
        return _of_script(target, found, file)
    if _trains(found, data):
        return _of_function(target, found, file)
    _refuse_no_model(found, target)
    return _of_model(resolver, target, found, data, file, say)


def _named(resolver: TargetResolver, text: str, option: str, say: Callable[[str], None]) -> tuple[str, Any]:
    """The import path for ``module:Name`` or ``module.py:Name``, and the object that it names."""
    module, _, name = text.partition(":")
    path = ".".join((_module(resolver.folder, module, option), *([name] if name else [])))
    if "." not in path:
        fix = f"write for example `{option} {path or 'module'}:{'load' if option == DATA else 'Model'}`"
        raise InputError("names a module, and nothing in it", path=option, value=text, fix=fix)
    if option == FROM:
        refuse_search_at_import(resolver.folder, path)
    say(f"importing {path.rpartition('.')[0]}")
    try:
        return path, resolver.resolve(path)
    except InputError as error:
        raise InputError(error.problem, path=option, value=text, fix=error.fix) from error


def _module(folder: Path, text: str, option: str) -> str:
    """The import path of a module, given as one or as a file relative to the folder or the current folder."""
    if not (text.endswith(".py") or "/" in text):
        return text
    root = _absolute(folder)
    files = [_absolute(start / text.removesuffix(".py")) for start in (root, Path())]
    inside = [file for file in files if file.is_relative_to(root)]
    if not inside:
        fix = f"name the modules' folder, too: `hpo init {files[0].parent} {option} {files[0].name}:Name`"
        raise InputError(f"lies outside of {root}, where imports begin", path=option, value=text, fix=fix)
    found = next((file for file in inside if file.with_name(f"{file.name}.py").exists()), inside[0])
    return ".".join(found.relative_to(root).parts)


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))  # links are kept, as imports use them


def _is_function(found: Any) -> bool:
    """Whether this is a function, or a callable object that is not a module of torch."""
    return callable(found) and not inspect.isclass(found) and not isinstance(found, nn.Module)


def _trains(found: Any, data: str | None) -> bool:
    """Whether this is a function that trains by itself, rather than one that makes a model."""
    if not _is_function(found):
        return False
    returns = getattr(found, "__annotations__", {}).get("return")
    makes = isinstance(returns, type) and issubclass(returns, nn.Module)
    return takes_session(found) or not (makes or data is not None)


def _refuse_no_model(found: Any, target: str) -> None:
    name, problem, fix = target.rpartition(".")[2], "", ""
    if isinstance(found, nn.Module):
        problem = "is an object, and each trial needs one of its own"
        fix = f"name its class, {type(found).__name__}, or a function that makes it"
    elif not inspect.isclass(found):
        return
    elif any(base.__name__ == "LightningModule" for base in found.__mro__):
        problem = "is a LightningModule, which is trained by Lightning's own Trainer"
        fix = (
            "write a function that trains it, `def run(trial, lr=1e-3)`, gives that Trainer "
            f"`callbacks=[HPOCallback(trial)]`, and name it: `{FROM} train:run` (docs/how-to/from-lightning.md)"
        )
    elif not issubclass(found, nn.Module):
        problem = "is neither an nn.Module nor a function"
        fix = "name the class of the model, a function that makes it, or a function that trains"
    elif inspect.isabstract(found) or found.forward is nn.Module.forward:
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ()))) or "forward"
        problem, fix = f"is abstract: it has no `{missing}`", "name a class that can be used"
    if problem:
        raise InputError(f"`{name}` {problem}", path=FROM, value=target, fix=fix)


def _study_name(name: str) -> str:
    """A study's name from a name in code, without the characters that it can't have."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:MAX_NAME] or "study"


# ---- a function that trains


def _of_script(target: str, objective: Callable[..., Any], file: str) -> Drafted:
    """Draft the study of an Optuna objective, which has its search space in its code."""
    if not takes_session(objective):
        fix = f"name the parameter `{SESSION}` by which it gets its trial"
        name = target.rpartition(".")[2]
        raise InputError(
            f"`{name}` draws its parameters, and takes no `{SESSION}`", path=FROM, value=target, fix=fix
        )
    arguments = arguments_of(objective, trains=True, given=(SESSION,))
    script = script_of(objective)
    study = Draft(_study_name(target.partition(".")[0]), file, target, arguments, session=True, script=script)
    missing = [f"objective.{item}: it has no default" for item in arguments.missing]
    notes = [] if script.directions else ["direction: minimize, since no create_study in its file says which"]
    return Drafted({file: study_text(study)}, missing, notes)


def _of_function(target: str, function: Callable[..., Any], file: str) -> Drafted:
    arguments = arguments_of(function, trains=True, given=(SESSION,))
    name = target.rpartition(".")[2]
    if not arguments.by_name and not takes_session(function):
        fix = f"give it arguments with defaults, `def {name}(lr=1e-3, hidden=64)`: these can be searched"
        raise InputError(
            f"`{name}` takes no argument, so there is nothing to search", path=FROM, value=target, fix=fix
        )
    study = Draft(_study_name(target.partition(".")[0]), file, target, arguments, session=takes_session(function))
    missing = [f"objective.{item}: it has no default" for item in arguments.missing]
    notes = []
    if not any(item.entry for item in arguments):
        missing.append("search_space: none of the arguments says by its name and default what to try")
    if not study.session:
        notes.append(
            f"a trial can't be pruned or resumed until `{name}` takes `{SESSION}`: docs/how-to/own-loop.md"
        )
    return Drafted({file: study_text(study)}, missing, notes)


# ---- a model


def _of_model(
    resolver: TargetResolver,
    target: str,
    build: Callable[..., nn.Module],
    data: str | None,
    file: str,
    say: Callable[[str], None],
) -> Drafted:
    arguments = arguments_of(build, trains=False)
    notes: list[str] = []
    look, path, needed = _data(resolver, data, notes, say)
    if look is not None:
        say("trying the model on a batch")
    fit = fit_to_data(build, arguments, look)
    if look is None and data is not None:
        fit = Fit(f"the data need {', '.join(needed)}", fit.notes)
    notes += fit.notes
    module = "" if look is None else resolver.module_of(path)
    own = "" if look is None else parts_text(module, path.removeprefix(f"{module}."), look, fit.loss)
    split = own and look is not None and look.making != "ready"
    study = Draft(
        _study_name(target.rpartition(".")[2].lower()),
        file,
        target,
        arguments,
        data=f"{MODULE}.load" if split else path,
        named=path,
        data_arguments=needed,
        look=look,
        loss=fit.loss,
    )
    texts = {file: study_text(study), **({f"{MODULE}.py": own} if own else {})}
    return Drafted(texts, _missing_of_model(study, arguments), [*notes, *_seen(look, fit.loss)])


def _data(
    resolver: TargetResolver, data: str | None, notes: list[str], say: Callable[[str], None]
) -> tuple[Look | None, str, tuple[str, ...]]:
    """The data's properties, their import path, and the arguments that they need."""
    if data is None:
        return None, "", ()
    path, found = _named(resolver, data, DATA, say)
    needed = tuple(item.name for item in arguments_of(found, trains=True) if item.required)
    if needed and is_data_class(found):
        name = path.rpartition(".")[2]
        fix = f"write a function, `def load(): return {name}({', '.join(needed)})`, and name that"
        raise InputError(
            f"`{name}` needs {' and '.join(needed)}, which only you know", path=DATA, value=data, fix=fix
        )
    if needed:
        return None, path, needed
    say("loading the data")
    try:
        made = found()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = error_text(error).strip().partition("\n")[0]
        fix = f"see that `{path}()` works by itself, from {resolver.folder}"
        raise InputError(f"`{path}()` failed: {text}", path=DATA, value=data, fix=fix) from error
    look = look_at(made, path)
    if is_data_class(found) or look.making in ("split", "arrays"):
        notes.append(f"a fifth of the samples is kept for validation: {MODULE}.py")
    return look, path, ()


def _missing_of_model(study: Draft, arguments: Arguments) -> list[str]:
    missing = [f"data.{name}: it has no default" for name in study.data_arguments]
    if not study.data:
        missing.append(f"data: none is named; `{DATA} module:load` does")
    missing += [f"model.{name}: neither its name nor the data say what it is" for name in arguments.missing]
    if isinstance(study.loss, str):
        missing.append(f"loss: {study.loss}")
    return missing


def _seen(look: Look | None, loss: Loss | str) -> list[str]:
    notes = []
    if isinstance(loss, Loss) and loss.warning:
        notes.append(loss.warning)
    if look is not None and look.classes and look.samples and 0 < look.counted < look.samples:
        notes.append(f"{look.classes} classes were counted in {look.counted:,} of the {look.samples:,} samples")
    return notes
