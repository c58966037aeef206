"""Trials that can't resume because the output folder is not the one they wrote to."""

from __future__ import annotations

from hpo.storage import ledger
from hpo.study.folders import trial_folder
from hpo.study.open_study import OpenStudy
from hpo.wording import listed


def moved_away(opened: OpenStudy) -> list[str]:
    """What a person should know of a study whose trials are to resume here, and have left nothing here.

    Every attempt that has reported a value has made a folder, so the whole folder is another one than before, or
    was emptied. A trial that another run may be at work on is left out: it does not begin again.

    Args:
        opened: The study.

    Returns:
        A line, or none.
    """
    with opened.storage.engine.connect() as conn:
        numbers = ledger.unfinished_with_values(conn, opened.study_id)
        running = ledger.running_trials(conn, opened.study_id)
    at_work = {each.number for each in running if each.lease and each.lease.owner_is_alive() is not False}
    resuming = [number for number in numbers if number not in at_work]
    missing = [number for number in resuming if not trial_folder(opened.spec, number).exists()]
    if not missing:
        return []
    which = f"trial {missing[0]} begins" if len(missing) == 1 else f"the trials {listed(missing)} begin"
    where = f"with nothing to resume from in {opened.spec.output_dir}"
    fix = "where the study's folder was moved, stop the run, and name it with `--output-dir`"
    return [f"{which} again, {where}: {fix}"]
