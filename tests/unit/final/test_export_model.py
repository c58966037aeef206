"""Models as files: what is read back is the model, and nothing is left where that can't be."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hpo.errors import InputError, StudyError
from hpo.final.export_model import check_export_path, export_model
from hpo.final.models import best_weights, load_model
from hpo.study.open_study import OpenStudy
from hpo.trial.builder import Builder
from tests.support.attempts import run
from tests.support.commands import STUDY, hpo, hpo_json
from tests.support.finished import finished_study
from tests.support.studies import Studies

pytestmark = pytest.mark.full

MODELS = """
from huggingface_hub import PyTorchModelHubMixin

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.there, self.back, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.back.weight = self.there.weight

    def forward(self, inputs):
        return self.out(self.back(self.there(inputs)))


class Branching(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, inputs):
        return super().forward(inputs if inputs.sum() > 0 else -inputs)


class Hub(nn.Module, PyTorchModelHubMixin):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.out(inputs)


class Fixed(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, inputs):
        return super().forward(inputs.reshape(len(inputs) // 8, 8, 4).flatten(0, 1))


class Noisy(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, inputs):
        return super().forward(inputs) + torch.rand_like(inputs[:, :1])


class Masked(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, inputs, *, mask):
        return super().forward(inputs) * mask["mask"]


def masked_step(model, batch):
    inputs, targets = batch
    outputs = model(inputs, mask={"mask": torch.ones(len(inputs), 1)})
    return {"loss": ((outputs - targets) ** 2).mean(), "outputs": outputs}


def updating_step(model, batch, update):
    outputs = model(batch[0])
    loss = (outputs - batch[1]).square().mean()
    update(loss)
    return {"loss": loss, "outputs": outputs}


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(1, 1)

    def forward(self, sequences):
        return self.layer(sequences)[1][0]


def packed_step(model, batch):
    outputs = model(nn.utils.rnn.pack_sequence([row[:, None] for row in batch[0]]))
    return {"loss": (outputs - batch[1]).square().mean(), "outputs": outputs}


def parts_step(model, batch):
    return {"loss": model.weight.square().sum()}
"""


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory, ready_sqlite_file: Path) -> Iterator[OpenStudy]:
    with finished_study(tmp_path_factory.mktemp("study"), ready_sqlite_file, n_trials=2) as opened:
        yield opened


def trained(studies: Studies, model: str, *more: str) -> Iterator[OpenStudy]:
    """A study of one trial with one of the models above."""
    studies.spec()
    code = studies.folder / "parts.py"
    code.write_text(code.read_text() + MODELS)
    space = "search_space={optimizer.lr: {type: float, low: 0.01, high: 0.1}}"
    with studies.open(f"model={{_target_: parts.{model}}}", space, "trainer.max_epochs=1", *more) as (view,):
        run(view)
        yield view


def test_weights_are_read_back_as_they_are(view: OpenStudy, tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.safetensors"
    done = export_model(view, "best", path, command="hpo best")
    model, found = load_model(view.spec), best_weights(view, "best")
    with safe_open(path, "pt") as file:
        facts = file.metadata()
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in model.state_dict().items())
    assert (facts["study"], facts["trial"], facts["epoch"]) == ("tiny", str(found.trial), str(found.epoch))
    assert json.loads(facts["params"]) == found.params
    assert done["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(Path(done["card"]).stat().st_mode)
    export_model(view, "1", path.with_suffix(".pt"), command="hpo best")
    weights = torch.load(path.with_suffix(".pt"), weights_only=True)
    assert all(
        torch.equal(weights[name], tensor) for name, tensor in load_model(view.spec, "1").state_dict().items()
    )


def test_an_export_takes_the_place_of_an_earlier_one(view: OpenStudy, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    for which in ("0", "1"):
        export_model(view, which, path, command="hpo best")
        bias = torch.load(path, weights_only=True)["layers.3.bias"]
        assert torch.equal(bias, load_model(view.spec, which).state_dict()["layers.3.bias"])
    assert {file.name for file in tmp_path.iterdir()} >= {"model.pt", "model.pt.md"}
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("size", [1, 5, 32])
def test_an_exported_program_takes_batches_of_any_size(view: OpenStudy, tmp_path: Path, size: int) -> None:
    export_model(view, "best", tmp_path / "model.pt2", command="hpo best")
    program = torch.export.load(tmp_path / "model.pt2").module()
    inputs = Builder(view.spec).data(view.spec.resolve())["val"].tensors[0][:size]
    with torch.no_grad():
        assert torch.allclose(program(inputs), load_model(view.spec)(inputs))


def test_a_program_is_called_as_the_study_s_own_step_calls_the_model(studies: Studies, tmp_path: Path) -> None:
    own = ("loss=null", "step={_target_: parts.masked_step}")
    for view in trained(studies, "Masked", *own):
        export_model(view, "best", tmp_path / "model.pt2", command="hpo best")
        program = torch.export.load(tmp_path / "model.pt2").module()
        assert program(torch.ones(3, 4), mask={"mask": torch.zeros(3, 1)}).tolist() == [[0.0]] * 3


def test_a_step_that_makes_its_own_updates_shows_how_the_model_is_called(studies: Studies, tmp_path: Path) -> None:
    for view in trained(studies, "Hub", "loss=null", "step={_target_: parts.updating_step}"):
        export_model(view, "best", tmp_path / "model.pt2", command="hpo best")
        program = torch.export.load(tmp_path / "model.pt2").module()
        assert program(torch.ones(3, 4)).shape == (3, 1)


def test_weights_that_layers_share_are_stored_once(studies: Studies, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for view in trained(studies, "Tied"):
        export_model(view, "best", path, command="hpo best")
        with safe_open(path, "pt") as file:
            assert len({"there.weight", "back.weight"} & set(file.keys())) == 1


@pytest.mark.parametrize(
    ("model", "more", "text"),
    [
        ("Branching", (), r"can't see through parts\.Branching"),
        ("Fixed", (), r"can't see through parts\.Fixed"),
        ("Noisy", (), "gives other outputs"),
        ("Fixed", ("loss=null", "metrics=null", "step={_target_: parts.parts_step}"), "calls only parts of it"),
        ("Recurrent", ("loss=null", "step={_target_: parts.packed_step}"), "takes no PackedSequence"),
    ],
)
def test_what_torch_export_can_t_do_is_said_and_leaves_nothing(
    studies: Studies, tmp_path: Path, model: str, more: tuple[str, ...], text: str
) -> None:
    path = tmp_path / "out" / "model.pt2"
    for view in trained(studies, model, *more):
        with pytest.raises(StudyError, match=text):
            export_model(view, "best", path, command="hpo best")
        assert not list(path.parent.iterdir())


def test_single_samples_are_too_few_for_a_program(studies: Studies, tmp_path: Path) -> None:
    with studies.open("data.samples=3", "trainer.max_epochs=1") as (view,):
        run(view)
        with pytest.raises(StudyError, match="batches of two samples"):
            export_model(view, "best", tmp_path / "model.pt2", command="hpo best")


def test_a_place_that_can_t_be_written_is_said(view: OpenStudy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StudyError, match=r"(?s)can't be written.*fix:"):
        export_model(view, "best", tmp_path / "file" / "model.pt", command="hpo best")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.onnx", "names no format"),
        ("model.bin", "names no format"),
        ("m\udce4.pt", "its path holds bytes that are no text"),
    ],
)
def test_other_suffixes_are_refused(name: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        check_export_path(Path(name))


def test_a_name_without_a_suffix_is_a_folder_that_the_card_s_code_reads(
    studies: Studies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for view in trained(studies, "Hub"):
        card = Path(export_model(view, "best", tmp_path / "hub", command="hpo best")["card"]).read_text()
        export_model(view, "best", tmp_path / "hub", command="hpo best")  # in its place
        expected = load_model(view.spec).state_dict()
    monkeypatch.chdir(tmp_path)
    names: dict[str, torch.nn.Module] = {}
    exec(card.partition("```python\n")[2].partition("```")[0], names)
    assert all(torch.equal(value, expected[name]) for name, value in names["model"].state_dict().items())
    assert (tmp_path / "hub" / "model.safetensors").exists()


def test_a_folder_needs_a_model_that_writes_one_and_a_free_place(view: OpenStudy, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"(?s)has no save_pretrained.*fix: export to \.safetensors"):
        export_model(view, "best", tmp_path / "model", command="hpo best")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").touch()
    with pytest.raises(InputError, match="holds other things than a model"):
        check_export_path(tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "model.py"]


def test_the_command(view: OpenStudy, tmp_path: Path) -> None:
    study = view.spec.path
    assert "card:" in hpo("best", study, "--export", tmp_path / "a.pt").stdout
    done = hpo_json("best", study, "--export", tmp_path / "b.safetensors", "--trial", 1)
    assert (done["trial"], done["path"]) == (1, str(tmp_path / "b.safetensors"))
    assert "--trial 1" in Path(done["card"]).read_text()
    (tmp_path / "c.pt").mkdir()
    assert "is a folder" in hpo("best", study, "--export", tmp_path / "c.pt", code=2).stderr
    assert "needs --export" in hpo("best", study, "--trial", 1, code=2).stderr
    assert "neither" in hpo("best", study, "--export", "a.pt", "--trial", "x", code=2).stderr
    assert "has no trial 9" in hpo("best", study, "--export", tmp_path / "a.pt", "--trial", 9, code=3).stderr


def test_a_password_stays_out_of_the_card(view: OpenStudy, tmp_path: Path) -> None:
    # The override is a parameter of nothing that matters here; it stands in the command line all the same.
    secret = "callbacks.notifier={url: 'jsons://me:secret@example.org/'}"
    hpo("best", view.spec.path, secret, "--export", tmp_path / "a.pt")
    assert "secret" not in (tmp_path / "a.pt.md").read_text()


@pytest.mark.filterwarnings("ignore:Query string argument")  # SQLite takes no password
@pytest.mark.parametrize("form", ["--storage {}", "--storage={}", "run.storage={}"])
def test_a_password_in_the_query_of_a_url_stays_out_of_the_card_too(
    view: OpenStudy, tmp_path: Path, form: str
) -> None:
    url = f"{view.spec.storage_url}?password=secret&timeout=9"
    hpo("best", view.spec.path, *form.format(url).split(), "--export", tmp_path / "a.pt")
    made_by = (tmp_path / "a.pt.md").read_text().partition("## Made by")[2]
    assert "?password=***&timeout=9" in made_by
    assert "secret" not in made_by


def test_a_front_is_shown_as_a_table(studies: Studies) -> None:
    text = STUDY.replace("pruner: none", "pruner: none\n  objectives: {val_loss: minimize, val_mae: minimize}")
    with studies.open(text=text) as (view,):
        run(view)
        printed = hpo("best", view.spec.path).stdout
        assert "Pareto front of tiny" in printed
        assert "val_mae" in printed
        assert [entry["trial"] for entry in hpo_json("best", view.spec.path)] == [0]
        refused = hpo("best", view.spec.path, "--export", studies.folder / "a.pt", code=3).stderr
        assert "Pareto front: 0" in refused
