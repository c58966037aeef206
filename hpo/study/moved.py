"""Warns of trials that can't resume because their folders are not in the output folder."""

from __future__ import annotations

from hpo.storage import ledger
from hpo.study.folders import trial_folder
from hpo.study.open_study import OpenStudy
from hpo.wording import listed


def moved_away(opened: OpenStudy) -> list[str]:
    """A warning about unfinished trials that have reported values but have no folder here.

    Every attempt that has reported a value has made a folder. So the output folder is another one than before, or
    was emptied. Trials that another run may be training are left out, since they do not begin again.

    Args:
        opened: The study.

    Returns:
        One line, or none.
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
