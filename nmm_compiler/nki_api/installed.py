"""Which NKI this machine has: the package nki, or NKI Beta 1 in neuronx-cc. Imports neither."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from pathlib import Path


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def beta_1_version() -> str | None:
    """Return the version of the neuronx-cc that has `neuronxcc.nki` in it, or None.

    Neuron SDKs up to 2.27 ship it; a neuronx-cc of a later one has no such module.
    """
    found = version("neuronx-cc")
    if found is None or "neuronxcc.nki" in sys.modules:
        return found
    spec = importlib.util.find_spec("neuronxcc")
    places = (spec.submodule_search_locations or ()) if spec is not None else ()
    here = any((Path(place) / "nki" / "__init__.py").is_file() for place in places)
    return found if here else None


@functools.cache
def beta_1_only() -> bool:
    """Return whether the only NKI of this machine is Beta 1; looked up once per process."""
    return version("nki") is None and beta_1_version() is not None
