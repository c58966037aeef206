"""The page: its parts in order, the contents, and the copy of plotly.js that draws the figures.

A part of the page is one function, which takes what is known of the study and returns its HTML. Figures are data
in JSON. The page's own policy keeps it from loading anything else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from plotly.offline import get_plotlyjs

from hpo.errors import InputError
from hpo.report import search_sections as search
from hpo.report import sections as told
from hpo.report.data import StudyReport
from hpo.report.markup import escaped
from hpo.report.style import SCRIPT, STYLE
from trainer.files import replacing

_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
#: The page, from top to bottom.
SECTIONS: Final = (
    told.history_section,
    search.front_section,
    told.curves_section,
    search.importance_section,
    search.parallel_section,
    search.slice_section,
    search.contour_section,
    told.prediction_section,
    told.pruning_section,
    told.time_section,
    told.failure_section,
    told.edge_section,
    told.environment_section,
    told.code_section,
    told.config_section,
)
_HEADING: Final = re.compile(r'<h2 id="([a-z]+)-title">(.*?)</h2>')
_NO_SCRIPT: Final = (
    '<noscript><p class="note">The figures are drawn by a script, which is switched off.</p></noscript>'
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


def page(report: StudyReport) -> str:
    """The whole page."""
    title = escaped(report.status["study"])
    parts = [part(report) for part in SECTIONS]
    links = "\n".join(
        f'<li><a href="#{name}">{text}</a></li>' for part in parts for name, text in _HEADING.findall(part)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}: study report</title>
<style>{STYLE}</style>
<script>{get_plotlyjs()}</script>
</head>
<body>
<header>
<h1>{title}</h1>
{told.overview(report)}
</header>
<nav aria-label="Contents">
<ul>
{links}
</ul>
</nav>
<main>
{_NO_SCRIPT}
{"".join(parts)}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""
