"""The page's colours, for its style sheet and its figures, in light and in dark."""

from __future__ import annotations

from typing import Any, Final

LIGHT: Final = {
    "back": "#ffffff",
    "text": "#1f2328",
    "quiet": "#59636e",
    "line": "#d0d7de",
    "grid": "#e6e9ec",
    "link": "#0a58b5",
    "code": "#f3f5f7",
    "veil": "rgba(255, 255, 255, 0.7)",
    "shade": "rgba(31, 35, 40, 0.28)",
}
DARK: Final = {
    "back": "#14181d",
    "text": "#e6e9ec",
    "quiet": "#a3adb8",
    "line": "#3a424c",
    "grid": "#2b323a",
    "link": "#7db4ff",
    "code": "#1e242b",
    "veil": "rgba(20, 24, 29, 0.7)",
    "shade": "rgba(230, 233, 236, 0.3)",
}


def figure_template(colors: dict[str, str]) -> dict[str, Any]:
    """The plotly.js template: the defaults for everything that a figure does not set."""
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
