"""`hpo report`: a study as one HTML page that opens without a network.

A section of the page is one function, which takes what is known of the study and returns its HTML. Whatever comes
from a study (names, parameters, values) passes `escaped` on its way into the page; figures are data in JSON, drawn
by the copy of plotly.js inside the page. The page's own policy keeps it from loading anything else.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go
from optuna.trial import FrozenTrial
from plotly.offline import get_plotlyjs

from hpo.errors import InputError
from hpo.outcome import PREDICTION_ATTR
from hpo.progress import own_trials, study_status
from hpo.pruning import (
    ComparedPrediction,
    PredictionSummary,
    compared_predictions,
    summarize_predictions,
)
from hpo.report_figures import best_so_far, learning_curves, predictions_against_outcomes
from hpo.study import OpenStudy
from trainer.files import replacing

_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2328; }
body { max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #d0d7de; padding-bottom: .3rem; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1.5rem .25rem 0; }
th, td { border-bottom: 1px solid #eaeef2; }
th { font-weight: 600; white-space: nowrap; }
td { overflow-wrap: anywhere; }
.figure { height: 26rem; }
.note { color: #59636e; font-size: .9rem; }
"""
# Plotly's own button for sharing would send a chart's data to a server; it is there unless switched off.
_DRAW: Final = """
const settings = {displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: ""};
for (const data of document.querySelectorAll("script[data-figure]")) {
  const figure = JSON.parse(data.textContent);
  const place = document.getElementById(data.dataset.figure);
  Plotly.newPlot(place, figure.data, figure.layout, settings);
}
"""


@dataclass(frozen=True)
class StudyReport:
    """What is known of a study when its report is made.

    Attributes:
        status: What `hpo status` says of it (`hpo.progress.study_status`).
        metric: The study's metric.
        direction: ``"minimize"`` or ``"maximize"``.
        trials: Its own trials, in the order of their numbers.
        compared: Predictions against what came of them.
        made: When this was read, in UTC.
    """

    status: dict[str, Any]
    metric: str
    direction: str
    trials: Sequence[FrozenTrial]
    compared: Sequence[ComparedPrediction]
    made: datetime

    @property
    def predictions(self) -> PredictionSummary:
        """How good the predictions were."""
        return summarize_predictions(self.compared)


def study_report(opened: OpenStudy) -> StudyReport:
    """Read a study from its storage."""
    study, trials = opened.spec.study, own_trials(opened)
    return StudyReport(
        status=study_status(opened),
        metric=study.metric,
        direction=study.direction,
        trials=trials,
        compared=compared_predictions(trials),
        made=datetime.now(UTC),
    )


def write_report(report: StudyReport, path: Path) -> None:
    """Write the page, at once and as a whole; folders on the way are made.

    Raises:
        InputError: It can't be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(page(report))
    except OSError as error:
        fix = "name a file in a folder that you may write to, with `--output FILE.html`"
        problem = f"can't be written: {error.strerror or error}"
        raise InputError(problem, path="--output", value=str(path), fix=fix) from error


def report_data(report: StudyReport) -> dict[str, Any]:
    """The figures of the page as plain data."""
    kept = ("study", "n_trials", "finished", "outcomes", "best", "pruning")
    return {
        **{name: report.status[name] for name in kept},
        "predictions": {
            **asdict(report.predictions),
            "trials": [asdict(each) for each in report.compared],
        },
    }


def page(report: StudyReport) -> str:
    """The whole page."""
    title = escaped(report.status["study"])
    sections = "\n".join(part(report) for part in SECTIONS)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
<script>{get_plotlyjs()}</script>
</head>
<body>
<h1>{title}</h1>
{sections}
<script>{_DRAW}</script>
</body>
</html>
"""


def overview(report: StudyReport) -> str:
    """The study: what it is after, how far it is, and the best trial with its parameters."""
    status, best = report.status, report.status["best"]
    ends = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in status["outcomes"].items() if count)
    rows = [
        ("metric", f"{report.metric}, {report.direction}"),
        ("trials", f"{status['finished']} of {status['n_trials']} finished" + (f": {ends}" if ends else "")),
        *((name, status[name]) for name in ("running", "waiting") if status[name]),
        ("best", "no complete trial yet" if best is None else f"trial {best['trial']}, {shown(best['value'])}"),
        *(best["params"].items() if best else ()),
    ]
    made = f'<p class="note">As of {report.made:%Y-%m-%d %H:%M} UTC</p>'
    return table(rows) + made


