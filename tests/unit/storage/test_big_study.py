"""The generated studies of benchmarks are studies like any other."""

from pathlib import Path

from hpo.config.spec import load_spec
from hpo.study.open_study import load_study
from hpo.study.outcome import outcome_of
from tests.support.big_study import make_big_study


def test_a_generated_study_reads_as_its_database_says_and_may_continue(tmp_path: Path, ready_url: str) -> None:
    file = make_big_study(tmp_path, 210, epochs=10, storage=ready_url)
    with load_study(load_spec(file)) as opened:
        trials = opened.study.get_trials()
        assert [trial.number for trial in trials] == list(range(210))
        outcomes = [outcome_of(trial) for trial in trials]
        assert outcomes.count("pruned") == 126
        assert outcomes.count("diverged") > 0
        for trial, outcome in zip(trials, outcomes, strict=True):
            assert trial.distributions == opened.space.distributions
            assert list(trial.intermediate_values) == list(range(1, 3 if outcome == "pruned" else 11))
            if outcome == "complete":
                assert trial.value == trial.user_attrs["hpo:best"]["metrics"]["val_loss"]
        assert opened.storage.get_trial_number_from_id(opened.storage.create_new_trial(opened.study_id)) == 210
        assert opened.claimable() == 209
