"""Several seeds: the interval, what is not trained twice, who is crowned, and what diverged seeds count."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from hpo.config.schema_types import MAX_EPOCHS
from hpo.config.study_modules import forget_modules
from hpo.errors import InputError, StudyError
from hpo.final.models import load_model
from hpo.final.seed_run import SeedTrainer
from hpo.final.seeds import estimate, leaders, together, train_over_seeds
from hpo.final.starting import Start, start_of_base, start_of_trial
from hpo.storage.attributes import FORK_ATTR
from hpo.study.open_study import OpenStudy
from hpo.trial.builder import Builder
from tests.support.attempts import run
from tests.support.commands import MODEL, STUDY, hpo, hpo_json
from tests.support.finished import finished_study
from tests.support.studies import Studies

pytestmark = pytest.mark.full

CPU = torch.device("cpu")


def over_seeds(view: OpenStudy, starts: list[Start], *seeds: int, epochs: int | None = 2) -> dict[str, Any]:
    return train_over_seeds(SeedTrainer(Builder(view.spec), epochs, CPU), starts, seeds)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory, ready_sqlite_file: Path) -> Iterator[OpenStudy]:
    with finished_study(tmp_path_factory.mktemp("study"), ready_sqlite_file) as opened:
        yield opened


@pytest.fixture(scope="module")
def ranked(view: OpenStudy) -> dict[str, Any]:
    return over_seeds(view, leaders(view, 2), 0, 1, 2)


def weights(path: str | Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)


def test_the_interval_is_students() -> None:
    values = [1.0, 2.0, 4.0, 4.5]
    found = estimate(values)
    low, high = stats.t.interval(0.95, 3, loc=2.875, scale=stats.sem(values))
    assert (found.mean, found.n) == (2.875, 4)
    assert found.half_width == pytest.approx((high - low) / 2)
    assert estimate([3.0]).half_width is None
    assert estimate([3.0, 3.0]).half_width == 0


def test_the_best_on_average_is_crowned_and_its_best_seed_kept(view: OpenStudy, ranked: Mapping[str, Any]) -> None:
    means = [entry["estimates"]["val_loss"]["mean"] for entry in ranked["ranking"]]
    assert means == sorted(means)
    assert {entry["rank_before"] for entry in ranked["ranking"]} == {1, 2}
    assert ranked["trial"] == ranked["ranking"][0]["trial"]
    values = [run["value"] for run in ranked["runs"]]
    assert means[0] == pytest.approx(sum(values) / 3)
    assert ranked["kept"]["value"] == min(values)
    assert {"val_loss", "val_mae", "test_loss", "test_mae"} == set(ranked["estimates"])
    final = view.spec.output_dir / "final"
    assert json.loads((final / "metrics.json").read_text()) == json.loads(json.dumps(ranked))
    kept, model = weights(Path(ranked["kept"]["folder"]) / "model.pt"), weights(ranked["model"])
    assert all(torch.equal(tensor, model[name]) for name, tensor in kept.items())
    assert not list(final.rglob("checkpoints"))
    assert not [file for file in final.rglob(".*") if file.is_file()]


def test_a_finished_seed_is_not_trained_again(view: OpenStudy, ranked: Mapping[str, Any]) -> None:
    again = over_seeds(view, leaders(view, 2), 2, 1, 0, 5)
    first, second = (
        {(entry["trial"], run["seed"]): run for entry in result["ranking"] for run in entry["runs"]}
        for result in (ranked, again)
    )
    assert len(second) == 8
    assert {key for key, run in second.items() if run["trained_before"]} == set(first)
    assert all(second[key]["value"] == run["value"] for key, run in first.items())


@pytest.mark.parametrize("change", ["epochs", "config", "code", "damaged", "weights"])
def test_a_seed_of_something_else_is_trained_again(studies: Studies, change: str) -> None:
    with studies.open() as (view,):
        base = start_of_base(view.spec)
        first = over_seeds(view, [base], 7, epochs=1)["runs"][0]
        folder, spec = Path(first["folder"]), view.spec
        if change == "config":
            spec = studies.spec("model.dropout=0.2")
        elif change == "code":
            code = spec.folder / "parts.py"
            code.write_text(code.read_text() + "\nCHANGED = True\n")
            forget_modules(spec.folder)  # as another process
        elif change == "damaged":
            (folder / "metrics.json").write_text("{")
        elif change == "weights":
            (folder / "model.pt").unlink()
        trainer = SeedTrainer(Builder(spec), 2 if change == "epochs" else 1, CPU)
        again = trainer.run(start_of_base(spec), 7, "again")
        assert not again.trained_before
        assert again.epochs == (2 if change == "epochs" else 1)
        assert trainer.run(start_of_base(spec), 7, "once more").trained_before


def test_an_interrupted_seed_goes_on_and_ends_in_the_same_weights(studies: Studies) -> None:
    overrides = ("callbacks.stop={_target_: parts.Interrupt, epoch: 2}", "callbacks.checkpoint={max_overhead: 1}")
    with studies.open(*overrides, code=MODEL + INTERRUPT) as (view,):
        whole = over_seeds(view, [start_of_base(view.spec)], 1, epochs=4)  # the file that stops it is not there
        expected = weights(whole["model"])
        (view.spec.folder / "stop").touch()
        (Path(whole["runs"][0]["folder"]) / "run.json").unlink()
        command = ("train", view.spec.path, *overrides, "--seeds", "1,", "--epochs", 4)
        assert "the same command resumes it" in hpo(*command, code=130).stderr
        (view.spec.folder / "stop").unlink()
        assert "resuming from epoch 2" in hpo(*command).stdout
        again = over_seeds(view, [start_of_base(view.spec)], 1, epochs=4)["runs"][0]
        assert (again["epochs"], again["trained_before"]) == (4, True)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(whole["model"]).items())


@pytest.mark.parametrize("trial", [(), ("--trial", "best")], ids=["base config", "from a checkpoint"])
def test_an_interrupted_training_without_seeds_goes_on_and_ends_in_the_same_weights(
    studies: Studies, trial: tuple[str, ...]
) -> None:
    overrides = ("callbacks.stop={_target_: parts.Interrupt, epoch: 5}", "callbacks.checkpoint={max_overhead: 1}")
    with studies.open(*overrides, code=MODEL + INTERRUPT) as (view,):
        run(view)
        command = ("train", view.spec.path, *overrides, *trial, "--epochs", 7)
        final = view.spec.output_dir / "final"
        assert "resuming" not in hpo(*command).stdout
        expected = weights(final / "model.pt")
        (view.spec.folder / "stop").touch()
        stopped = hpo(*command, code=130)
        assert "resuming" not in stopped.stdout  # the one before has come to its end
        assert "the same command resumes it" in stopped.stderr
        (view.spec.folder / "stop").unlink()
        resumed = hpo(*command)
        assert f"resuming from {final / 'checkpoints' / 'epoch-00005.pt'}" in resumed.stdout
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(final / "model.pt").items())


def test_a_final_training_with_another_config_than_the_trials_says_so(studies: Studies) -> None:
    with studies.open() as (view,):
        run(view)
        command = ("train", view.spec.path, "--trial", "best", "--epochs", 7)
        assert "config" not in hpo(*command).stderr
        changed = hpo(*command, "loader.batch_size=7").stderr
        assert "warning: the trials ran with another config than the one here:\n    loader.batch_size: " in changed


def test_an_interrupted_training_is_not_resumed_by_another_one(studies: Studies) -> None:
    overrides = ("callbacks.stop={_target_: parts.Interrupt, epoch: 2}", "callbacks.checkpoint={max_overhead: 1}")
    with studies.open(*overrides, code=MODEL + INTERRUPT) as (view,):
        (view.spec.folder / "stop").touch()
        hpo("train", view.spec.path, *overrides, "--epochs", 4, code=130)
        (view.spec.folder / "stop").unlink()
        assert "resuming" not in hpo("train", view.spec.path, *overrides, "--epochs", 5).stdout


@pytest.mark.parametrize("csv", ["true", "false"])
def test_nothing_of_an_earlier_training_stays_beside_the_seed_that_is_kept(studies: Studies, csv: str) -> None:
    overrides = ("callbacks.stop={_target_: parts.Interrupt, epoch: 2}", "callbacks.checkpoint={max_overhead: 1}")
    spec = studies.spec(code=MODEL + INTERRUPT)
    final = spec.output_dir / "final"
    (spec.folder / "stop").touch()
    hpo("train", spec.path, *overrides, "--epochs", 4, code=130)
    (spec.folder / "stop").unlink()
    assert (final / "run.json").exists()
    assert list((final / "checkpoints").iterdir())
    kept = hpo_json("train", spec.path, f"callbacks.csv={csv}", "--seeds", "1,", "--epochs", 2)["kept"]
    names = {file.name for file in final.iterdir() if file.is_file()}
    assert names == {"config.yaml", "metrics.json", "model.pt"} | ({"metrics.csv"} if csv == "true" else set())
    for name in names - {"metrics.json"}:
        assert (final / name).read_bytes() == (Path(kept["folder"]) / name).read_bytes()
    assert not list((final / "checkpoints").iterdir())


INTERRUPT = """

