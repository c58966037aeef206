"""Writes the text of a drafted study file, with comments on what a person may wonder about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hpo.config.paths import join_path
from hpo.config.yaml_dumper import to_line
from hpo.draft.arguments import FILL_IN, Argument, Arguments
from hpo.draft.data import Look
from hpo.draft.losses import Loss
from hpo.draft.parts import MODULE
from hpo.draft.script import Script
from hpo.trial.training_code import SESSION

_TRIALS: Final = 20
_EPOCHS: Final = 20
_BATCHES: Final = (16, 32, 64)
#: Numbers below this are written with an exponent.
_SMALL: Final = 0.01
#: From this many training samples on, larger batches are tried.
_MANY: Final = 2000
_HEAD: Final = (
    "# yaml-language-server: $schema=study.schema.json\n"
    "# `hpo check {file}` tests this file, `hpo run {file}` searches, `hpo best {file}` shows the best trial.\n"
    "# Each `_target_` is an import path; it may be in this folder. Its arguments are beside it.\n"
)


@dataclass(frozen=True)
class Draft:
    """The contents of a drafted study file.

    Attributes:
        name: The study's name.
        file: The study file's name.
        target: The import path of the model or the training function.
        arguments: Its arguments.
        session: Whether the training function takes its trial's session.
        script: The settings in an Optuna objective's script; None for other functions.
        data: The import path of the study's data; empty if unknown.
        named: The import path that the person gave for the data.
        data_arguments: The arguments of the data that a person must fill in.
        look: The data's properties; None if the data was not loaded.
        loss: The loss, or why there is none; None for a training function.
    """

    name: str
    file: str
    target: str
    arguments: Arguments
    session: bool = False
    script: Script | None = None
    data: str = ""
    named: str = ""
    data_arguments: tuple[str, ...] = ()
    look: Look | None = None
    loss: Loss | str | None = None

    @property
    def trains(self) -> bool:
        """Whether the study is of a training function."""
        return self.loss is None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes to try, with the default in the middle; empty if the data is already in batches."""
        if self.look is None or self.look.loaders:
            return ()
        many = (self.look.samples or 0) >= _MANY
        return tuple(2 * size if many else size for size in _BATCHES)


def study_text(draft: Draft) -> str:
    """The text of the study file."""
    head = _HEAD.format(file=draft.file)
    if draft.script is not None:
        return "\n".join([head, *_script(draft, draft.script), *_function(draft)])
    parts = [head, *_study(draft)]
    parts += _function(draft) if draft.trains else _training(draft)
    return "\n".join([*parts, *_space(draft)]) + "\n"


def _study(draft: Draft) -> Iterator[str]:
    pruned = not draft.trains or draft.session
    yield "study:"
    yield f"  name: {_text(draft.name)}"
    yield (
        "  metric: val_loss       # its best epoch is a trial's value"
        if pruned
        else ("  metric: val_loss       # the name of what the function returns")
    )
    yield "  direction: minimize    # or `maximize`, such as for an accuracy"
    yield f"  n_trials: {_TRIALS}"
    yield "  sampler: {name: auto, seed: 0}"
    if pruned:
        yield "  pruner: median         # ends trials that fall behind; with `none` each one finishes"
    yield "# run: {workers: 4, timeout: 2h}   # by default one worker per GPU, or one in all without a GPU"
    yield ""


def _script(draft: Draft, script: Script) -> Iterator[str]:
    yield "study:"
    yield f"  name: {_text(draft.name)}"
    if len(script.directions) > 1:
        goals = ", ".join(f"value_{at}: {each}" for at, each in enumerate(script.directions))
        yield f"  objectives: {{{goals}}}   # what the function returns, in order; change the names as you like"
    elif script.directions:
        yield f"  direction: {script.directions[0]}"
    else:
        yield "  direction: minimize    # of what the function returns; or `maximize`, such as for an accuracy"
    time_alone = "   # the script says no number; a run ends at this or at its timeout" if script.timeout else ""
    yield f"  n_trials: {script.n_trials or _TRIALS}{'' if script.n_trials else time_alone}"
    if script.timeout:
        yield f"run: {{timeout: {script.timeout:.15g}}}   # seconds"
    yield ""


