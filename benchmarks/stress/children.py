"""Child processes for the areas of the stress run: bounded in time, waited for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit code (None: it ran past its time), what it wrote."""

    code: int | None
    out: str
    err: str

    @property
    def traceback(self) -> bool:
        """Whether a Python traceback reached the user."""
        return "Traceback (most recent call last)" in self.out + self.err


def environment(more: Mapping[str, str] | None = None, keep: Sequence[str] = ()) -> dict[str, str]:
    """Return a small environment: no variable of the caller but PATH and those named."""
    kept = {name: os.environ[name] for name in ("PATH", *keep) if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **(more or {}),
    }


def python(
    code: str, *arguments: str, env: Mapping[str, str], seconds: float = 60.0, **more: object
) -> Ended:
    """Run Python code in a child for at most `seconds`."""
    command = [sys.executable, "-c", code, *arguments]
    try:
        ran = subprocess.run(
            command, env=dict(env), capture_output=True, text=True, timeout=seconds, **more
        )  # type: ignore[call-overload]
    except subprocess.TimeoutExpired as late:
        return Ended(None, _text(late.stdout), _text(late.stderr))
    return Ended(ran.returncode, ran.stdout, ran.stderr)


def _text(data: bytes | str | None) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""
