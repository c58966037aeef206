"""Trials whose owners are gone, on real databases."""

import time
from dataclasses import replace
from functools import partial

import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.storage import agents, recovery
from hpo.storage.agents import Joining
from hpo.storage.beats import Heartbeat
from hpo.storage.ledger import Owner
from hpo.storage.recovery import Sightings, requeue_dead, settle_process
from hpo.storage.settling import GONE, STOPPED, Settled, Verdict, _settle
from hpo.storage.study_storage import StudyStorage
from tests.support.owners import attempts, dead_owner, load, make_study, opened, running, study_id

pytestmark = pytest.mark.full

JOINING = Joining("", "cpu", 1, "code", "config", "mark", lost_after=60.0)


def waits(number: int, attempt: int) -> Settled:
    return Settled(number, attempt, TrialState.WAITING, GONE.outcome, GONE.reason)


def test_a_trial_that_kills_its_workers_fails_as_lost(ready_url: str) -> None:
    make_study(ready_url, 1)
    owner = dead_owner()
    with opened(ready_url, owner=owner) as dead, opened(ready_url) as plain:
        results = []
        for _ in range(3):
            trial = load(dead).ask()
            trial.set_user_attr("hpo:traceback", "why an attempt failed that was tried again")
            results.append(requeue_dead(plain, study_id(plain), max_retries=2))
        reason = "its worker died 3 times, the last time: its process is gone"
        assert results == [[waits(0, 1)], [waits(0, 2)], [Settled(0, 3, TrialState.FAIL, "lost", reason)]]
        failed = plain.get_trial(trial._trial_id)
        assert failed.state == TrialState.FAIL
        assert failed.datetime_complete is not None
        assert failed.user_attrs == {"hpo:outcome": "lost", "hpo:reason": reason}
    assert [a.outcome for a in attempts(ready_url)] == ["lost"] * 3


def test_one_whose_worker_is_stopped_waits_also_where_max_retries_was_lowered(sqlite_url: str) -> None:
    make_study(sqlite_url, 1)
    owner = dead_owner()
    with opened(sqlite_url, owner=owner) as dead, opened(sqlite_url) as plain:
        for _ in range(2):
            load(dead).ask()
            requeue_dead(plain, study_id(plain), max_retries=2)
        load(dead).ask()
        verdict = Verdict(STOPPED, "its worker was stopped immediately")
        (settled,) = settle_process(plain, study_id(plain), owner.pid, verdict, max_retries=1)
        assert (settled.state, settled.outcome) == (TrialState.WAITING, STOPPED)


def test_another_hosts_owner_is_dead_after_the_grace(sqlite_url: str) -> None:
    make_study(sqlite_url, 5)
    with opened(sqlite_url, owner=dead_owner(host="elsewhere")) as remote, opened(sqlite_url) as plain:
        load(remote).ask()
        assert requeue_dead(plain, study_id(plain)) == []
        _age(plain)
        remote.beat()
        assert requeue_dead(plain, study_id(plain), grace=60.0) == []
        _age(plain)
        assert requeue_dead(plain, study_id(plain), grace=0.04) == [waits(0, 1)]


def test_a_worker_may_be_silent_for_as_long_as_its_own_agent_waits_for_others(ready_url: str) -> None:
    """It beats as often as that asks for: its next sign of life may be due after the time of who looks."""
    make_study(ready_url, 1)
    with opened(ready_url) as plain:
        owner = dead_owner(host="elsewhere")
        with plain.transaction() as session:
            agent = agents.register(session, study_id(plain), owner, JOINING)
        with opened(ready_url, owner=replace(owner, agent=agent.agent_id)) as remote:
            load(remote).ask()
            _age(plain, 30.0)
            assert requeue_dead(plain, study_id(plain), grace=0.04) == []
            _age(plain, 40.0)
            now, sightings = [0.0], Sightings()
            look = partial(requeue_dead, plain, study_id(plain), grace=12.0, sightings=sightings)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(time, "monotonic", lambda: now[0])
                seen = []
                for _ in range(18):
                    now[0] += 4.0
                    seen.append(look())
            assert seen.index([waits(0, 1)]) == 16, "more than 60 s since the first look, and not 12 s"


def _age(storage: StudyStorage, seconds: float = 3600.0) -> None:
    """Let all beats be older."""
    with storage.engine.begin() as conn:
        conn.exec_driver_sql(f"UPDATE hpo_attempts SET beat_at = beat_at - {seconds}")


def test_a_file_is_one_machines_which_may_have_been_started_anew(ready_url: str) -> None:
    """On a server, the other boot may be another machine's of the same name."""
    make_study(ready_url, 1)
    with (
        opened(ready_url, owner=replace(Owner.current(), boot_id="before")) as storage,
        opened(ready_url) as plain,
    ):
        load(storage).ask()
        taken = requeue_dead(plain, study_id(plain))
        assert taken == ([waits(0, 1)] if plain.engine.name == "sqlite" else [])


