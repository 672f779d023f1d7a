"""The cache under 12 processes that build the same keys and are killed at random moments.

Each process builds entries whose text follows from their key, checks every entry that it gets, and
writes a line for each to a file of its own. The parent kills and replaces processes at random until
`count` lines are there. At the end each key that was ever served must be whole on disk.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROCESSES = 12
KEYS = 400
SECONDS = 150.0  # of the whole area, however slow the machine is
ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
}

WORKER = """
import random, sys, warnings
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store

directory, log, seed, keys = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
drawn = random.Random(seed)
warnings.simplefilter("ignore")

def text(number):
    return f"y = {number}\\n" + "# line\\n" * (number % 97)

with open(log, "a") as out:
    for step in range(100_000):
        if step % 25 == 0:
            store = Store(directory)
        number = drawn.randrange(keys)
        key = Key.make({"number": number})
        entry = store.get_or_build(key, lambda: {"kernel.py": text(number)}, {"n": number})
        file = entry.path / "kernel.py"
        right = entry.files == {"kernel.py": text(number)} and entry.meta == {"n": number}
        try:
            right = right and file.read_text() == text(number)
        except FileNotFoundError:
            pass  # evicted or replaced between the two: the entry itself was right
        out.write(f"{'right' if right else 'wrong'} {number}\\n")
        out.flush()
"""


def attempts(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Check `count` reads, or as many as there are in SECONDS, and at the end what stays."""
    from nmm_compiler.cache.disk import FOLDER
    from nmm_compiler.cache.key import Key
    from nmm_compiler.cache.store import Store

    with tempfile.TemporaryDirectory(prefix="nmm-stress-cache-") as name:
        folder, served, reads = Path(name), set(), 0
        kills = _build_and_kill(folder, count, seed)
        for line in _lines(folder):
            outcome, _, number = line.partition(" ")
            if number.isdecimal():  # else a kill cut the line
                reads += 1
                served.add(int(number))
                yield outcome, f"key {number} has another text"
        store = Store(folder / "cache")
        for number in sorted(served):
            kept = store.get(Key.make({"number": number})) is not None
            yield "right" if kept else "lost", f"key {number} was served and is gone"
        store.prune()
        states = {info.state for info in store.entries()}
        hidden = [path.name for path in (folder / "cache" / FOLDER).glob(".*")]
        whole = states <= {"ok"} and not hidden
        yield "right" if whole else "lost", f"after prune: {states}, {hidden[:3]}"
        errors = (folder / "stderr").read_text(errors="replace")
        for _ in range(errors.count("Traceback (most recent call last)")):
            yield "tracebacks", errors.splitlines()[-1]
        if reads < min(count, 100):
            yield "lost", f"only {reads} reads in {SECONDS:g} s, {kills} kills"


def _build_and_kill(folder: Path, count: int, seed: int) -> int:
    """Let processes build until `count` lines are there, and kill some; return how many."""
    drawn = random.Random(seed)
    running: list[subprocess.Popen[bytes]] = []
    started = kills = 0
    with open(folder / "stderr", "ab") as faults:
        try:
            end = time.monotonic() + SECONDS
            while len(_lines(folder)) < count and time.monotonic() < end:
                while len(running) < PROCESSES:
                    started += 1
                    given = [str(folder / "cache"), str(folder / f"log-{started}")]
                    command = [sys.executable, "-c", WORKER, *given, str(seed + started), str(KEYS)]
                    running.append(subprocess.Popen(command, env=ENVIRONMENT, stderr=faults))
                time.sleep(drawn.uniform(0.05, 0.4))
                if time.monotonic() < end and started > PROCESSES // 2:
                    victim = running.pop(drawn.randrange(len(running)))
                    victim.send_signal(signal.SIGKILL)
                    victim.wait()
                    kills += 1
        finally:
            for process in running:
                process.kill()
                process.wait()
    return kills


def _lines(folder: Path) -> list[str]:
    return [line for path in folder.glob("log-*") for line in path.read_text().splitlines()]
