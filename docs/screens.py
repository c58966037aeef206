"""Make the screens of the documentation from a real run of the digits study: python docs/screens.py.

The live view is what `hpo run` draws, kept in the middle of the run; the report and the dashboard are photographed
in Chromium. Pictures go to docs/screens/.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hpo.config.spec import load_spec
from hpo.console.lines import Reporter
from hpo.console.live import Picture, StudyView
from hpo.execution.run import run_study

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).parents[1]
SCREENS = ROOT / "docs" / "screens"
COMMAND = "hpo run study.yaml --workers 4"
TERMINAL = (122, 40)
#: Lines of ended trials above the live view, and which share of the trials may have ended in it.
SHOWN, SHARES = 8, (0.4, 0.85)
COLOURS = 96


class Keeper(Reporter):
    """Prints as `hpo run` does, and keeps the live view that shows the most."""

    def __init__(self, opened: Any) -> None:
        super().__init__(opened)
        self.printed = io.StringIO()
        self.kept: tuple[StudyView, list[str]] | None = None
        self._points = 0

    def begin(self, slots: Any) -> None:
        """As `Reporter` does."""
        with contextlib.redirect_stdout(self.printed):
            super().begin(slots)

    def heard(self, label: str, message: Any) -> None:
        """As `Reporter` does, then look whether there is more to see than before."""
        with contextlib.redirect_stdout(self.printed):
            super().heard(label, message)
        view = self._tally.view()
        points = [len(worker.curve) for worker in view.workers]
        drawn = sum(points) * (min(points) > 0)
        ended, of, _ = view.progress
        if SHARES[0] <= ended / of <= SHARES[1] and drawn > self._points:
            self._points = drawn
            self.kept = view, self.printed.getvalue().splitlines()


def live(folder: Path) -> None:
    """Run the study, and keep its live view."""
    spec = load_spec(folder / "study.yaml", require_search_space=True).with_options(workers=4)
    keepers: list[Keeper] = []

    def listen(opened: Any) -> Keeper:
        keepers.append(Keeper(opened))
        return keepers[-1]

    run_study(spec, listen, lambda finding: print(finding, file=sys.stderr))
    if keepers[0].kept is None:
        raise SystemExit("no moment of the run had all workers at work: run it again")
    view, lines = keepers[0].kept
    width, height = TERMINAL
    console = Console(
        record=True, width=width, height=height, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(f"[bold]$ {COMMAND}[/bold]")
    about, ended = lines[:2], lines[2:]
    for line in [*about, *(["⋮"] if len(ended) > SHOWN else []), *ended[-SHOWN:]]:
        console.print(line.replace(f"{folder}/", ""), markup=False, soft_wrap=True)
    console.print(Picture(view))
    # A picture loads nothing from elsewhere: the viewer's own monospaced font will do.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="hpo"), flags=re.DOTALL)
    (SCREENS / "live.svg").write_text(svg)


def report(browser: Browser, folder: Path) -> None:
    """The report's top in the light; its curves and all trials in the dark, and on a phone."""
    page_file = folder / "report.html"
    subprocess.run(
        [sys.executable, "-m", "hpo", "report", "study.yaml", "-o", str(page_file)], cwd=folder, check=True
    )
    looks = {"light": ("light", 1280, 1180), "dark": ("dark", 1280, 980), "phone": ("light", 390, 844)}
    for name, (scheme, width, height) in looks.items():
        size = {"width": width, "height": height}
        with opened(browser, page_file.as_uri(), viewport=size, color_scheme=scheme) as page:
            page.wait_for_selector("html[data-drawn]")
            if name != "light":
                page.evaluate("document.querySelector('#curves-title').scrollIntoView()")
            page.wait_for_timeout(1500)
            photograph(page, f"report-{name}.png")


def dashboard(browser: Browser, folder: Path) -> None:
    """The study's page in the dashboard, and that of its best trial with its artifacts."""
    command = [sys.executable, "-m", "hpo", "dashboard", "study.yaml", "--port", "0", "--read-only"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        home = process.stdout.readline().rpartition(" ")[2].strip()
        best = subprocess.run(
            [sys.executable, "-c", "import hpo; print(hpo.load_study('study.yaml').best_trial.number)"],
            cwd=folder, check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        with opened(browser, home, viewport={"width": 1280, "height": 1000}) as page:
            page.wait_for_selector(".plotly")
            page.wait_for_timeout(3000)
            photograph(page, "dashboard.png")
        with opened(browser, f"{home}/trials?numbers={best}", viewport={"width": 1280, "height": 1000}) as page:
            page.get_by_text("config.yaml").first.scroll_into_view_if_needed()
            page.wait_for_timeout(3000)
            photograph(page, "dashboard-trial.png")
        with opened(browser, f"{home}/trials?numbers={best}", viewport={"width": 390, "height": 844}) as page:
            page.get_by_text("config.yaml").first.wait_for()
            page.wait_for_timeout(3000)
            photograph(page, "dashboard-phone.png")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


@contextlib.contextmanager
def opened(browser: Browser, address: str, **looks: Any) -> Iterator[Page]:
    """A page at an address, in a browser of its own."""
    context = browser.new_context(**looks)
    page = context.new_page()
    page.goto(address)
    yield page
    context.close()


def photograph(page: Page, name: str) -> None:
    """Keep what is seen of a page, with few colours: a picture of text needs no more."""
    from PIL import Image

    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(SCREENS / name, optimize=True)


def main() -> None:
    """Run the study in a copy of its folder, and make all pictures."""
    from playwright.sync_api import sync_playwright

    SCREENS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "digits"
        shutil.copytree(ROOT / "studies" / "digits", folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
        live(folder)
        with sync_playwright() as playwright:
            chromium = shutil.which("chromium-headless-shell")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            report(browser, folder)
            dashboard(browser, folder)
            browser.close()


if __name__ == "__main__":
    main()
