"""An exception of this package while it predicts is told as a fault, not as "not predicted"."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

from nmm_compiler.errors import internal_fault

_PACKAGE = Path(__file__).resolve().parents[1]


def fault_text(error: Exception, *, strict: bool = False) -> str:
    """Warn of a fault; return what a headline says in place of the prediction.

    Raises InternalFaultError under strict.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(frame.filename)
    place = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path
    text = " ".join(str(error).split())[:120]
    what = f"{type(error).__name__} while predicting at {place}:{frame.lineno}: {text}"
    if strict:
        raise internal_fault(what) from error
    said = f"a fault in nmm_compiler, {what}; please report it"
    warnings.warn(f"nmm: {said}. Outputs are right; only the prediction is missing", stacklevel=3)
    return said