def test_who_looks_again_and_again_goes_by_what_it_has_seen(sqlite_url: str) -> None:
    make_study(sqlite_url, 5)
    with opened(sqlite_url, owner=dead_owner(host="elsewhere")) as remote, opened(sqlite_url) as plain:
        load(remote).ask()
        look = partial(requeue_dead, plain, study_id(plain), grace=0.06, sightings=Sightings())
        time.sleep(0.1)
        assert look() == [], "it has only just been seen"
        time.sleep(0.1)
        assert look() == [], "not checked in the meantime: an outage, perhaps"
        for _ in range(4):
            time.sleep(0.1)
            remote.beat()
            assert look() == []
        looks = 1
        while not (settled := look()):
            looks += 1
            time.sleep(0.02)
        assert settled == [waits(0, 1)]
        assert looks > 3


def test_an_owner_that_its_system_hides_gets_the_grace(sqlite_url: str) -> None:
    make_study(sqlite_url, 5)
    hidden = replace(Owner.current(), start_time=0.0)
    with opened(sqlite_url, owner=hidden) as storage, opened(sqlite_url) as plain:
        load(storage).ask()
        assert requeue_dead(plain, study_id(plain)) == []
        assert settle_process(plain, study_id(plain), hidden.pid, GONE) == [waits(0, 1)], "who says so knows"


def test_a_verdict_outlasts_a_beat_that_was_still_under_way(ready_url: str) -> None:
    make_study(ready_url, 1)
    dead = dead_owner()
    with opened(ready_url, owner=dead) as owner, opened(ready_url) as plain:
        load(owner).ask()
        study, beats = study_id(plain), iter([owner.beat])
        sa.event.listen(plain.engine, "checkin", lambda *_: [beat() for beat in beats])  # after the first look
        assert settle_process(plain, study, dead.pid, GONE) == [waits(0, 1)]
        assert list(beats) == []


def test_a_verdict_is_not_for_an_earlier_process_with_the_same_id(sqlite_url: str) -> None:
    make_study(sqlite_url, 3)
    dead = dead_owner()
    for owner in (replace(dead, boot_id="before"), replace(dead, start_time=0.5), dead):
        with opened(sqlite_url, owner=owner) as storage:
            load(storage).ask()
    with opened(sqlite_url) as plain:
        assert settle_process(plain, study_id(plain), dead.pid, GONE) == [waits(2, 1)]


def test_who_settles_the_end_of_a_process_itself_is_left_to_it(sqlite_url: str) -> None:
    make_study(sqlite_url, 1)
    owner = dead_owner()
    with opened(sqlite_url, owner=owner) as dead, opened(sqlite_url) as plain:
        load(dead).ask()
        assert requeue_dead(plain, study_id(plain), spare=[owner.pid]) == []
        assert requeue_dead(plain, study_id(plain), spare=[owner.pid + 1]) == [waits(0, 1)]


def test_a_beat_after_the_judgement_saves_the_trial(two_owners: tuple[StudyStorage, ...]) -> None:
    first, second = two_owners
    load(first).ask()
    (seen,) = running(second)
    time.sleep(0.01)
    first.beat()
    assert _settle(second, seen, GONE, 3) is None
    (seen,) = running(second)
    assert _settle(second, seen, GONE, 3) == waits(0, 1)
    assert _settle(second, seen, GONE, 3) is None


def test_living_owners_keep_their_trials(two_owners: tuple[StudyStorage, ...]) -> None:
    first, second = two_owners
    trial = load(first).ask()
    assert requeue_dead(second, study_id(second), grace=0) == []
    trial.report(1.0, 1)


def test_a_running_trial_without_lease_is_ours_only_with_a_budget(sqlite_url: str) -> None:
    make_study(sqlite_url, None)
    with opened(sqlite_url) as plain:
        load(plain).ask()
        assert requeue_dead(plain, study_id(plain)) == []
        plain.set_budget(study_id(plain), 1)
        assert requeue_dead(plain, study_id(plain)) == [waits(0, 0)]


def test_a_clock_that_is_set_makes_no_attempt_longer_or_shorter(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_study(sqlite_url, 1)
    clock = time.time
    shift = 0.0
    monkeypatch.setattr(time, "time", lambda: clock() + shift)
    with opened(sqlite_url, owner=dead_owner()) as dead, opened(sqlite_url) as plain:
        for shift in (36_000.0, -72_000.0, 0.0):
            trial = load(dead).ask()
            shift *= -1
            dead.beat()
            dead.requeue(trial._trial_id)
        load(dead).ask()
        shift = 36_000.0
        dead.beat()
        shift = 0.0
        assert requeue_dead(plain, study_id(plain)) == [waits(0, 4)]
    assert [0 <= each.seconds < 600 for each in attempts(sqlite_url)] == [True] * 4


@pytest.mark.parametrize("shift", [3600, -3600])
def test_a_clock_that_is_set_reaps_no_living_worker_elsewhere_and_the_dead_one(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, shift: float
) -> None:
    make_study(sqlite_url, 5)
    clock = time.time
    with (
        opened(sqlite_url, owner=dead_owner(host="elsewhere")) as remote,
        opened(sqlite_url, owner=dead_owner(host="elsewhere")) as gone,
        opened(sqlite_url) as plain,
    ):
        load(remote).ask()
        load(gone).ask()
        monkeypatch.setattr(recovery, "_WATCH_PAUSE", 0.02)
        with Heartbeat(remote.beat, interval=0.02):
            monkeypatch.setattr(time, "time", lambda: clock() + shift)
            assert requeue_dead(plain, study_id(plain), grace=2) == [waits(1, 1)]
