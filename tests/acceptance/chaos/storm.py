"""A storm over a study: supervisors and workers are killed, stopped and asked to end, the database is restarted.

Whatever the times at which that happens, the study must come to its end as if nothing had happened, which
`tests.acceptance.chaos.audit` then looks at. The times are drawn from a seed; what a process is doing then is
chance.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from hpo.config.spec import StudySpec
from hpo.storage import ledger
from hpo.storage.attributes import BUDGET_ATTR, EPOCHS_ATTR
from hpo.storage.ledger import Attempt
from hpo.storage.machine import process_start
from hpo.study.open_study import start_study
from hpo.study.retry import failed_trials, reopen
from hpo.study.taking import claimable
from tests.acceptance.chaos.study import DELAY, MINES, MINES_FILE
from tests.acceptance.chaos.weather import Fault, Weather, faults
from tests.support.servers import DatabaseServer

_MARK: Final = "CHAOS_STORM"
_ROOT: Final = Path(__file__).parents[3]
#: Seconds between two looks at the supervisors.
_TICK: Final = 0.02
#: Seconds after a retry in which a supervisor may still end as one whose study is done: so it was.
_LAST_LOOK: Final = 10.0


@dataclass
class _Supervisor:
    """A `hpo run`, started again whenever it ends.

    Attributes:
        host: Name of the host that it believes to be on; empty for this one.
        name: For people, and of the file with what it prints.
        expected: The exit codes that what was done to it explains.
    """

    host: str
    name: str
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    done: bool = False
    expected: set[int] = field(default_factory=set)


@dataclass
class Record:
    """What happened in a storm.

    Attributes:
        faults: How often each was given.
        starts: Of supervisors.
        seconds: From the first start to the last end.
        surprises: What no fault explains: a supervisor that ended with an error, a process left behind.
    """

    faults: Counter[Fault] = field(default_factory=Counter)
    starts: int = 0
    seconds: float = 0.0
    surprises: list[str] = field(default_factory=list)


class Storm:
    """Runs a study to its end through faults.

    Args:
        spec: The study; it may exist.
        weather: How it blows.
        hosts: Of the supervisors, one each; empty for this host, else a name for another one that shares the
            database and the output folder (it needs the right to make UTS namespaces, see `other_hosts_work`).
        server: What to restart.

    Attributes:
        record: What has happened so far.
        log: Tells it with times; what the supervisors print lies beside it.
    """

    def __init__(
        self,
        spec: StudySpec,
        weather: Weather,
        *,
        hosts: Sequence[str] = ("", ""),
        server: DatabaseServer | None = None,
    ) -> None:
        self.record = Record()
        self._spec = spec
        self._weather = weather
        self._server = server
        self._random = random.Random(weather.seed)
        self._n_trials = spec.study.n_trials
        self._n_epochs = spec.study.epochs
        self._mark = uuid.uuid4().hex
        self._stopped: list[tuple[float, int, float | None]] = []
        self._supervisors = [_Supervisor(host, f"supervisor-{at}") for at, host in enumerate(hosts, start=1)]
        self._logs = spec.output_dir / "storm"
        self._logs.mkdir(parents=True, exist_ok=True)
        self.log = self._logs / "storm.log"
        self._mines = self._logs / "mines"
        self._environment = {
            **os.environ,
            _MARK: self._mark,
            "OMP_NUM_THREADS": "1",
            DELAY: str(weather.delay),
            MINES: str(weather.mines),
            MINES_FILE: str(self._mines),
        }
        self._started = time.monotonic()
        self._retried = -math.inf

    def run(self) -> Record:
        """Blow, and let the study come to its end.

        Raises:
            TimeoutError: It does not come to its end.
        """
        self._say(f"seed {self._weather.seed}: {self._weather}")
        self._opened = start_study(self._spec)
        # Who is killed can't remove its temporary files.
        with tempfile.TemporaryDirectory(prefix="storm-", ignore_cleanup_errors=True) as folder:
            self._environment["TMPDIR"] = folder
            try:
                self._blow()
            finally:
                self._clear()
                self._opened.storage.close()
        self.record.seconds = time.monotonic() - self._started
        self.record.faults[Fault.MINE] = self._mines.stat().st_size if self._mines.exists() else 0
        return self.record

    def _blow(self) -> None:
        for fault in faults(self._weather, self._random):
            self._pass(self._random.uniform(*self._weather.pause))
            self._give(fault)
        self._say("no more faults")
        while not self._is_over():
            self._pass(_TICK)
        self._wait_for_processes()

    # ---- faults

    def _give(self, fault: Fault) -> None:
        if fault is Fault.DATABASE_RESTARTED:
            self._restart_database()
        elif fault is Fault.FAILED_RETRIED:
            self._retry()
        elif fault in (Fault.WORKER_KILLED, Fault.WORKER_STOPPED, Fault.WORKER_TERMINATED):
            self._hit_worker(fault)
        else:
            self._hit_supervisor(fault)
        self.record.faults[fault] += 1

    def _restart_database(self) -> None:
        assert self._server is not None, "there is no server to restart"
        pause = self._random.uniform(0.0, 2.0)
        self._say(f"{Fault.DATABASE_RESTARTED}: away for {pause:.1f} s")
        self._server.restart(immediate=True, pause=pause)

    def _retry(self) -> None:
        """As a person beside the study does, whatever it is doing; supervisors that were done start again."""
        numbers = [each.trial for each in reopen(self._opened, failed_trials(self._opened))]
        self._say(f"{Fault.FAILED_RETRIED}: {numbers}")
        if numbers:
            self._retried = time.monotonic()
            self._go_on()

    def _hit_worker(self, fault: Fault) -> None:
        number, lease = self._victim()
        self._say(f"{fault}: {lease.worker}, process {lease.pid} on {lease.host}, at trial {number}")
        if fault is Fault.WORKER_STOPPED:
            self._stop(lease.pid)
        else:
            _send(lease.pid, signal.SIGKILL if fault is Fault.WORKER_KILLED else signal.SIGTERM)

    def _victim(self) -> tuple[int, Attempt]:
        """A trial that a living worker is at, and its lease; waits until there is one."""
        while True:
            with self._opened.storage.engine.connect() as conn:
                running = ledger.running_trials(conn, self._opened.study_id)
            leases = [(trial.number, trial.lease) for trial in running if trial.lease is not None]
            # Asked here: for the ledger, a worker on another host may or may not live.
            living = [(number, lease) for number, lease in leases if process_start(lease.pid) == lease.start_time]
            if living:
                return self._random.choice(living)
            self._pass(_TICK)

    def _hit_supervisor(self, fault: Fault) -> None:
        while not (there := [each for each in self._supervisors if _runs(each)]):
            self._pass(_TICK)
        chosen = self._random.choice(there)
        assert chosen.process is not None
        pid = chosen.process.pid
        self._say(f"{fault}: {chosen.name}, process {pid}")
        if fault is Fault.SUPERVISOR_STOPPED:
            self._stop(pid)
        elif fault is Fault.SUPERVISOR_KILLED:
            chosen.expected.add(-signal.SIGKILL)
            _send(pid, signal.SIGKILL)
        elif fault is Fault.ALL_KILLED:
            chosen.expected.add(-signal.SIGKILL)
            for each in [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]:
                _send(each, signal.SIGKILL)
        else:
            chosen.expected |= {130, -signal.SIGTERM}  # the second: before it has made itself ready for signals
            _send(pid, signal.SIGTERM)
            if fault is Fault.SUPERVISOR_TERMINATED_TWICE:
                self._pass(self._random.uniform(0.0, 0.5))
                _send(pid, signal.SIGTERM)

    def _stop(self, pid: int) -> None:
        seconds = self._random.uniform(0.1, self._weather.longest_stop)
        self._say(f"    for {seconds:.1f} s")
        self._stopped.append((time.monotonic() + seconds, pid, process_start(pid)))
        _send(pid, signal.SIGSTOP)

    def _wake(self, *, all_of_them: bool = False) -> None:
        for stopped in list(self._stopped):
            until, pid, start = stopped
            if all_of_them or time.monotonic() >= until:
                self._stopped.remove(stopped)
                if start is not None and process_start(pid) == start:
                    self._say(f"    process {pid} continues")
                    _send(pid, signal.SIGCONT)

    # ---- time passes

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            self._wake()
            for supervisor in self._supervisors:
                self._look_after(supervisor)
            if time.monotonic() - self._started > self._weather.limit:
                raise TimeoutError(f"the study does not come to its end; see {self.log}")
            if (left := until - time.monotonic()) <= 0:
                return
            time.sleep(min(left, _TICK))

    def _look_after(self, supervisor: _Supervisor) -> None:
        """Start a supervisor that has ended, unless the study has; then raise its budget if faults are left."""
        if supervisor.done or _runs(supervisor):
            return
        if supervisor.process is not None:
            self._take_leave(supervisor, supervisor.process.wait())
        if not supervisor.done:
            self._start(supervisor)
        elif self._is_over() and sum(self.record.faults.values()) < self._planned:
            self._say(f"all trials are finished: on to {self._more()}")
            self._go_on()

    @property
    def _planned(self) -> int:
        return self._weather.kills + self._weather.restarts + self._weather.retries

    def _go_on(self) -> None:
        """Have supervisors that were done started again."""
        for each in self._supervisors:
            if each.done:  # its process has ended, and been heard of
                each.process, each.done = None, False

    def _take_leave(self, supervisor: _Supervisor, code: int) -> None:
        finished = self._is_finished()
        self._say(
            f"{supervisor.name} ended with {code}; the study is {'finished' if finished else 'not finished'}"
        )
        supervisor.done = finished and code == 0
        text = self._log_of(supervisor).read_text(errors="replace")
        if code == 0 and not finished and time.monotonic() > self._retried + _LAST_LOOK:
            self.record.surprises.append(f"{supervisor.name} ended before the study had")
        elif code not in {0, *supervisor.expected} and not self._is_explained(text[-2000:]):
            self.record.surprises.append(f"{supervisor.name} ended with {code}:\n{text[-2000:]}")

    def _is_explained(self, last_words: str) -> bool:
        """Whether a supervisor gave up for a reason that the weather gave it: it has to find the database."""
        away = ("can't open the database", "see that the database runs and can be reached")
        unreachable = self._weather.restarts > 0 and any(text in last_words for text in away)
        return unreachable or "workers died" in last_words

    def _start(self, supervisor: _Supervisor) -> None:
        budget = [] if self._n_epochs is None else [f"study.epochs={self._n_epochs}"]
        options = {"--workers": self._weather.workers, "--n-trials": self._n_trials}
        options |= {"--storage": self._spec.storage_url, "--output-dir": self._spec.output_dir}
        module = "tests.acceptance.chaos.pausing" if self._weather.pauses else "hpo"
        command = [sys.executable, "-m", module, "run", self._spec.path, *budget]
        command += [part for option in options.items() for part in option]
        if supervisor.host:
            command = [*_ON_OTHER_HOST, supervisor.host, *command]
        with self._log_of(supervisor).open("ab") as log:
            supervisor.process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=_ROOT,
                start_new_session=True,
            )
        supervisor.expected = set()
        supervisor.starts += 1
        self.record.starts += 1
        self._say(f"{supervisor.name} started, process {supervisor.process.pid}")

    def _log_of(self, supervisor: _Supervisor) -> Path:
        return self._logs / f"{supervisor.name}.log"

    # ---- the end

    def _is_finished(self) -> bool:
        """Whether the study has come to the end of the budget that it has by now, or its scheduler to its own."""
        attrs = self._opened.study.user_attrs
        if (attrs.get(BUDGET_ATTR), attrs.get(EPOCHS_ATTR)) != (self._n_trials, self._n_epochs):
            return False
        trials = self._opened.storage.get_all_trials(self._opened.study_id, deepcopy=False)
        return all(trial.state.is_finished() for trial in trials) and claimable(self._opened) == 0

    def _more(self) -> str:
        """A larger budget: of epochs, where the study has one of these."""
        if self._n_epochs is not None and self._spec.study.epochs is not None:
            self._n_epochs += self._spec.study.epochs
            return f"{self._n_epochs} epochs"
        self._n_trials += self._spec.study.n_trials
        return f"{self._n_trials} trials"

    def _is_over(self) -> bool:
        return all(supervisor.done for supervisor in self._supervisors)

    def _wait_for_processes(self) -> None:
        """A study that is over leaves no process behind."""
        self._wake(all_of_them=True)
        deadline = time.monotonic() + 30
        while left := self._processes():
            if time.monotonic() > deadline:
                self.record.surprises.append(f"processes are left: {[process.pid for process in left]}")
                return
            time.sleep(_TICK)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _clear(self) -> None:
        for process in self._processes():
            _send(process.pid, signal.SIGKILL)
        for supervisor in self._supervisors:
            if supervisor.process is not None:
                supervisor.process.wait()

    def _say(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._started:8.2f} s  {text}\n")


_ON_OTHER_HOST: Final = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')


def other_hosts_work() -> bool:
    """Whether this process may give another one a host name of its own."""
    try:
        done = subprocess.run([*_ON_OTHER_HOST, "other", "true"], capture_output=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


def _runs(supervisor: _Supervisor) -> bool:
    return supervisor.process is not None and supervisor.process.poll() is None


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was faster
        os.kill(pid, number)
