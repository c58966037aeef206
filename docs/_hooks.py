"""What mkdocs does beside its own work: links to files of the repository outside of ``docs/`` become plain text.

A code host shows such files; the site has none of them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Unlink files that are not part of the site."""
    folder = Path(page.file.src_uri).parent

    def unlinked(match: re.Match[str]) -> str:
        target = (Path(config.docs_dir) / folder / match[2]).resolve()
        return match[0] if target.is_relative_to(config.docs_dir) else match[1]

    return _OUTSIDE.sub(unlinked, markdown)
