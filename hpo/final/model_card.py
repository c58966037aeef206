"""Writes the card of an exported model: its origin, its metrics, and code that loads it."""

from __future__ import annotations

import math
import pprint
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from hpo.config.code import code_identity
from hpo.config.hidden import hidden
from hpo.config.spec import StudySpec
from hpo.config.yaml_dumper import to_yaml
from hpo.final.models import BestWeights
from hpo.study.environment import environment
from hpo.study.open_study import OpenStudy
from hpo.study.own_trials import own_trials
from hpo.trial.callbacks import CALLBACKS
from hpo.wording import shown

_EXPORTED: Final = """import torch

model = torch.export.load("{file}").module()  # in eval mode; batches of any size
"""
_WEIGHTS: Final = """from pathlib import Path

{imported}

from hpo.config.targets import TargetResolver, instantiate

here = Path(".")  # the folder of this card, as seen from where you run this
config = {config}
model = instantiate(TargetResolver(here / "{code}"), config)
{loaded}
model.eval()
"""
_WITH_CODE: Final = """Keep this file, the weights and the folder `{code}` (the study's own modules) together.
In the folder of this file, run:"""
_ALONE: Final = "In the folder of this file, run:"
_CAVEAT: Final = """Measured at epoch {epoch}. The `val_` metrics are optimistic: by them this epoch was chosen,
and this trial if it is the study's best. `hpo train --trial {trial} --seeds 5` shows what to expect."""
_LOADERS: Final[Mapping[str, tuple[str, str]]] = {
    ".safetensors": ("from safetensors.torch import load_model", 'load_model(model, here / "{file}")'),
    "": ("", 'model = type(model).from_pretrained(here / "{file}")'),
    ".pt": ("import torch", 'model.load_state_dict(torch.load(here / "{file}", weights_only=True))'),
}


def model_card(opened: OpenStudy, found: BestWeights, model: nn.Module, path: Path, command: str) -> str:
    """The card as Markdown.

    Args:
        opened: The study.
        found: The exported weights.
        model: The model.
        path: The exported file or folder.
        command: The command that exported it.
    """
    spec = opened.spec
    ended = sum(trial.state.is_finished() for trial in own_trials(opened))
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    whole = _shareable(found.config)
    facts = {
        "Study": f"{spec.study.name} ({spec.path.name})",
        "Trial": f"{found.trial}, of {ended} that have ended",
        "Seed": found.seed,
        "Epoch": f"{found.epoch}, its best by {spec.study.metric} ({spec.study.direction})",
        "Code": _code(found, spec),
        "Model": f"`{found.config['model']['_target_']}`",
        "Parameters": f"{total:,}" if trained == total else f"{total:,}, {trained:,} of them trained",
        "Data": f"`{_call(whole['data'])}`",
        "Licence": "not stated",
    }
    code = code_to_load(whole["model"], path)
    config = to_yaml({**whole, "seed": found.seed})
    parts = (
        f"# {spec.study.name}: {path.name}",
        _table(("", ""), facts.items()),
        "## Metrics",
        _table(("metric", "value"), ((name, shown(value)) for name, value in found.metrics.items())),
        _CAVEAT.format(epoch=found.epoch, trial=found.trial),
        "## Searched parameters",
        _table(("parameter", "value"), ((f"`{name}`", value) for name, value in hidden(found.params).items())),
        "## How to load it",
        _WITH_CODE.format(code=code_folder(path).name) if path.suffix in _LOADERS else _ALONE,
        f"```python\n{code}```",
        "## Complete configuration",
        f"```yaml\n{config}```",
        "## Environment",
        "The machine on which the model was exported.",
        _table(("", ""), _flat(environment(spec.folder))),
        "## Made by",
        f"```\n{command}\n```",
    )
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def code_folder(path: Path) -> Path:
    """The folder for the study's own modules, which a file of exported weights needs."""
    return path.with_name(f"{path.name}.code")


def code_to_load(config: Mapping[str, Any], path: Path) -> str:
    """Python code that loads an exported file as ``model``, to be run in the file's folder.

    Args:
        config: The `model` section.
        path: The file.
    """
    if path.suffix not in _LOADERS:
        return _EXPORTED.format(file=path.name)
    imported, loaded = _LOADERS[path.suffix]
    return _WEIGHTS.format(
        imported=imported,
        config=_Literal(sort_dicts=False, width=100).pformat(dict(config)),
        code=code_folder(path).name,
        loaded=loaded.format(file=path.name),
    )


class _Literal(pprint.PrettyPrinter):
    """Writes data as Python literals; `inf` and `nan`, which are not literals, become expressions."""

    def format(self, value: object, context: dict[int, int], maxlevels: int, level: int) -> tuple[str, bool, bool]:
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")', True, False
        return super().format(value, context, maxlevels, level)


def _shareable(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without secrets, and without the callbacks whose arguments may have a key."""
    private = {name for name, row in CALLBACKS.items() if row.private}
    named = {name: node for name, node in config["callbacks"].items() if name not in private}
    return {**hidden(config), "callbacks": hidden(named)}


def _code(found: BestWeights, spec: StudySpec) -> str:
    """The code that the trial ran under, and whether the model was exported with the same code."""
    text = " → ".join(f"`{code}`" for code in found.codes) or "not known"
    if len(found.codes) > 1:
        text += ": the trial ran under more than one code"
    here = code_identity(spec).hash
    return text if found.codes and found.codes[-1] == here else f"{text}; exported with the code `{here}`"


def _call(node: Mapping[str, Any]) -> str:
    arguments = ", ".join(f"{name}={value!r}" for name, value in node.items() if name != "_target_")
    return f"{node['_target_']}({arguments})"


def _flat(facts: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Names and values, without missing ones; a mapping gives one for each of its entries."""
    for name, fact in facts.items():
        if isinstance(fact, Mapping):
            yield from ((f"{name} {inner}", value) for inner, value in fact.items())
        elif fact not in (None, []):
            yield name, ", ".join(map(str, fact)) if isinstance(fact, list) else fact


def _table(header: tuple[str, str], rows: Iterable[tuple[str, Any]]) -> str:
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows]
    return "\n".join((f"| {header[0]} | {header[1]} |", "|---|---|", *lines))


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
