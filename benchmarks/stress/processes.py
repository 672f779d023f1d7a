"""Runs a function that yields verdicts in a process of its own, which may crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Verdict = tuple[str, str]
# Writes a line for each verdict, and null behind the last; what it prints counts for nothing.
PROGRAM = """import importlib, json, sys
module, function, out, *given = sys.argv[1:]
with open(out, "w") as file:
    for verdict in getattr(importlib.import_module(module), function)(*map(json.loads, given)):
        print(json.dumps(verdict), file=file, flush=True)
    print("null", file=file)
"""


def verdicts_of(
    module: str, function: str, given: Sequence[Any], seconds: float | None = None, **more: str
) -> tuple[list[Verdict], str]:
    """Return the verdicts of a function, and why it did not come to its end, "" if it did.

    more: environment variables.
    """
    with tempfile.TemporaryDirectory(prefix="nmm-stress-") as name:
        out, log = Path(name) / "verdicts", Path(name) / "log"
        arguments = [module, function, str(out), *map(json.dumps, given)]
        why = "it ended before its last attempt"
        with log.open("w") as said:
            try:
                subprocess.run(
                    [sys.executable, "-c", PROGRAM, *arguments],
                    cwd=ROOT, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False,
                    timeout=seconds, env={**os.environ, "PYTHONPATH": str(ROOT), **more},
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                why = f"it ran past {seconds:.0f} s"
        lines = out.read_text().splitlines() if out.is_file() else []
        verdicts = [(verdict[0], verdict[1]) for verdict in map(json.loads, lines) if verdict]
        tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
        return verdicts, "" if lines[-1:] == ["null"] else f"{why}: {tail}"