def curves_section(report: StudyReport) -> str:
    """Every trial's curve."""
    if not any(trial.intermediate_values for trial in report.trials):
        return section("Learning curves", note("No trial has reported an epoch yet."))
    drawn = figure("curves", learning_curves(report.trials, report.metric, report.direction))
    told = (
        "A mark shows where a curve ends; crosses are pruned trials. A click in the legend hides a kind of trial."
    )
    return section("Learning curves", drawn + note(told))


def history_section(report: StudyReport) -> str:
    """The best value so far."""
    if report.status["best"] is None:
        return section("Best value so far", note("No trial is complete yet."))
    drawn = figure("history", best_so_far(report.trials, report.metric, report.direction))
    return section("Best value so far", drawn + note("Complete trials in the order of their numbers."))


def prediction_section(report: StudyReport) -> str:
    """Predicted final losses against the real ones."""
    title, found = "Prediction against outcome", report.predictions
    if found.mean_absolute_error is None or found.inside_80 is None:
        return section(title, note("No trial for which a final loss was predicted has run to its end yet."))
    metrics = {trial.user_attrs.get(PREDICTION_ATTR, {}).get("metric") for trial in report.trials}
    of = ", ".join(sorted(str(metric) for metric in metrics if metric))
    rows = [
        ("predicted metric", of),
        ("trials compared", found.compared),
        ("mean absolute error", shown(found.mean_absolute_error)),
        ("outcomes inside the 80 % interval", percent(found.inside_80)),
    ]
    told = (
        "Each trial's first prediction and the value it ended with; the bars are the prediction's 80 % interval. "
        "Trials that were pruned or stopped early have no such end and are left out, so these are the more "
        "promising ones."
    )
    return section(
        title, table(rows) + figure("predictions", predictions_against_outcomes(report.compared)) + note(told)
    )


def pruning_section(report: StudyReport) -> str:
    """What pruning saved, and the audit's figures."""
    found = report.status["pruning"]
    rows = [
        ("trials pruned", f"{found['pruned']} of {found['ended']} ended"),
        ("epochs used", found["epochs_used"]),
    ]
    if found["epochs_unpruned"]:
        share = percent(found["epochs_saved"] / found["epochs_unpruned"])
        of = f"{found['epochs_saved']} of {found['epochs_unpruned']} ({share})"
        rows += [("epochs of a whole trial", found["horizon"]), ("epochs saved, at most", of)]
    if not found["audited"]:
        rows.append(("false-prune rate", "not measured: no audited trial has ended"))
        return section("What pruning saved", table(rows) + note(_NO_AUDIT))
    best = "the best" if found["top_k"] == 1 else f"among the best {found['top_k']}"
    low, high = found["false_prune_interval"]
    rate = f"{percent(found['false_prune_rate'])}, 95 % interval {percent(low)} to {percent(high)}"
    rows += [
        ("audited trials that ended", found["audited"]),
        (f"of them {best} of all", found["wrongly_condemned"]),
        ("false-prune rate", rate),
        ("epochs that the audit cost", found["audit_epochs"]),
    ]
    return section("What pruning saved", table(rows) + note(_AUDIT))


_NO_AUDIT: Final = (
    "With `study.pruner.audit_fraction=0.05` the pruner `predicted_loss` lets a share of the trials that it would "
    "prune run on, and so measures how often it is wrong."
)
_AUDIT: Final = (
    "Audited trials were to be pruned and ran on to measure. One was wrongly condemned if it is complete and "
    "among the best of all complete trials; a diverged trial never is. The interval is Wilson's."
)

#: The page, from top to bottom.
SECTIONS: Final = (overview, curves_section, history_section, prediction_section, pruning_section)


def section(title: str, content: str) -> str:
    """A headed part of the page."""
    return f"<section>\n<h2>{escaped(title)}</h2>\n{content}\n</section>"


def table(rows: Iterable[tuple[str, Any]]) -> str:
    """Names and values, both as text."""
    lines = "\n".join(
        f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(value)}</td></tr>' for name, value in rows
    )
    return f"<table>\n{lines}\n</table>\n"


def note(text: str) -> str:
    """A line of explanation."""
    return f'<p class="note">{escaped(text)}</p>'


def figure(name: str, drawn: go.Figure) -> str:
    """A figure's place, and its data; ``<``, ``>`` and ``/`` in them are written as plotly's JSON escapes."""
    data = drawn.to_json()
    place = f'<div class="figure" id="{name}"></div>'
    return f'{place}\n<script type="application/json" data-figure="{name}">{data}</script>\n'


def escaped(value: Any) -> str:
    """A value as text of the page."""
    return html.escape(str(value) if not isinstance(value, float) else shown(value))


def shown(value: float) -> str:
    """A number with six digits."""
    return f"{value:.6g}"


def percent(share: float) -> str:
    """A share of 1 in percent."""
    return f"{share * 100:.0f} %"
