"""Write docs/notebook.ipynb: run the cells below in a folder of their own, and keep what they show.

python docs/make_notebook.py
"""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("notebook.ipynb")
#: What stands in the outputs for the folder that the cells ran in.
SHOWN_FOLDER = "/home/me/digits"

#: Each cell's source; those that begin with ``#`` and a space are text.
CELLS = (
    """\
# A tuned model, from a notebook

Which small network reads handwritten digits best? We write the model and the data, say what to search, and let
workers find out. Everything here works in a script, too.""",
    """\
%%writefile digits.py
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def load():
    pictures = load_digits()
    inputs = torch.from_numpy(pictures.data).float() / 16
    targets = torch.from_numpy(pictures.target).long()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    parts = {"train": order[:1200], "val": order[1200:1500], "test": order[1500:]}
    return {name: TensorDataset(inputs[rows], targets[rows]) for name, rows in parts.items()}


class MLP(nn.Sequential):
    def __init__(self, hidden=64, dropout=0.1):
        super().__init__(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10))


def accuracy(outputs, targets):
    return (outputs.argmax(dim=1) == targets).float().mean()""",
    """\
# Workers are processes of their own, which import what they train: that is why the cell above goes into a file.
Now the study, with ordinary classes. `hpo.Call` gives a class its arguments; what is searched goes by its dotted
path.""",
    """\
import warnings

import torch
from digits import MLP, accuracy, load
from torch import nn

import hpo

warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, which Optuna imports

study = hpo.Study(
    "notebook",
    n_trials=10,
    sampler={"name": "tpe", "seed": 0, "n_startup_trials": 5},
    data=load,
    model=MLP,
    loss=nn.CrossEntropyLoss,
    optimizer=hpo.Call(torch.optim.AdamW, lr=1e-3),
    lr_scheduler=hpo.Call(torch.optim.lr_scheduler.CosineAnnealingLR, T_max="${trainer.max_epochs}"),
    metrics={"accuracy": accuracy},
    loader={"batch_size": 64},
    trainer={"max_epochs": 6},
    search_space={
        "optimizer.lr": hpo.Float(1e-4, 1e-1, log=True),
        "model.hidden": hpo.Int(8, 128, log=True),
        "model.dropout": hpo.Float(0.0, 0.5),
    },
)
result = hpo.run(study, workers=2)
result""",
    """\
# Interrupting the cell stops the trials with a checkpoint; running it again resumes them. A study that
has ended says so immediately, and `hpo.run(study, n_trials=20)` gives it ten trials more.""",
    "result.best",
    "hpo.best_params(study)",
    """\
# `hpo.load_study` is Optuna's own study, so all of `optuna.visualization` works on it, also from another notebook
while the study runs.""",
    """\
import matplotlib.pyplot as plt
import optuna
from optuna.visualization import matplotlib as figures

warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
plt.rcParams.update({"figure.dpi": 60, "figure.figsize": (9, 4)})

trials = hpo.load_study(study)
figures.plot_intermediate_values(trials)
plt.yscale("log")
figures.plot_slice(trials, params=["optimizer.lr", "model.hidden"])
plt.show()""",
    """\
# The best trial's model, with the weights of its best epoch, on pictures that no trial has seen:""",
    """\
model = hpo.load_best_model(study)
inputs, targets = load()["test"].tensors
with torch.no_grad():
    outputs = model(inputs)
print(f"test accuracy {accuracy(outputs, targets):.3f} on {len(targets)} pictures")

_, axes = plt.subplots(1, 8, figsize=(9, 1.6))
for axis, picture, output in zip(axes, inputs[:8], outputs[:8], strict=True):
    axis.imshow(picture.reshape(8, 8), cmap="gray_r")
    axis.set(title=str(output.argmax().item()), xticks=[], yticks=[])
plt.show()""",
    """\
# A run has written the study as a file, too. Every command takes it: `hpo status notebook.yaml`, `hpo report
notebook.yaml`, `hpo train notebook.yaml --trial best`.""",
    "print(study.path.read_text())",
)


def fresh() -> nbformat.NotebookNode:
    """The notebook without outputs."""
    cells = []
    for number, source in enumerate(CELLS, 1):
        new = nbformat.v4.new_markdown_cell if source.startswith("# ") else nbformat.v4.new_code_cell
        # A text that continues the one before has no headline.
        text = source if number == 1 or not source.startswith("# ") else source.removeprefix("# ")
        cells.append(new(text, id=f"cell-{number}"))
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells in a folder; nbclient's CellExecutionError where one fails."""
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, resources=resources, record_timing=False).execute()


def main() -> None:
    """Run the cells and write the notebook."""
    notebook = fresh()
    with tempfile.TemporaryDirectory() as folder:
        execute(notebook, Path(folder))
        text = nbformat.writes(notebook).replace(folder, SHOWN_FOLDER)
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
