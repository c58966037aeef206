"""Writes the page: its sections in order, in templates/page.html, with a copy of plotly.js to draw the figures.

A section is one function of the StudyReport. Figures are JSON data. The page's own content security policy keeps
it from loading anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from plotly.offline import get_plotlyjs

from hpo.errors import InputError
from hpo.report import internal_sections as internal
from hpo.report import search_sections as search
from hpo.report import sections
from hpo.report.data import StudyReport
from hpo.report.looks import COMPARED
from hpo.report.markup import Section, templates
from hpo.report.style import DARK, LIGHT, figure_template
from hpo.report.trial_table import internals_section, trials_section
from trainer.files import replacing

#: The page's sections from top to bottom: the study's results, then hpo's internal records.
GROUPS: Final = (
    (
        "What was found",
        (
            sections.history_section,
            search.front_section,
            sections.curves_section,
            trials_section,
            search.importance_section,
            search.parallel_section,
            search.slice_section,
            search.contour_section,
            sections.edge_section,
            sections.failure_section,
        ),
    ),
    (
        "Predictions and internals",
        (
            internal.prediction_section,
            internal.pruning_section,
            internal.grants_section,
            internal.time_section,
            internals_section,
            internal.environment_section,
            internal.code_section,
            internal.config_section,
        ),
    ),
)


def write_report(report: StudyReport, path: Path) -> None:
    """Write the page in one step; creates missing folders.

    Raises:
        InputError: The file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(page(report))
    except OSError as error:
        fix = "name a file in a folder that you may write to, with `--output FILE.html`"
        problem = f"can't be written: {error.strerror or error}"
        raise InputError(problem, path="--output", value=str(path), fix=fix) from error


def page(report: StudyReport) -> str:
    """The text of the whole page."""
    groups = [(title, _made(makes, report)) for title, makes in GROUPS]
    return (
        templates()
        .get_template("page.html")
        .render(
            title=report.status["study"],
            overview=sections.overview(report),
            groups=groups,
            inks=COMPARED,
            plotly=get_plotlyjs(),
            light=LIGHT,
            dark=DARK,
            figure_templates={"light": figure_template(LIGHT), "dark": figure_template(DARK)},
        )
    )


def _made(makes: Iterable[Callable[[StudyReport], Section | None]], report: StudyReport) -> list[Section]:
    return [section for make in makes if (section := make(report)) is not None]
