"""Small workloads whose learning curves make_curves.py records: data in memory, a tiny model, a loss, a measure.

They represent the families of deep-learning benchmarks: vision, language, translation, speech, graphs, clicks,
tables and reconstruction. All data come from scikit-learn's digits, from Python's own help texts and sources, or
from a seeded generator, so that nothing is downloaded.
"""

import inspect
import itertools
import pydoc
import pydoc_data.topics
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

Tensors = tuple[Tensor, ...]


def _same(inputs: Tensors, _strength: float) -> Tensors:
    return inputs


def cross_entropy(output: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean over all examples and positions; output [..., classes], target [...] of class indices."""
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), label_smoothing=smoothing)


def error_rate(output: Tensor, target: Tensor) -> Tensor:
    """Share of wrong classes; NaN where the output is not finite, as no class is then the model's."""
    wrong = (output.argmax(-1) != target).float().mean()
    return wrong if bool(output.isfinite().all()) else torch.tensor(torch.nan)


def log_loss(output: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Binary cross entropy of logits [batch] against 0 or 1."""
    return nn.functional.binary_cross_entropy_with_logits(output, target * (1 - smoothing) + smoothing / 2)


def squared_error(output: Tensor, target: Tensor, _smoothing: float = 0.0) -> Tensor:
    """Mean squared error; numbers have no smoothing."""
    return nn.functional.mse_loss(output, target)


def absolute_error(output: Tensor, target: Tensor, _smoothing: float = 0.0) -> Tensor:
    """Mean absolute error; numbers have no smoothing."""
    return nn.functional.l1_loss(output, target)


def conv_net(side: int, dropout: float) -> nn.Module:
    """Two normalised convolutions with pooling, then a linear layer: [batch, 1, side, side] to 10 classes."""
    layers: list[nn.Module] = []
    for before, after in ((1, 8), (8, 16)):
        layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(16 * (side // 4) ** 2, 10))


def mlp(widths: Sequence[int], dropout: float, *, normalise: bool = False) -> nn.Module:
    """Linear layers of the given widths with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths[:-1]):
        layers.append(nn.Linear(before, after))
        layers += [nn.BatchNorm1d(after)] if normalise else []
        layers += [nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1]))


class Recurrent(nn.Module):
    """`enter`, a GRU and a linear layer: letters or frames [batch, length, …] to [batch, length, classes]."""

    def __init__(self, enter: nn.Module, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.enter = enter
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        """Logits of every position."""
        states, _ = self.recurrent(self.enter(sequence))
        logits: Tensor = self.head(self.dropout(states))
        return logits


class Frames(nn.Module):
    """A convolution over time: spectra [batch, frames, bins] to features [batch, frames, width]."""

    def __init__(self, bins: int, width: int, dropout: float) -> None:
        super().__init__()
        self.convolution, self.dropout = nn.Conv1d(bins, width, 3, padding=1), nn.Dropout(dropout)

    def forward(self, spectra: Tensor) -> Tensor:
        """Features of every frame."""
        features: Tensor = self.dropout(self.convolution(spectra.transpose(1, 2)).relu().transpose(1, 2))
        return features


class SequenceTransformer(nn.Module):
    """One pre-norm block over learned positions: words [batch, length] to logits [batch, length, words]."""

    def __init__(self, words: int, length: int, dropout: float, *, causal: bool, width: int = 32) -> None:
        super().__init__()
        self.causal, self.heads = causal, 2
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(0.3 * torch.randn(length, width))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, words)
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: Tensor) -> Tensor:
        """Logits of every position."""
        stream = self.embedding(words) + self.position
        mixed = self.mix(self.norms[0](stream)).unflatten(2, (3, self.heads, -1))
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        stream = stream + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        stream = stream + self.dropout(self.feed(self.norms[1](stream)))
        logits: Tensor = self.head(self.norms[2](stream))
        return logits


