"""``${trainer.total_steps}`` and ``${trainer.steps_per_epoch}``: numbers that depend on the training data.

A study file is read without its data. So an interpolation of one of these two resolves to its own text,
``${trainer.…}``, which is validated, compared and hashed; a trial puts the number in once it has loaded the data
(`hpo.trial.run_length`).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hpo.config.marks import Marks
from hpo.config.paths import Keys, copy_plain, leaves, lookup

#: Their names below `trainer`.
LENGTHS: Final = ("total_steps", "steps_per_epoch")
#: Sections that a trial builds after it has loaded the data; only these may use the lengths.
SECTIONS: Final = ("loss", "step", "optimizer", "lr_scheduler")

_SYMBOL: Final = re.compile(rf"\$\{{trainer\.({'|'.join(LENGTHS)})\}}")


def is_length(value: Any) -> bool:
    """Whether a resolved value is one of the lengths, whose number is not known yet."""
    return isinstance(value, str) and _SYMBOL.fullmatch(value) is not None


def with_lengths(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a raw config in which the lengths can be interpolated."""
    config: dict[str, Any] = copy_plain(raw)
    if isinstance(config.get("trainer"), dict):
        for name in LENGTHS:
            config["trainer"].setdefault(name, _escaped(name))
    return config


def without_lengths(resolved: dict[str, Any], marks: Marks) -> dict[str, Any]:
    """A resolved config without the keys that `with_lengths` has added.

    Raises:
        InputError: A section that needs the number before the data is loaded uses a length.
    """
    trainer = resolved.get("trainer")
    if isinstance(trainer, dict):
        for name in LENGTHS:
            if is_length(trainer.get(name)):  # unless `trainer` is an interpolation of another section
                del trainer[name]
    for keys, _ in lengths_in(resolved):
        if keys[0] not in SECTIONS:
            fix = f"it can stand in {', '.join(SECTIONS)}; a callback finds it in `trainer.state.total_steps`"
            value = lookup(resolved, keys, "")
            raise marks.error(
                "is only known once the data is loaded, but is needed earlier", keys, value=value, fix=fix
            )
    return resolved


def lengths_in(node: Any) -> Iterator[tuple[Keys, str]]:
    """The places in a resolved config that have a length, each with the length's name."""
    for keys, value in leaves(node):
        if isinstance(value, str):
            for name in _SYMBOL.findall(value):
                yield keys, name


def put_lengths(node: Any, numbers: Mapping[str, int]) -> Any:
    """A copy of a resolved config with the lengths replaced by these numbers."""
    if isinstance(node, Mapping):
        return {key: put_lengths(value, numbers) for key, value in node.items()}
    if isinstance(node, list):
        return [put_lengths(item, numbers) for item in node]
    if not isinstance(node, str):
        return node
    match = _SYMBOL.fullmatch(node)
    return numbers[match[1]] if match else _SYMBOL.sub(lambda found: str(numbers[found[1]]), node)


def _escaped(name: str) -> str:
    return rf"\${{trainer.{name}}}"
