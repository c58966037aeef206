"""What is made of `--on slurm:…`: settings, and scripts that sbatch reads."""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from hpo.errors import InputError, StudyError
from hpo.execution.engines.by_name import address_of, engine_of
from hpo.execution.engines.engine import AgentOrder, Ended, EngineAwayError, Resources
from hpo.execution.engines.slurm import SlurmEngine
from hpo.execution.engines.slurm_commands import Job, SlurmCommands
from hpo.execution.engines.slurm_script import agents_script, driver_script
from hpo.execution.engines.slurm_settings import Settings, settings_of

ORDER = AgentOrder(
    Path("/home/me/my study/study.yaml"),
    "digits, small",
    Path("/shared/100%/logs"),
    arguments=("--output-dir", "/shared/100%"),
    workers=2,
    resources=Resources(gpu=1.5, cpu=3.2, memory=3 * 2**30 + 1),
    environment=("HPO_STORAGE",),
)


def options_of(script: str) -> dict[str, str]:
    """The options in a script's head, less their quotes."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {key: "".join(shlex.split(value)) for key, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("slurm", Settings()),
        (
            "slurm:partition=gpu,nodes=4,time=4h",
            Settings({"partition": "gpu"}, agents=4, time=4 * 3600),
        ),
        ("slurm:time=1-02:30:10,grace=90s", Settings(time=26 * 3600 + 1810, grace=90)),
        ("slurm:nodelist=n1,exclusive=yes", Settings({"nodelist": "n1", "exclusive": ""})),
        ("slurm:exclusive=no", Settings()),
    ],
)
def test_a_text_becomes_settings(text: str, settings: Settings) -> None:
    assert settings_of(address_of(text)) == settings
    assert engine_of(address_of(text)).agents == settings.agents


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slurm:gpu", "--on: `gpu` is no key with a value\n  value: slurm:gpu\n  fix: write slurm:partition=gpu"),
        ("slurm:nodes=few", "--on slurm: nodes: 'few' is not a number of nodes"),
        ("slurm:nodes=0", "--on slurm: nodes: '0' is not a number of nodes"),
        (
            "slurm:time=240",
            "--on slurm: time: '240' is not a duration\n  value: slurm:time=240\n  fix: write time=4h",
        ),
        ("slurm:time=4:30", "--on slurm: time: '4:30' is not a duration"),
        ("slurm:time=90s", "--on slurm: time: an agent of 90 s would be warned 120 s before its end"),
        ("slurm:time=40h,grace=65536s", "--on slurm: grace: Slurm can't warn an agent 65536 s before its end"),
        ("slurm:exclusive=true", "--on slurm: exclusive: 'true' is neither yes nor no"),
        ("slurm:nodelist=n1,n2", "--on slurm: nodelist: each agent runs on one node"),
        ("slurm:nodelist=n[1-4]", "--on slurm: nodelist: each agent runs on one node"),
        ("slurm:part=gpu", "--on: the engine `slurm` has no key 'part'"),
    ],
)
def test_a_text_that_does_not_fit_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        settings_of(address_of(text))
    assert str(caught.value).startswith(message)


def test_the_script_of_agents_has_all_that_sbatch_needs() -> None:
    script = agents_script(ORDER, Settings({"partition": "gpu", "exclusive": ""}, time=3660, grace=60), 4)
    assert options_of(script) == {
        "job-name": f"hpo-digits-small-{ORDER.key}",
        "array": "0-3",
        "partition": "gpu",
        "exclusive": "",
        "nodes": "1",
        "ntasks": "1",
        "time": "1:01:00",
        "signal": "USR1@60",
        "requeue": "",
        "open-mode": "append",
        "cpus-per-task": "4",
        "mem": "3073M",
        "gres": "gpu:2",
        "output": "/shared/100%%/logs/agent-%A_%a.log",
        "chdir": "/home/me/my study",
    }
    assert shlex.join(ORDER.command()) in script
    assert '"${HPO_STORAGE?set it in the environment of sbatch}"' in script


def test_a_persons_choice_of_gpus_stands() -> None:
    script = agents_script(ORDER, Settings({"gres": "gpu:a100:1"}), 1)
    assert script.count("gres") == 1
    assert options_of(script)["gres"] == "gpu:a100:1"


def test_a_folder_that_slurm_can_not_write_to_is_refused() -> None:
    order = replace(ORDER, logs=Path("/shared/a\\b/agents"))
    with pytest.raises(InputError, match=r"run.output_dir: Slurm writes into no folder with a backslash"):
        agents_script(order, Settings({}), 1)


def test_the_script_of_a_driver_takes_no_agents_resources() -> None:
    script = driver_script(
        ["run", "study.yaml", "--on", "slurm"], ORDER, Settings({"partition": "gpu", "gres": "gpu:1"})
    )
    options = options_of(script)
    assert options["job-name"] == f"hpo-digits-small-{ORDER.key}-driver"
    assert options["output"] == "/shared/100%%/logs/driver-%j.log"
    assert not {"array", "gres", "mem", "cpus-per-task"} & set(options)
    assert "-m hpo run study.yaml --on slurm" in script


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (229, ""),
        (229, "scancel: error: Kill job error on job id 7_0: Job/step already completing or completed"),
        (1, ""),
        (1, "scancel: error: Access denied"),
    ],
)
def test_to_cancel_what_has_ended_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str
) -> None:
    program = tmp_path / "scancel"
    program.write_text(f"#!/bin/sh\n[ -z '{says}' ] || echo '{says}' >&2\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with contextlib.nullcontext() if code == 229 else pytest.raises(StudyError, match=r"^scancel: "):
        SlurmCommands().cancel(["7_0"], "--signal=TERM")


@pytest.mark.parametrize(
    ("says", "harmless"),
    [
        ("7_0: Job has already finished", True),
        ("slurm_update error: Invalid job id specified", True),
        ("slurm_update error: Access/permission denied", False),
    ],
)
def test_that_what_has_ended_is_not_to_start_again_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, harmless: bool
) -> None:
    """As scontrol says it of a task of an array, and of a job."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with contextlib.nullcontext() if harmless else pytest.raises(StudyError, match=r"^scontrol: "):
        SlurmCommands().forbid_requeue("7_0")


