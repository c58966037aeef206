"""`hpo dashboard` and `hpo delete`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.confirm import Yes, ask, must_be_sure
from hpo.cli.options import Debug, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.config.variables import TOKEN_ENV
from hpo.errors import StudyError
from hpo.wording import are

if TYPE_CHECKING:
    from hpo.study.open_study import OpenStudy


def dashboard(
    study: StudyFile,
    overrides: Overrides = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 picks a free one.")] = 8080,
    host: Annotated[str, typer.Option(help="Network interface to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN_ENV,
            help="Token that visitors need. Other users of this machine see the option in the process list, but "
            "not the variable. By default one is made and printed in a link, unless --host is 127.0.0.1.",
            show_default=False,
        ),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Refuse all changes.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another host name for this server, such as a proxy's; may be repeated.",
            show_default=False,
        ),
    ] = None,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Serve optuna-dashboard on the study's storage, with every trial's curve, config and log.

    Example: hpo dashboard study.yaml --host 0.0.0.0 --read-only
    """
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    from hpo.dashboard.serve import Access, serve
    from hpo.study.open_study import load_study

    with load_study(spec) as opened:
        serve(opened, port, host, Access(token, read_only=read_only, allow_hosts=tuple(allow_host or ())))


def delete(
    study: StudyFile,
    overrides: Overrides = None,
    yes: Yes = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Delete a study: its trials in the storage, and what it wrote into its output folder.

    If a folder there is a symbolic link, the link is removed, and its target stays.

    Example: hpo delete study.yaml --yes
    """
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    name = spec.study.name
    effect = f"deletes the study {name}, and the trials, the logs and the final training in {spec.output_dir}"
    must_be_sure("delete", effect, yes=yes)
    from optuna.trial import TrialState

    from hpo.study.open_study import load_study

    with load_study(spec) as opened:
        if not yes:
            ask(f"This {effect}. Trials in it: {opened.count(*TrialState)}.")
        notes = _delete(opened)
    print(f"deleted the study {name}", *notes, sep="\n")


def _delete(opened: OpenStudy) -> list[str]:
    from hpo.study.agents import heard_of_lately
    from hpo.study.folders import refuse_output_of_others
    from hpo.study.removal import refuse_what_stays, remove_output

    refuse_output_of_others(opened.spec)
    opened.requeue_dead()
    running = opened.running()
    if running:
        raise StudyError(f"{are(running, 'trial')} running\n  fix: end the `hpo run` that runs them first")
    # An agent between two trials has none running; one without a recent beat may be dead on another machine.
    if at_work := heard_of_lately(opened):
        raise StudyError(f"{are(at_work, 'agent')} at work on the study\n  fix: `hpo stop --wait` first")
    refuse_what_stays(opened.spec)
    opened.storage.delete_study(opened.study_id)
    return remove_output(opened.spec)
