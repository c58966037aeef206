"""Writes `study_parts.py`, which adapts a person's code to what a study expects."""

from __future__ import annotations

from typing import Final

from hpo.draft.data import Look
from hpo.draft.losses import Loss

MODULE: Final = "study_parts"
#: Names that the module defines or imports itself.
_TAKEN: Final = frozenset({"load", "loss", "torch", "TensorDataset", "random_split", "train", "val", "test"})

_HEAD: Final = '"""What study.yaml needs beside your own code; `hpo init` wrote it, and it is yours to change."""'

_SAID = '"""A part of the samples is kept for validation; the same for all trials, drawn with `seed`."""'
_SPLIT = f"""def load(val_share=0.2, seed=0):
    {_SAID}
    generator = torch.Generator().manual_seed(seed)
    train, val = random_split({{name}}(), [1 - val_share, val_share], generator)
    return {{{{"train": train, "val": val}}}}
"""
_ARRAYS = f"""def load(val_share=0.2, seed=0):
    {_SAID}
    x, y = map(torch.as_tensor, {{name}}())
    x = x.float() if x.is_floating_point() else x
    y = y.float() if y.is_floating_point() else y.long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    val, train = order.split([round(val_share * len(x)), len(x) - round(val_share * len(x))])
    return {{{{"train": TensorDataset(x[train], y[train]), "val": TensorDataset(x[val], y[val])}}}}
"""
_PAIR = '''def load():
    """The sets by their names."""
    {names} = {name}()
    return {{{sets}}}
'''


def parts_text(module: str, name: str, look: Look | None, loss: Loss | str) -> str:
    """The module's text; empty where the study needs none.

    Args:
        module: Import path of the module of the person's data function or data set.
        name: Its name there, with dots if it is an attribute.
        look: The properties of its result.
        loss: The loss.
    """
    made = "" if look is None or look.making == "ready" else _load(name, look)
    own = _loss(loss) if isinstance(loss, Loss) and loss.body else ""
    if not made and not own:
        return ""
    imports = ["import torch"] if "torch." in made else []
    if isinstance(loss, Loss) and loss.imports:
        imports.append(f"from torch.nn.functional import {loss.imports}")
    names = [name for name in ("TensorDataset", "random_split") if name in made]
    if names:
        imports.append(f"from torch.utils.data import {', '.join(names)}")
    if made:
        top = name.partition(".")[0]
        as_own = "" if _imported(top) == top else f" as {_imported(top)}"
        imports += [*([""] if imports else []), f"from {module} import {top}{as_own}"]
    return "\n\n\n".join(filter(None, ("\n".join([_HEAD, "", *imports]), made.rstrip(), own))) + "\n"


def _imported(name: str) -> str:
    """The name of the person's function in the module, which must differ from the module's own names."""
    return f"own_{name}" if name.partition(".")[0] in _TAKEN else name


def _load(name: str, look: Look) -> str:
    name = _imported(name)
    if look.making != "pair":
        return (_SPLIT if look.making == "split" else _ARRAYS).format(name=name)
    names = ("train", "val", "test")[: look.sets]
    return _PAIR.format(name=name, names=", ".join(names), sets=", ".join(f'"{item}": {item}' for item in names))


def _loss(loss: Loss) -> str:
    why = loss.why[0].upper() + loss.why[1:]
    return f'def loss(outputs, targets):\n    """{why}."""\n    {loss.body}'