def test_what_a_script_asks_for_outdoes_a_persons_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "sbatch"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    script = agents_script(ORDER, Settings({"partition": "gpu", "exclusive": ""}), 2)
    given = SlurmCommands().submit(script).splitlines()
    assert {"--partition=gpu", "--exclusive", "--array=0-1", "--chdir=/home/me/my study"} <= set(given)


def test_all_that_sbatch_says_is_said_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbatch"
    program.write_text(
        "#!/bin/sh\nprintf 'sbatch: error: %s\\n' 'no such partition: x' 'Submission failed' >&2\nexit 1\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    said = "sbatch: no such partition: x; Submission failed\n  fix: change that in `--on slurm:…`"
    with pytest.raises(StudyError, match=said):
        SlurmCommands().submit(agents_script(ORDER, Settings({"partition": "x"}), 2))


@pytest.mark.parametrize(
    "then",
    [
        "echo 'squeue: fatal: Could not establish a configuration source' >&2; exit 1",
        "kill -9 $$",
        "echo Welcome to the cluster",
        "exec /not/there",
    ],
)
def test_a_controller_that_has_answered_is_asked_again_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    program = tmp_path / "squeue"
    program.write_text(f"#!/bin/sh\n[ -e $0-asked ] || {{ touch $0-asked; exit 0; }}\n{then}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    slurm = SlurmCommands()
    assert slurm.jobs(["hpo-x"]) == {}
    with pytest.raises(EngineAwayError, match="squeue: "):
        slurm.jobs(["hpo-x"])


def test_one_that_has_never_answered_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\necho 'squeue: fatal: Could not establish a configuration source' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(StudyError, match="configuration source") as error:
        SlurmCommands().jobs(["hpo-x"])
    assert type(error.value) is StudyError


def test_without_slurm_the_fix_is_to_take_the_script_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StudyError, match="squeue is not on this machine\n  fix: run this on a login node"):
        engine_of(address_of("slurm")).find(ORDER)


@pytest.mark.parametrize(
    ("state", "code", "asked"),
    [
        ("CANCELLED", (0, 15), True),
        ("FAILED", (75, 0), True),
        ("FAILED", (3, 0), False),
        ("FAILED", (0, 9), False),
    ],
)
def test_a_job_that_was_cancelled_was_asked_to_end(
    state: str, code: tuple[int, int], asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlurmCommands, "submit", lambda *_: "7")
    monkeypatch.setattr(SlurmCommands, "jobs", lambda *_: {"7_0": Job("7_0", state, 0, "node1", "")})
    monkeypatch.setattr(SlurmCommands, "exit_code", lambda *_: code)
    engine = SlurmEngine(Settings())
    engine.place(replace(ORDER, logs=tmp_path), 1)
    [end] = engine.changes()
    assert isinstance(end, Ended)
    assert (end.asked, end.in_order) == (asked, False)
