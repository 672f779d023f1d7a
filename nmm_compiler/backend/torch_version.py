"""Warns once if this package is not tested with the installed torch."""

from __future__ import annotations

import functools
import re
import warnings

import torch

OLDEST, NEWEST = (2, 9), (2, 13)
"""The minor versions of torch that the tests pass with, both included."""


@functools.cache
def warn_if_untested(version: str = torch.__version__) -> None:
    """Warn where `version` is older or newer than the tested ones; once per version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return
    minor = int(found[1]), int(found[2])
    if not OLDEST <= minor <= NEWEST:
        oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
        warnings.warn(
            f"nmm is tested with torch {oldest} to {newest}, this is {version}; compare outputs "
            "with options={'verify': True} before you rely on them",
            stacklevel=3,
        )
