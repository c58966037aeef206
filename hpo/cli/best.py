"""`hpo best`."""

from __future__ import annotations

from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.cli.show import looked_up, print_json, print_table, shown


def best(
    study: StudyFile,
    overrides: Overrides = None,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Show the best trial: value, parameters, metrics, and where its checkpoint lies."""
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    from hpo.progress import study_best

    data = looked_up(spec, study_best)
    if json_:
        print_json(data)
        return
    rows = [("trial", str(data["trial"])), (spec.study.metric, shown(data["value"]))]
    rows += [(name, shown(value)) for name, value in data["params"].items()]
    rows += [(f"({name})", shown(value)) for name, value in data["metrics"].items()]
    print_table(f"best of {data['study']}", ("", ""), rows, below=f"checkpoint: {data['checkpoint']}\n")
