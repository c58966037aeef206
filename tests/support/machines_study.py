"""The study that is taken from machine to machine: many trials in a server's database, and what must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hpo.config.spec import STORAGE_ENV, load_spec
from hpo.storage import ledger
from hpo.storage.ledger import Attempt, Owner
from hpo.study.open_study import load_study, start_study
from tests.acceptance.chaos.audit import audit
from tests.acceptance.chaos.study import DELAY, make_study
from tests.support.studies import ask

TRIALS: Final = 30
_STUDY: Final = (
    f"study.n_trials={TRIALS}",
    "study.sampler.name=random",
    "study.pruner=none",
    "trainer.max_epochs=4",
    "callbacks.early_stopping=null",
    "run.max_retries=1",  # of the machine that is lost; nothing else may cost one
    "run.lost_after=1h",  # the driver alone settles what ran there
)
#: Seconds that a batch takes while machines are taken away; a trial has 16 to 32.
_SLOW: Final = "2"


class MachinesStudy:
    """The study; its batches are slow until `hurry`.

    Args:
        folder: For its files.
        url: Its database, which the environment names and nothing else.

    Attributes:
        path: The study file.
        secret: What must be shown nowhere.
        environment: Variables of a driver.
        logs: Where agents' output is.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.path = make_study(folder / "study", _STUDY)
        self.secret = "hunter2"
        self._delay = folder / "delay"
        self._delay.write_text(_SLOW)
        self._spec = load_spec(self.path).with_options(storage=url)
        self._alone = load_spec(self.path).with_options(storage=f"sqlite:///{folder}/alone.db")
        # The server lets everybody in who has a socket, with any password.
        self.environment = {STORAGE_ENV: url, "PGPASSWORD": self.secret, DELAY: str(self._delay)}
        self.logs = self._spec.output_dir / "agents"

    def hurry(self) -> None:
        """Let batches take no longer than they must."""
        faster = self._delay.with_suffix(".new")
        faster.write_text("0")
        faster.replace(self._delay)

    def agents_at_work(self) -> int:
        """How many agents hold a trial now."""
        return len({each.agent for each in self._attempts() if each.ended_at is None})

    def agents_that_trained(self) -> int:
        """How many have ever held one."""
        return len({each.agent for each in self._attempts()})

    def losses(self) -> set[tuple[str, str | None]]:
        """The machines of attempts that were lost, and why they were."""
        return {(each.host.split()[0], each.reason) for each in self._attempts() if each.outcome == "lost"}

    def hosts_at_work(self) -> set[str]:
        """The machines on which trials run now."""
        return {each.host.split()[0] for each in self._attempts() if each.ended_at is None}

    def check(self) -> None:
        """Each trial is what it is on one machine, alone; nothing is missing, nothing is there twice."""
        assert audit(self._spec) == []
        start_study(self._alone).storage.close()
        with load_study(self._spec) as here, load_study(self._alone, Owner.current()) as alone:
            trials = here.storage.get_all_trials(here.study_id)
            assert [trial.number for trial in trials] == list(range(TRIALS))
            assert [trial.params for trial in trials] == [ask(alone)[0].params for _ in trials]

    def _attempts(self) -> list[Attempt]:
        with load_study(self._spec) as opened, opened.storage.engine.connect() as conn:
            return ledger.attempts(conn, opened.study_id)
