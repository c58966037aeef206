"""Nonsense in a study file: `hpo check` names its place and the fix, once, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import hpo, make_study

SERVER = "storage: 'postgresql://host/db'"
LR = "optimizer.lr: {type: float, low: 1e-3, high: 1e-1, log: true}"

#: What stands in the study's place, what in the file is replaced by it ("" where it is added), and what is said.
NONSENSE = {
    "no mapping": ("run: fast", "", "17: run: must be a mapping"),
    "no mapping that others refer to": (
        "trainer: long",
        "trainer: {max_epochs: 3}",
        "13: trainer: must be a mapping",
    ),
    "a study of nothing": ("n_trials:", "n_trials: 6", "3: study.n_trials: must be a whole number"),
    "no epochs": ("epochs: 0", "n_trials: 6", "3: study.epochs: must be at least 1"),
    "digits of another script": ("n_trials: \uff16", "n_trials: 6", "3: study.n_trials: must be a whole number"),
    "a name that reads backwards": ('name: "a\\u202eb"', "name: tiny", "2: study.name: may hold only letters"),
    "a sampler that is a list": (
        "sampler: [random]",
        "sampler: {name: random, seed: 3}",
        "4: study.sampler: must be",
    ),
    "a scheduler of others": ("scheduler: bohb", "pruner: none", "5: study.scheduler.name: no scheduler has this"),
    "a population of none": (
        "scheduler: {name: pbt, population: 0}",
        "pruner: none",
        "5: study.scheduler: pbt refuses its arguments: population is 0",
    ),
    "a limit of 16 bytes": (
        "run: {trial_memory: 16}\nstudy:\n  name: tiny",
        "study:\n  name: tiny",
        "1: run.trial_memory: is 16 bytes",
    ),
    "seconds behind minutes": (
        "run: {lost_after: 60m30}\nstudy:\n  name: tiny",
        "study:\n  name: tiny",
        "1: run.lost_after: is not a duration",
    ),
    "a factor in words": (
        "scheduler: {name: asha, factor: four}",
        "pruner: none",
        "5: study.scheduler.factor: must be a whole number",
    ),
    "a factor without an end": (
        "scheduler: {name: hyperband, factor: .inf}",
        "pruner: none",
        "5: study.scheduler.factor: must be a whole number",
    ),
    "a factor that promotes all": (
        "scheduler: {name: hyperband, factor: 1}",
        "pruner: none",
        "5: study.scheduler: hyperband refuses its arguments: factor is 1: give at least 2",
    ),
    "a rung before the first epoch": (
        "scheduler: {name: asha, first_rung: 0}",
        "pruner: none",
        "5: study.scheduler: asha refuses its arguments: first_rung is 0: give at least 1 epoch",
    ),
    "half a member": (
        "scheduler: {name: pbt, population: 4.5}",
        "pruner: none",
        "5: study.scheduler.population: must be a whole number",
    ),
    "a share in percent": (
        "scheduler: {name: pbt, quantile: 25%}",
        "pruner: none",
        "5: study.scheduler.quantile: must be a number",
    ),
    "a switch that is on": (
        "scheduler: {name: freeze_thaw, switch: yes}",
        "pruner: none",
        "5: study.scheduler.switch: must be a number or null",
    ),
    "a switch without an end": (
        "scheduler: {name: freeze_thaw, switch: .inf}",
        "pruner: none",
        "5: study.scheduler: freeze_thaw refuses its arguments: switch=inf must be 0 or more epochs, and finite",
    ),
    "a switch of nothing": (
        "scheduler: {name: freeze_thaw, switch: .nan}",
        "pruner: none",
        "5: study.scheduler.switch: must be a number or null",
    ),
    "a choice among none": (
        "sampler: {name: tpe, n_ei_candidates: 0}",
        "sampler: {name: random, seed: 3}",
        "4: study.sampler: can't be used with these arguments: ",
    ),
    "a number of trials in words": (
        "pruner: {name: median, n_startup_trials: five}",
        "pruner: none",
        "5: study.pruner.n_startup_trials: must be a whole number",
    ),
    "a constraint without a bound": (
        "pruner: none\n  constraints: {lr: 3}",
        "pruner: none",
        "6: study.constraints.lr",
    ),
    "no import path": (
        "data: {_target_: [a]}",
        "data: {_target_: parts.load}",
        "6: data._target_: is not an import",
    ),
    "a command": (
        "data: {_target_: os.system}",
        "data: {_target_: parts.load}",
        "6: data._target_: Hydra refuses",
    ),
    "a metric of nothing": (
        "metrics: {mae: }",
        "metrics: {mae: {_target_: parts.mae}}",
        "12: metrics.mae: must be a m",
    ),
    "an empty key": (
        "'optimizer..lr'",
        "optimizer.lr",
        "15: search_space[optimizer..lr]: `optimizer..lr` is not a do",
    ),
    "an open bracket": (
        "'optimizer[lr'",
        "optimizer.lr",
        "15: search_space[optimizer[lr]: `optimizer[lr` is not a do",
    ),
    "a space of a number": ("optimizer.lr: 3", LR, "15: search_space[optimizer.lr]: must be a mapping"),
    "a section that is searched": (
        "optimizer",
        "optimizer.lr",
        "15: search_space.optimizer: a whole section can't be",
    ),
    "a condition on itself": (
        f"{LR[:-1]}, when: {{optimizer.lr: 3}}}}",
        LR,
        "15: search_space[optimizer.lr].when[",
    ),
    "a learning rate of text": (
        "optimizer.lr: {type: categorical, choices: [slow, fast]}",
        LR,
        "15: search_space[optimizer.lr].choices[0]: a learning rate is a number",
    ),
    "a rate of a group that is text": (
        "lr: 1e-2, groups: {'*': {lr: slow}}",
        "lr: 1e-2",
        "10: optimizer.groups.*.lr: a learning rate is a number",
    ),
    "a folder that can't be made": ("run: {output_dir: /proc/nope}", "", "17: run.output_dir: /proc: can't be wr"),
    "a call": ("where: [\"__import__('os')\"]", "", "17: where[0]: column 1: a call can't stand in an expression"),
    "an engine of nothing": ("run: {on: '  '}", "", "17: run.on: there is no engine named ''"),
    "fewer nodes than none": (
        f"run: {{on: 'slurm:nodes=-3', {SERVER}}}",
        "",
        "17: run.on: nodes: '-3' is not a number",
    ),
    "no time": (f"run: {{on: 'slurm:time=later', {SERVER}}}", "", "17: run.on: time: 'later' is not a duration"),
    "no image": (f"run: {{on: 'k8s:', {SERVER}}}", "", "17: run.on: `image` is missing"),
    "no host": (f"run: {{on: 'ray://', {SERVER}}}", "", "17: run.on: there is no place 'ray://' of Ray"),
    "another place of this machine": (
        "run: {on: 'local:here'}",
        "",
        "17: run.on: this machine has no other place",
    ),
    "agents the wrong way round": ("run: {on: local, agents: 8..2}", "", "17: run.agents: must be MIN..MAX"),
    "a port that is none": (
        "run: {storage: 'postgresql://u:p@h:port/d'}",
        "",
        "17: run.storage: not a database URL",
    ),
    "a device that is none": ("run: {devices: toaster}", "", "17: run.devices: no such device here"),
    "an object": (
        "run: !!python/object/apply:os.system ['true']",
        "",
        "17: run: the YAML tag tag:yaml.org,2002:python",
    ),
    "a merged number": ("run: {<<: 3}", "", "17: run: `<<` merges mappings only"),
    "an alias of itself": ("run: &a {workers: *a}", "", "17: run.workers: an alias that contains itself"),
    "a section twice": ("trainer: {max_epochs: 4}", "", "17: trainer: this key is written twice"),
    "a key of nothing": ("~: 3", "", "17: the key `~` is not text"),
    "a section of a picture": ('"\U0001f600": 3', "", "17: \U0001f600: unknown section"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_it_ends_with_its_place_and_a_fix(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    written, replaced, said = NONSENSE[name]
    path = make_study(tmp_path)
    text = path.read_text()
    assert replaced in text
    path.write_text(text.replace(replaced, written, 1) if replaced else f"{text}{written}\n")
    before = sorted(tmp_path.iterdir())
    result = hpo("check", path, code=2)
    errors = [line for line in result.stdout.splitlines() if line.startswith("  error: ")]
    assert errors[0].startswith(f"  error: {path}:{said}")
    assert len(set(errors)) == len(errors)
    assert "    fix: " in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    assert [item for item in sorted(tmp_path.iterdir()) if item.name != "__pycache__"] == before


def test_an_engine_that_can_not_be_made_leaves_no_study(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    before = sorted(tmp_path.iterdir())
    refused = hpo("run", study, "--on", "local:here", code=2).stderr
    assert refused.startswith("command line: run.on: this machine has no other place")
    assert sorted(tmp_path.iterdir()) == before
