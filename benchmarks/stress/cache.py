"""The cache under 12 processes that build the same keys and are killed at random moments.

Each process builds entries whose text follows from their key, checks every entry that it gets, and
writes a line for each to a file of its own. The parent kills and replaces processes at random until
`count` lines are there. At the end each key that was ever served must be whole on disk.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.stress.tally import Tally

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


def attempt(count: int, seed: int) -> Tally:
    """Run until `count` reads were checked, or SECONDS are over; a wrong text is a wrong result."""
    drawn, tally = random.Random(seed), Tally()
    folder = Path(tempfile.mkdtemp(prefix="nmm-stress-cache-"))
    running: list[subprocess.Popen[bytes]] = []
    started = kills = 0
    faults = open(folder / "stderr", "ab")  # noqa: SIM115  (children write to it)
    try:
        end = time.monotonic() + SECONDS
        while _lines(folder) < count and time.monotonic() < end:
            while len(running) < PROCESSES:
                started += 1
                arguments = [str(folder / "cache"), str(folder / f"log-{started}")]
                command = [sys.executable, "-c", WORKER, *arguments, str(seed + started), str(KEYS)]
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
        faults.close()
    served = _count(folder, tally)
    _check_what_stays(folder, served, tally)
    errors = (folder / "stderr").read_text(errors="replace")
    tally.tracebacks += errors.count("Traceback (most recent call last)")
    tally.examples += [line for line in errors.splitlines()[-1:] if tally.tracebacks]
    if tally.attempts < min(count, 100):
        tally.lost += 1
        tally.examples.append(f"only {tally.attempts} reads in {SECONDS:g} s, {kills} kills")
    shutil.rmtree(folder)
    return tally


def _lines(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("log-*"))


def _count(folder: Path, tally: Tally) -> set[int]:
    """Count the checked reads; return the keys that were served."""
    served = set()
    for path in folder.glob("log-*"):
        for line in path.read_text().splitlines():
            state, _, number = line.partition(" ")
            if not number.isdecimal():
                continue  # the line that a kill cut
            tally.attempts += 1
            tally.right += state == "right"
            tally.wrong += state != "right"
            served.add(int(number))
    return served


def _check_what_stays(folder: Path, served: set[int], tally: Tally) -> None:
    """Each key that was served is on disk, whole, and leftovers of the killed can be cleared."""
    from nmm_compiler.cache.disk import FOLDER
    from nmm_compiler.cache.key import Key
    from nmm_compiler.cache.store import Store

    store = Store(folder / "cache")
    for number in sorted(served):
        tally.attempts += 1
        if store.get(Key.make({"number": number})) is None:
            tally.lost += 1
            tally.examples.append(f"key {number} was served and is gone")
        else:
            tally.right += 1
    store.prune()
    tally.attempts += 1
    states = {info.state for info in store.entries()}
    hidden = [path.name for path in (folder / "cache" / FOLDER).glob(".*")]
    if states <= {"ok"} and not hidden:
        tally.right += 1
    else:
        tally.lost += 1
        tally.examples.append(f"after prune: {states}, {hidden[:3]}")
