"""Text for the compression benchmark: what ships with Python, and sentences written for it.

Calibration and held-out texts are disjoint: `sentences` and `manual` are for calibration and
recovery, the package's own `cli/data/sentences.txt` is what the encoder is judged on, and
`byte_split` cuts Python's manual by topic into text to train a small model on, and text to judge
it on.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

_DATA = Path(__file__).parent / "data" / "calibration_sentences.txt"
_HELD_OUT_SHARE = 0.1


def sentences() -> list[str]:
    """Return everyday sentences for calibration."""
    return _DATA.read_text(encoding="utf-8").splitlines()


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


def byte_split(seed: int = 0) -> tuple[bytes, bytes]:
    """Return (train, held out) bytes of the manual; no chapter is in both."""
    chapters = topics()
    names = sorted(chapters)
    random.Random(seed).shuffle(names)
    cut = max(1, round(_HELD_OUT_SHARE * len(names)))
    joined = ["\n\n".join(chapters[n] for n in part) for part in (names[cut:], names[:cut])]
    return joined[0].encode(), joined[1].encode()