class GraphNet(nn.Module):
    """Three rounds of messages and a sum over nodes: kinds and adjacency to one number a graph."""

    def __init__(self, kinds: int, width: int, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(kinds, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.heard = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.leave = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, kinds: Tensor, adjacency: Tensor) -> Tensor:
        """The property of every graph."""
        state: Tensor = self.enter(kinds)
        for own, heard in zip(self.own, self.heard, strict=True):
            state = state + self.dropout(nn.functional.relu(own(state) + adjacency @ heard(state) / 3))
        answer: Tensor = self.leave(state.sum(1) / 5)
        return answer.squeeze(1)


def click_net(values: int, fields: int, dropout: float, width: int = 8) -> nn.Module:
    """An embedding for each field's value and a hidden layer over them: rows [batch, fields] to logits [batch]."""
    embedding = nn.Embedding(values, width)
    nn.init.normal_(embedding.weight, std=0.1)
    hidden = (nn.Linear(fields * width, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 1))
    return nn.Sequential(embedding, nn.Flatten(), *hidden, nn.Flatten(0))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The data and functions of a run: tensors whose first axis is the example, the target last.

    `model` takes the dropout rate; `loss` is what training minimises, with label smoothing where it has classes;
    `measure` is what a curve shows, lower is better; `augment` changes a training batch's inputs.
    """

    train: Tensors
    valid: Tensors
    model: Callable[[float], nn.Module]
    loss: Callable[[Tensor, Tensor, float], Tensor] = cross_entropy
    measure: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    augment: Callable[[Tensors, float], Tensors] = _same


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _digits() -> tuple[Tensor, Tensor]:
    """All 1,797 digits in a fixed random order: images [n, 8, 8] of mean 0, labels [n]."""
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=_generator(0))
    images = torch.tensor(bunch.images, dtype=torch.float32)[order] / 8 - 0.6
    return images, torch.tensor(bunch.target, dtype=torch.int64)[order]


def _mislabel(labels: Tensor, share: float, classes: int, seed: int) -> Tensor:
    """Labels of which a share is drawn anew."""
    generator = _generator(seed)
    chosen = torch.rand(labels.shape, generator=generator) < share
    return torch.where(chosen, torch.randint(classes, labels.shape, generator=generator), labels)


def shift(inputs: Tensors, strength: float) -> Tensors:
    """Move each image [batch, 1, h, w] by up to `strength` pixels in both directions."""
    reach = round(strength)
    if reach == 0:
        return inputs
    (images,) = inputs
    side = images.shape[-1]
    padded = nn.functional.pad(images, (reach,) * 4, value=images.min().item())
    windows = padded.unfold(2, side, 1).unfold(3, side, 1)
    down, right = torch.randint(2 * reach + 1, (2, len(images)))
    return (windows[torch.arange(len(images)), :, down, right],)


@cache
def digits(measured: str, noise: float) -> Workload:
    """Digits with mislabelled training examples, for a small convolutional net."""
    images, labels = _digits()
    images = images.unsqueeze(1)
    return Workload(
        train=(images[:500], _mislabel(labels[:500], noise, 10, seed=1)),
        valid=(images[1200:], labels[1200:]),
        model=lambda dropout: conv_net(8, dropout),
        measure=error_rate if measured == "error" else cross_entropy,
        augment=shift,
    )


def _clutter(images: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Canvases [count, 1, 14, 14]: a digit at a random place over noise and pieces of others; which digit."""
    generator = _generator(seed)
    chosen = torch.randint(len(images), (count,), generator=generator)
    canvas = 0.35 * torch.randn((count, 1, 14, 14), generator=generator) - 0.6
    corners = torch.randint(7, (count, 4), generator=generator).tolist()
    others = torch.randint(len(images), (count,), generator=generator)
    for i, (top, left, upper, side) in enumerate(corners):
        canvas[i, 0, upper : upper + 4, side : side + 4] += images[others[i], 2:6, 2:6] + 0.6
        canvas[i, 0, top : top + 8, left : left + 8] += images[chosen[i]] + 0.6
    return canvas, chosen


@cache
def clutter() -> Workload:
    """Digits lost in noise and pieces of other digits: harder vision, with batch normalisation."""
    images, labels = _digits()
    train, of_train = _clutter(images[:1000], 1500, seed=2)
    valid, of_valid = _clutter(images[1000:], 500, seed=3)
    return Workload(
        train=(train, labels[:1000][of_train]),
        valid=(valid, labels[1000:][of_valid]),
        model=lambda dropout: conv_net(14, dropout),
        measure=error_rate,
    )


def _text(source: str) -> Tensor:
    """Characters of Python's help topics or of two of its sources, as indices into the lower-case set."""
    if source == "topics":
        text = "".join(pydoc_data.topics.topics.values())
    else:
        text = "".join(inspect.getsource(module) for module in (inspect, pydoc))
    known = {c: i for i, c in enumerate(LETTERS)}
    return torch.tensor([known.get(c, 0) for c in text.lower()])


LETTERS = " \n" + string.ascii_lowercase + string.digits + string.punctuation


@cache
def characters(source: str, model: str, length: int = 20) -> Workload:
    """A language model of characters over windows of text, the last tenth held out."""
    windows = _text(source).unfold(0, length + 1, 1)
    cut = len(windows) * 9 // 10
    valid = windows[cut + length :: (len(windows) - cut) // 96]

    def build(dropout: float) -> nn.Module:
        if model == "gru":
            return Recurrent(nn.Embedding(len(LETTERS), 48), 48, len(LETTERS), dropout)
        return SequenceTransformer(len(LETTERS), length, causal=True, dropout=dropout)

    return Workload(
        train=(windows[:cut, :-1], windows[:cut, 1:]),
        valid=(valid[:, :-1], valid[:, 1:]),
        model=build,
    )


@cache
def translation(measured: str, words: int = 24, length: int = 10) -> Workload:
    """Sentences to be reversed and enciphered; the cipher of a word depends on the word before it."""
    generator = _generator(5)
    frequency = 1 / torch.arange(2, words + 2)
    source = torch.multinomial(frequency, 6200 * length, replacement=True, generator=generator).view(-1, length)
    ciphers = torch.stack([torch.randperm(words, generator=generator) for _ in range(2)])
    target = ciphers[source.roll(1, dims=1) % 2, source].flip(1)
    return Workload(
        train=(source[:6000], target[:6000]),
        valid=(source[6000:], target[6000:]),
        model=lambda dropout: SequenceTransformer(words, length, causal=False, dropout=dropout),
        measure=error_rate if measured == "error" else cross_entropy,
    )


def _utterances(count: int, seed: int, frames: int = 20, bins: int = 16, phones: int = 10) -> Tensors:
    """Noisy spectra [count, frames, bins] of random phones of 2 to 6 frames, and each frame's phone."""
    generator = _generator(seed)
    formants = torch.rand((phones, 2), generator=_generator(6)) * bins
    lengths = torch.randint(2, 7, (count, frames), generator=generator)
    ends = lengths.cumsum(1)
    piece = (torch.arange(frames).view(1, -1, 1) >= ends.unsqueeze(1)).sum(-1)
    phone = torch.randint(phones, (count, frames), generator=generator).gather(1, piece)
    speaker = 1.2 * torch.randn((count, 1, 1), generator=generator)
    centres = formants[phone] + speaker
    distance = torch.arange(bins).view(1, 1, 1, -1) - centres.unsqueeze(-1)
    spectra = torch.exp(-(distance**2) / 3).sum(2)
    return spectra + 0.7 * torch.randn(spectra.shape, generator=generator), phone


@cache
def speech() -> Workload:
    """Name the phone of every frame; each speaker's formants are shifted."""
    return Workload(
        train=_utterances(300, seed=7),
        valid=_utterances(100, seed=8),
        model=lambda dropout: Recurrent(Frames(16, 32, dropout), 32, 10, dropout),
        measure=error_rate,
    )


def _graphs(count: int, seed: int, nodes: int = 10, kinds: int = 4) -> Tensors:
    """Random graphs: kinds of nodes [count, nodes, kinds], adjacency [count, nodes, nodes], a property [count]."""
    generator = _generator(seed)
    kind = nn.functional.one_hot(torch.randint(kinds, (count, nodes), generator=generator), kinds).float()
    density = 0.15 + 0.3 * torch.rand((count, 1, 1), generator=generator)
    upper = (torch.rand((count, nodes, nodes), generator=generator) < density).float().triu(1)
    adjacency = upper + upper.transpose(1, 2)
    triangles = (adjacency @ adjacency @ adjacency).diagonal(dim1=1, dim2=2).sum(1) / 6
    charge = kind @ torch.tensor([-1.0, -0.3, 0.4, 1.0])
    bonds = (charge.unsqueeze(1) @ adjacency @ charge.unsqueeze(2)).flatten()
    noise = 0.3 * torch.randn(count, generator=generator)
    return kind, adjacency, 0.3 * triangles + 0.4 * bonds + charge.sum(1).abs() / 2 + noise


@cache
def graphs() -> Workload:
    """Regress a property made of triangles, bonds and charges by message passing."""
    return Workload(
        train=_graphs(500, seed=9),
        valid=_graphs(400, seed=10),
        model=lambda dropout: GraphNet(kinds=4, width=24, dropout=dropout),
        loss=absolute_error,
        measure=absolute_error,
    )


@cache
def clicks(fields: int = 6, values: int = 150) -> Workload:
    """Predict clicks from categorical fields with rare values; the truth is a factorisation machine."""
    generator = _generator(11)
    frequency = 1 / torch.arange(1, values + 1)
    drawn = torch.multinomial(frequency, 14000 * fields, replacement=True, generator=generator)
    rows = drawn.view(-1, fields) + values * torch.arange(fields)
    factors = 0.45 * torch.randn((fields * values, 4), generator=generator)
    bias = 0.5 * torch.randn(fields * values, generator=generator)
    chosen = factors[rows]
    pairs = (chosen.sum(1) ** 2 - (chosen**2).sum(1)).sum(1) / 2
    label = torch.bernoulli(torch.sigmoid(pairs + bias[rows].sum(1) - 1), generator=generator)
    return Workload(
        train=(rows[:6000], label[:6000]),
        valid=(rows[12000:], label[12000:]),
        model=lambda dropout: click_net(fields * values, fields, dropout),
        loss=log_loss,
        measure=log_loss,
    )


def blur(inputs: Tensors, strength: float) -> Tensors:
    """Add noise to the inputs of a denoising auto-encoder."""
    return (inputs[0] + 0.3 * strength * torch.randn_like(inputs[0]),)


@cache
def reconstruction() -> Workload:
    """Denoise digits through a bottleneck of eight numbers; good runs differ little."""
    images = _digits()[0].flatten(1)
    noisy = images + 0.3 * torch.randn(images.shape, generator=_generator(12))
    return Workload(
        train=(noisy[:1200], images[:1200]),
        valid=(noisy[1200:], images[1200:]),
        model=lambda dropout: mlp((64, 64, 8, 64, 64), dropout),
        loss=squared_error,
        measure=squared_error,
        augment=blur,
    )


@cache
def table() -> Workload:
    """Five classes from 20 columns of which 8 matter, by a random teacher net; some training labels are wrong."""
    generator = _generator(13)
    columns = torch.randn((4000, 20), generator=generator)
    hidden = torch.tanh(columns[:, :8] @ torch.randn((8, 24), generator=generator))
    labels = (hidden @ torch.randn((24, 5), generator=generator)).argmax(1)
    return Workload(
        train=(columns[:3000], _mislabel(labels[:3000], 0.1, 5, seed=14)),
        valid=(columns[3000:], labels[3000:]),
        model=lambda dropout: mlp((20, 64, 64, 5), dropout, normalise=True),
        measure=error_rate,
    )