from pathlib import Path

from trainer import Callback


class Interrupt(Callback):
    transient = ("epoch",)

    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_epoch_start(self, trainer):
        if trainer.state.epoch == self.epoch and (Path(__file__).parent / "stop").exists():
            raise KeyboardInterrupt


class Unlucky(nn.Module):
    def __init__(self, seeds):
        super().__init__()
        self.nan = torch.initial_seed() in seeds

    def forward(self, outputs, targets):
        return ((outputs - targets) ** 2).mean() * (float("nan") if self.nan else 1.0)
"""


def test_diverged_seeds_are_counted_and_put_a_trial_behind(studies: Studies) -> None:
    with studies.open("loss={_target_: parts.Unlucky, seeds: [1]}", code=MODEL + INTERRUPT) as (view,):
        result = over_seeds(view, [start_of_base(view.spec)], 0, 1, 2)
        assert result["diverged"] == [1]
        assert [run["value"] is None for run in result["runs"]] == [False, True, False]
        assert result["estimates"]["val_loss"]["n"] == 2
        assert math.isfinite(result["estimates"]["val_loss"]["mean"])
        assert over_seeds(view, [start_of_base(view.spec)], 1, 0)["runs"][0]["trained_before"]
        with pytest.raises(StudyError, match=r"(?s)diverged with every seed.*fix:"):
            over_seeds(view, [start_of_base(view.spec)], 1)


def test_a_trial_with_a_diverged_seed_is_behind_one_without(studies: Studies) -> None:
    with studies.open("loss={_target_: parts.Explode, nan: false}") as (view,):
        better = Start("trial 0", 0, 0, {"optimizer.lr": 0.05, "loss.nan": True}, None)
        worse = Start("trial 1", 1, 0, {"optimizer.lr": 1e-6, "model.hidden": 2}, None)
        result = over_seeds(view, [better, worse], 0)
        assert [entry["trial"] for entry in result["ranking"]] == [1, 0]
        assert result["ranking"][1]["rank_before"] == 1


def test_intervals_that_meet_are_said() -> None:
    def entry(trial: int, mean: float, half: float | None) -> dict[str, Any]:
        return {"trial": trial, "estimates": {"loss": {"mean": mean, "half_width": half, "n": 3}}}

    apart = {"trial": 9, "estimates": {}}
    ranking = [entry(1, 1.0, 0.1), entry(2, 1.15, 0.1), entry(3, 2.0, 0.2), entry(4, 3.0, None), apart]
    assert together(ranking, "loss") == [2, 4]


def test_leaders_of_equal_parameters_count_once(studies: Studies) -> None:
    with studies.open("study.duplicates=allow") as (view,):
        for value, params in ((2.0, 4), (1.0, 3), (0.5, 4)):
            view.study.enqueue_trial({"optimizer.lr": 0.01, "model.hidden": params})
            trial = view.study.ask()
            view.space.suggest(trial)
            view.study.tell(trial, value)
        assert [(start.trial, start.value) for start in leaders(view, 5)] == [(2, 0.5), (1, 1.0)]


def test_forks_of_equal_parameters_are_one_only_where_their_parents_are(studies: Studies) -> None:
    with studies.open("study.duplicates=allow") as (view,):
        for value, hidden, parent in ((4.0, 4, None), (3.0, 3, None), (2.0, 3, 0), (1.0, 3, 1), (0.5, 3, 0)):
            view.study.enqueue_trial({"optimizer.lr": 0.01, "model.hidden": hidden})
            trial = view.study.ask()
            view.space.suggest(trial)
            if parent is not None:
                trial.set_user_attr(FORK_ATTR, {"parent": parent, "epoch": 1, "replaces": None})
            view.study.tell(trial, value)
        assert [start.trial for start in leaders(view, 5)] == [4, 3, 0]
        assert [start.trial for start in leaders(view, 2)] == [4, 3]


def test_leaders_of_other_code_are_refused_by_the_option_that_asked_for_them(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    with studies.open() as (view,):
        run(view)
        monkeypatch.setattr("hpo.final.starting.trial_codes", lambda *_: ["0ther"])
        with pytest.raises(InputError, match=r"(?s)^--top-k: trial 0 ran under the code 0ther.*value: 3"):
            leaders(view, 3)
        with pytest.raises(InputError, match=r"(?s)^--trial: trial 0 ran under the code 0ther.*value: 0"):
            start_of_trial(view, "best", from_scratch=True)


def test_a_study_without_leaders_says_why(studies: Studies) -> None:
    with studies.open() as (view,), pytest.raises(StudyError, match="no complete trial yet"):
        leaders(view, 3)


def test_several_objectives_have_no_leaders(studies: Studies) -> None:
    text = STUDY.replace("pruner: none", "pruner: none\n  objectives: {val_loss: minimize, val_mae: minimize}")
    with (
        studies.open(text=text) as (view,),
        pytest.raises(StudyError, match=r"(?s)several objectives.*fix:.*--trial"),
    ):
        leaders(view, 3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--seeds", "x"), "is not a list of seeds"),
        (("--seeds", "1,,2"), "is not a list of seeds"),
        (("--seeds", "-3"), "is not a list of seeds"),
        (("--seeds", "0"), "asks for no seed"),
        (("--seeds", "1,1"), "names a seed twice"),
        (("--seeds", "2024"), "write `--seeds 2024,`"),
        (("--seeds", "4294967296,"), "seed of 2**32 or more"),
        (("--top-k", "2", "--trial", "best"), "can't stand beside --top-k"),
    ],
)
def test_what_makes_no_sense_is_refused(view: OpenStudy, options: tuple[str, ...], text: str) -> None:
    refusal = hpo("train", view.spec.path, *options, code=2).stderr
    assert text in refusal
    assert "fix:" in refusal


def test_epochs_beyond_the_most_are_refused_by_their_option(view: OpenStudy) -> None:
    refusal = hpo("train", view.spec.path, "--epochs", MAX_EPOCHS + 1, code=2).stderr
    assert "Invalid value for '--epochs'" in refusal
    assert str(MAX_EPOCHS) in refusal
    with pytest.raises(InputError) as refused:
        view.spec.resolve({"trainer.max_epochs": MAX_EPOCHS + 1})
    assert refused.value.path == "trainer.max_epochs"  # which this study does not search


def test_single_values_have_no_intervals_that_could_meet(view: OpenStudy) -> None:
    printed = hpo("train", view.spec.path, "--top-k", 2, "--seeds", 1, "--epochs", 1).stdout
    assert "a single value has no interval: more seeds may change the order" in printed
    assert "the intervals of" not in printed


@pytest.mark.parametrize(
    ("top_k", "named"),
    [
        (1, ", trial "),
        (2, ", the best 2 trials, from scratch"),
        (4, ", the best 3 trials (4 were asked for: no other parameters have a rank), from scratch"),
    ],
)
def test_the_command_says_how_many_of_the_best_it_trains(view: OpenStudy, top_k: int, named: str) -> None:
    printed = hpo("train", view.spec.path, "--top-k", top_k, "--seeds", 1, "--epochs", 1).stdout
    assert named in printed.splitlines()[0]
    assert "best 1 trials" not in printed


def test_the_command_prints_seeds_and_ranks(view: OpenStudy) -> None:
    printed = hpo("train", view.spec.path, "--top-k", 2, "--epochs", 2).stdout
    assert "seeds 0, 1, 2" in printed
    assert "val_loss in the study" in printed
    assert "±" in printed
    single = hpo_json("train", view.spec.path, "--trial", "best", "--seeds", "1,", "--epochs", 2)
    assert [run["seed"] for run in single["runs"]] == [1]
    assert single["trial"] == start_of_trial(view, "best", from_scratch=True).trial
    assert single["estimates"]["val_loss"]["half_width"] is None
    base = hpo_json("train", view.spec.path, "--seeds", 2, "--epochs", 1)
    assert (base["trial"], base["seeds"]) == (None, [0, 1])
    assert load_model(view.spec)  # the trial's own checkpoints are untouched


def test_a_full_disk_leaves_no_part_of_a_copy(view: OpenStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    final = view.spec.output_dir / "final"
    over_seeds(view, [start_of_base(view.spec)], 0, epochs=1)
    files = {file.name for file in final.iterdir()}
    monkeypatch.setattr(shutil, "copyfile", full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        over_seeds(view, [start_of_base(view.spec)], 0, epochs=1)
    assert {file.name for file in final.iterdir()} == files
