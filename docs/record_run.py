"""Run a command and keep what it printed as a picture for the README.

python docs/record_run.py docs/run.svg hpo run studies/digits/study.yaml --workers 4
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console

WIDTH = 122
SHOWN = 10


def main() -> None:
    """Record, leave the middle out, and write the picture."""
    picture, *command = sys.argv[1:]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = printed.replace(str(Path.cwd()) + "/", "").splitlines()
    trials = [index for index, line in enumerate(lines) if line.startswith("[")]
    cut = [*lines[: trials[SHOWN]], "  ⋮", *lines[trials[-4] :]]
    console = Console(record=True, width=WIDTH, file=sys.stderr, force_terminal=True, highlight=True)
    console.print(f"[bold]$ {shlex.join(command)}[/bold]")
    for line in cut:
        console.print(line, markup=False)
    svg = console.export_svg(title="hpo")
    # A picture loads nothing from elsewhere: the viewer's own monospaced font will do.
    Path(picture).write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))


if __name__ == "__main__":
    main()