def _function(draft: Draft) -> Iterator[str]:
    if draft.script is None:
        yield "# The function is called once per trial, with these arguments."
    else:
        yield f"# The function draws its parameters itself, by `{SESSION}.suggest_…`; there is no search_space."
    yield "objective:"
    yield f"  _target_: {draft.target}"
    length: Any = None
    for item in draft.arguments:
        if item.is_epochs and draft.session:
            length = item.value
            yield f'  {item.name}: "${{trainer.max_epochs}}"'
        elif item.value is not None:
            yield _argument("objective", item)
    if length is not None:
        yield f"trainer: {{max_epochs: {length}}}"
    yield ""


def _training(draft: Draft) -> Iterator[str]:
    yield from _data(draft)
    if draft.batch_sizes:
        yield f"loader: {{batch_size: {draft.batch_sizes[1]}}}"
    yield "model:"
    yield f"  _target_: {draft.target}"
    yield from (_argument("model", item) for item in draft.arguments if item.value is not None)
    if isinstance(draft.loss, Loss):
        yield f"loss: {{_target_: {draft.loss.target}}}   # {draft.loss.why}"
    else:
        yield f'loss: {{_target_: "{FILL_IN}"}}   # fill in: {draft.loss}'
    yield "optimizer: {_target_: torch.optim.AdamW, lr: 1e-3, weight_decay: 1e-4}"
    if draft.look is not None and draft.look.classes:
        yield "# metrics: {accuracy: {_target_: my_module.accuracy}}   # a function of (outputs, targets)"
    yield f"trainer: {{max_epochs: {_EPOCHS}}}"
    yield "callbacks: {early_stopping: {patience: 5}}"
    yield ""


def _data(draft: Draft) -> Iterator[str]:
    if not draft.data:
        returns = "{'train': dataset, 'val': dataset}"
        yield f'data: {{_target_: "{FILL_IN}"}}   # fill in: a function that returns {returns}'
        return
    own = draft.data.startswith(f"{MODULE}.")
    arguments = "".join(f', {name}: "{FILL_IN}"' for name in draft.data_arguments)
    comment = f"   # made from what `{draft.named}` returns: see {MODULE}.py" if own else ""
    comment = "   # fill in its arguments" if arguments else comment
    yield f"data: {{_target_: {draft.data}{arguments}}}{comment}"


def _argument(section: str, item: Argument) -> str:
    if item.value == FILL_IN:
        return f"  {item.name}: {FILL_IN}   # fill in `{join_path((section, item.name))}`{item.note}"
    line = f"  {item.name}: {_text(item.value)}"
    return f"{line}   # {item.note}" if item.note else line


def _space(draft: Draft) -> Iterator[str]:
    section = "objective" if draft.trains else "model"
    entries = {join_path((section, item.name)): item.entry for item in draft.arguments if item.entry}
    yield "# What to search: paths into the sections above. `log: true` is for ranges over orders of magnitude."
    yield "search_space:" if entries or not draft.trains else f"search_space: {FILL_IN}   # fill in what to search"
    if not draft.trains:
        yield "  optimizer.lr: {type: float, low: 1e-4, high: 3e-2, log: true}"
        yield "  optimizer.weight_decay: {type: float, low: 1e-6, high: 1e-1, log: true}"
    for path, entry in entries.items():
        yield f"  {path}: {_flow(entry)}"
    if draft.batch_sizes:
        yield f"  loader.batch_size: {_flow({'type': 'categorical', 'choices': list(draft.batch_sizes)})}"


def _flow(entry: Mapping[str, Any]) -> str:
    inside = ", ".join(f"{key}: {_flow_value(value)}" for key, value in entry.items())
    return "{" + inside + "}"


def _flow_value(value: Any) -> str:
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else _text(value)


def _text(value: Any) -> str:
    """A plain value as YAML on one line; small numbers have an exponent."""
    if isinstance(value, float) and 0 < abs(value) < _SMALL:
        digits, _, power = f"{value:e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return to_line(value)
