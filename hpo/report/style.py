"""The page's style sheet and script; colours are written once, for both."""

from __future__ import annotations

import json
from typing import Any, Final

_LIGHT: Final = {
    "back": "#ffffff",
    "text": "#1f2328",
    "quiet": "#59636e",
    "line": "#d0d7de",
    "grid": "#e6e9ec",
    "link": "#0a58b5",
    "code": "#f3f5f7",
    "veil": "rgba(255, 255, 255, 0.7)",
}
_DARK: Final = {
    "back": "#14181d",
    "text": "#e6e9ec",
    "quiet": "#a3adb8",
    "line": "#3a424c",
    "grid": "#2b323a",
    "link": "#7db4ff",
    "code": "#1e242b",
    "veil": "rgba(20, 24, 29, 0.7)",
}


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


STYLE: Final = f"""
:root {{ color-scheme: light dark; {_variables(_LIGHT)} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); }}
body {{ max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }}
h1, h2, h3 {{ line-height: 1.2; overflow-wrap: anywhere; }}
h2 {{ margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .3rem; }}
h3 {{ font-size: 1rem; margin: 1.2rem 0 .4rem; }}
a {{ color: var(--link); }}
nav ul {{ columns: 16rem; padding-left: 1.2rem; margin: .5rem 0 1.5rem; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; vertical-align: top; padding: .25rem 1.2rem .25rem 0; }}
th, td {{ border-bottom: 1px solid var(--line); }}
th {{ font-weight: 600; }}
td {{ overflow-wrap: anywhere; }}
.scroll {{ overflow-x: auto; margin: .5rem 0; }}
.scroll th, .scroll td {{ overflow-wrap: normal; white-space: nowrap; }}
.scroll td:last-child {{ min-width: 12rem; white-space: normal; overflow-wrap: anywhere; }}
.scroll td.number:last-child {{ min-width: 0; }}
.number {{ font-variant-numeric: tabular-nums; }}
.tiles {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: .5rem; }}
.tiles > div {{ min-width: 0; }}
.note {{ color: var(--quiet); font-size: .9rem; }}
summary {{ cursor: pointer; overflow-wrap: anywhere; }}
code {{ font-size: .92em; background: var(--code); padding: 0 .25em; border-radius: 3px; }}
pre {{ background: var(--code); padding: .8rem; overflow-x: auto; font-size: .85rem; }}
@page {{ margin: 14mm 12mm; }}
@media print {{
  body {{ font-size: 11pt; margin: 0; max-width: none; padding: 0; }}
  nav {{ display: none; }}
  h2, h3 {{ break-after: avoid; }}
  figure, tr {{ break-inside: avoid; }}
  .scroll {{ overflow: visible; }}
  .scroll th, .scroll td {{ white-space: normal; overflow-wrap: anywhere; font-size: 7.5pt; }}
  .scroll th, .scroll td {{ padding-right: .3rem; }}
  .scroll td:last-child {{ min-width: 0; }}
  .figure {{ min-width: 0 !important; }}
  .tiles {{ grid-template-columns: 1fr 1fr; }}
  .modebar-container {{ display: none; }}
  pre {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: 7.5pt; }}
}}
"""


def _template(colors: dict[str, str]) -> dict[str, Any]:
    """What plotly.js takes for everything that a figure does not say itself."""
    axis = {
        "gridcolor": colors["grid"],
        "linecolor": colors["line"],
        "tickcolor": colors["quiet"],
        "zerolinecolor": colors["line"],
        "automargin": True,
        "title": {"standoff": 10},
        "exponentformat": "power",
    }
    return {
        "layout": {
            "paper_bgcolor": "rgba(0, 0, 0, 0)",
            "plot_bgcolor": "rgba(0, 0, 0, 0)",
            "font": {"color": colors["text"], "family": "system-ui, sans-serif", "size": 12},
            "hoverlabel": {"align": "left"},
            "annotationdefaults": {"bgcolor": colors["veil"], "borderpad": 1},
            "modebar": {"bgcolor": "rgba(0, 0, 0, 0)", "color": colors["quiet"], "activecolor": colors["text"]},
            "xaxis": axis,
            "yaxis": axis,
        }
    }


# Plotly's own button for sharing would send a chart's data to a server; it is there unless switched off.
SCRIPT: Final = f"""
"use strict";
const templates = {{light: {json.dumps(_template(_LIGHT))}, dark: {json.dumps(_template(_DARK))}}};
const touched = matchMedia("(pointer: coarse)").matches;
const settings = {{
  displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
  displayModeBar: touched ? false : "hover",
}};
const dark = matchMedia("(prefers-color-scheme: dark)");
const paper = 680; // pixels, of a page of A4 or letter within its margins
const places = [];
// On a screen that is touched, a drag moves the page and not the figure.
const drag = touched ? false : "zoom";
const template = () => templates[dark.matches ? "dark" : "light"];
const redrawn = (change) => Promise.all(places.map((place) => Plotly.relayout(place, change(place))));

async function draw() {{
  for (const data of document.querySelectorAll("script[data-figure]")) {{
    const figure = JSON.parse(data.textContent);
    const place = document.getElementById("figure-" + data.dataset.figure);
    const layout = {{...figure.layout, template: template(), dragmode: drag}};
    await Plotly.newPlot(place, figure.data, layout, settings);
    places.push(place);
  }}
  document.documentElement.dataset.drawn = "yes";
}}
dark.addEventListener("change", () => redrawn(() => ({{template: template()}})));
let closed = [];
addEventListener("beforeprint", () => {{
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const each of closed) each.open = true;
  redrawn((place) => ({{template: templates.light, width: place.closest(".tiles") ? paper / 2 - 10 : paper}}));
}});
addEventListener("afterprint", () => {{
  for (const each of closed) each.open = false;
  redrawn(() => ({{template: template(), width: null, autosize: true}}));
}});
draw();
"""
