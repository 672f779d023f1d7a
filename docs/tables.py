"""A hook of MkDocs: the site shows the tables that commands print, so that no page repeats them.

A page has the command in a comment, `<!-- printed by: FILE ARGUMENTS -->`, above a block with the
same command for who reads the page as a file; the block becomes the table.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_MARK = re.compile(r"<!-- printed by: (.+?) -->\n```sh\n.*?\n```\n", re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with what its commands print in their place."""
    return _MARK.sub(lambda found: printed(found[1]), markdown)


def printed(command: str) -> str:
    """Return what a script of the project prints; raises CalledProcessError where it fails."""
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout
