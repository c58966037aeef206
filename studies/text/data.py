"""The documentation that Python ships for its `help`: English with some code, a character at a time."""

import re
from itertools import pairwise
from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

#: The characters of the text; a character's index here is its class, and what is not here has class 0.
ALPHABET = "\N{REPLACEMENT CHARACTER}\n" + "".join(map(chr, range(32, 127)))

_CLASSES = {character: index for index, character in enumerate(ALPHABET)}


def load_text(
    context: int = 64, train: int = 64_000, held_out: int = 16_000, seed: int = 0
) -> dict[str, TensorDataset]:
    """Cut the text into windows; no paragraph is in two sets.

    Args:
        context: Characters in a window.
        train: Characters to learn from, whole windows of them.
        held_out: Characters in each of the sets ``val`` and ``test``.
        seed: Seed of the split.

    Returns:
        ``train``, ``val`` and ``test``: characters as int64 [windows, context], and the character after each as
        int64 [windows, context].

    Raises:
        ValueError: There is less text than that.
    """
    sizes = {"train": train, "val": held_out, "test": held_out}
    return {name: _windows(text, sizes[name], context) for name, text in split_text(seed).items()}


def split_text(seed: int = 0) -> dict[str, str]:
    """The help topics in random order, cut after 70 % and 85 % of their paragraphs.

    Topics quote each other at length: a paragraph stays where it comes first, and is dropped everywhere else.

    Args:
        seed: Seed of the order.

    Returns:
        The text of ``train``, ``val`` and ``test``, with an empty line between two paragraphs.
    """
    order = torch.randperm(len(topics), generator=torch.Generator().manual_seed(seed)).tolist()
    names = sorted(topics)
    paragraphs = [part.strip() for at in order for part in re.split(r"\n\s*\n", topics[names[at]])]
    once = list(dict.fromkeys(paragraphs))
    cuts = [0, round(0.7 * len(once)), round(0.85 * len(once)), len(once)]
    parts = [once[start:end] for start, end in pairwise(cuts)]
    return {name: "\n\n".join(part) for name, part in zip(("train", "val", "test"), parts, strict=True)}


def encode(text: str) -> Tensor:
    """The characters' classes, int64 [characters]."""
    return torch.tensor([_CLASSES.get(character, 0) for character in text])


def _windows(text: str, characters: int, context: int) -> TensorDataset:
    count = characters // context
    if not 0 < count * context < len(text):
        raise ValueError(f"{characters} characters in windows of {context} do not fit into {len(text)} of text")
    classes = encode(text[: count * context + 1])
    return TensorDataset(classes[:-1].reshape(count, context), classes[1:].reshape(count, context))
