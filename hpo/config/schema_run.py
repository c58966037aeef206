"""The `run` section of a study file: how a study is run and where it is kept; it may change between runs."""

from typing import Literal, Self

from pydantic import Field, model_validator

from hpo.config.schema_types import (
    MAX_NUMBER,
    MAX_PROCESSES,
    Agents,
    Devices,
    Duration,
    Seconds,
    Section,
    Size,
    fail,
)

#: Seconds; of the time after which a silent worker is taken for dead, a beat takes a sixth.
MIN_LOST_AFTER = 3


class ResourcesSection(Section):
    """What one worker needs of a machine, by which an engine places agents."""

    gpu: float | None = Field(
        default=None, ge=0, le=MAX_PROCESSES, description="GPUs of one worker; a part of one too.", examples=[0.5]
    )
    cpu: float | None = Field(
        default=None, gt=0, le=MAX_NUMBER, description="Processor cores of one worker.", examples=[4]
    )
    memory: Size = Field(default=None, description="Main memory of one worker.", examples=["16GiB"])


class RunSection(Section):
    """How the study is run: workers and devices, limits, storage and folders. May change between two runs."""

    workers: int | None = Field(
        default=None,
        ge=1,
        le=MAX_PROCESSES,
        description="Processes to run side by side; one for each device, or group of devices, when left out.",
        examples=[4],
    )
    devices: Devices = Field(
        default=None,
        description="Devices that the workers share; auto, the default: every GPU, or the processor. Groups of "
        "`trainer.devices`: cuda:0+cuda:1,cuda:2+cuda:3.",
        examples=["auto", "cuda:0,cuda:1"],
    )
    on: str | None = Field(
        default=None,
        min_length=1,
        description="Engine that places agents on machines, with its keys; this machine alone when left out.",
        examples=["slurm:partition=gpu,time=4h"],
    )
    agents: Agents = Field(
        default=None,
        description="Agents that the engine places: a number, or the fewest and the most.",
        examples=[4, "2..8"],
    )
    resources: ResourcesSection = Field(
        default_factory=ResourcesSection,
        description="What an engine gives each worker: GPUs (or a part of one), processor cores, main memory.",
        examples=[{"gpu": 0.5, "cpu": 4, "memory": "16GiB"}],
    )
    timeout: Duration = Field(
        default=None,
        description='Time limit of a run: seconds, or "2h", "1h30m", "1d"; the next run resumes.',
        examples=["2h"],
    )
    storage: str | None = Field(
        default=None,
        min_length=1,
        description="URL of the database; a file in the output folder when left out.",
        examples=["sqlite:///study.db"],
    )
    output_dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of results, relative to this file; each study has its own.",
        examples=["runs/digits"],
    )
    max_retries: int = Field(
        default=3,
        ge=0,
        le=MAX_NUMBER,
        description="Worker deaths after which a trial is requeued; one more fails it.",
        examples=[3],
    )
    trial_timeout: Duration = Field(
        default=None, description="Time that a trial may take, over all its attempts.", examples=["6h"]
    )
    no_progress_timeout: Duration = Field(
        default=None, description="A trial that finishes no batch for so long is ended.", examples=["30m"]
    )
    trial_memory: Size = Field(
        default=None, description="Main memory that a trial's processes may use.", examples=["16GiB"]
    )
    on_oom: Literal["fail", "retry_with_accumulation"] = Field(
        default="fail",
        description="What to do when a device's memory runs out; the other choice halves the micro-batch.",
        examples=["retry_with_accumulation"],
    )
    lost_after: Seconds = Field(
        default=60.0,
        description="Silence after which a worker on another machine counts as dead. An agent waits for another "
        "one as long as the longer of their two values.",
        examples=["60s"],
    )
    background_reports: bool = Field(
        default=False,
        description="Report metrics from a thread of their own; pruning then acts at most one epoch late.",
        examples=[True],
    )
    keep_best: int = Field(
        default=5,
        ge=1,
        le=MAX_NUMBER,
        description="Complete trials whose checkpoints `hpo clean` keeps.",
        examples=[5],
    )
    disk_quota: Size = Field(
        default=None,
        description="Disk space for checkpoints; above it a running study removes the least useful ones.",
        examples=["200GB"],
    )

    @model_validator(mode="after")
    def _beats_fit_into_the_silence(self) -> Self:
        if self.lost_after < MIN_LOST_AFTER:
            fix = f"a worker gives a sign of life several times in that time; write {MIN_LOST_AFTER} s or more"
            raise fail("is too short", fix, "lost_after")
        return self
