"""Breaks one line of the package at a time and runs the tests that have to notice.

In: `mutants.toml`, a list of single-line mutations. Out: one line per mutation and the survivors;
exit code 1 if any survives. Each worker has its own copy of the repository in a temporary
directory, so the working tree is never touched. A mutation is found by its snippet, which occurs
exactly once in its room, and a test by its file's name, so that both may move to other folders.
A mutation counts as killed when the named tests fail or time out; a test file that cannot be
collected, or a test that is not there, is a fault of the list and ends the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIST = Path(__file__).with_name("mutants.toml")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "out", "build", "dist", "*.egg-info")
SECONDS = 180
_PASSED, _FAILED = 0, 1  # exit codes of pytest; all others say that it could not run the tests


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mutation: in the one file of `room` that holds `old`, `new` stands in its place.

    tests: test ids without folders, e.g. "test_strides.py::test_strides_at_the_output".
    breaks: one sentence that says what goes wrong.
    """

    name: str
    room: str
    old: str
    new: str
    tests: tuple[str, ...]
    breaks: str

    def file(self, root: Path = ROOT) -> Path:
        """Return the file to change; raise ValueError unless `old` occurs exactly once."""
        texts = {
            path: path.read_text() for path in (root / "nmm_compiler" / self.room).rglob("*.py")
        }
        found = [path for path, text in texts.items() for _ in range(text.count(self.old))]
        if len(found) != 1:
            places = ", ".join(str(path.relative_to(root)) for path in found) or "no file"
            raise ValueError(f"{self.name}: {self.old!r} is in {places}; it has to occur once")
        return found[0]

    def changed(self, text: str) -> str:
        """Return the text with the mutation."""
        return text.replace(self.old, self.new)

    def node_ids(self, root: Path = ROOT) -> list[str]:
        """Return the tests with their folders; raise ValueError for a file that is not there."""
        ids = []
        for test in self.tests:
            file, _, rest = test.partition("::")
            paths = list((root / "tests").rglob(file))
            if len(paths) != 1:
                raise ValueError(f"{self.name}: tests/**/{file} is {len(paths)} files")
            ids.append(str(paths[0].relative_to(root)) + (f"::{rest}" if rest else ""))
        return ids


def read_list(path: Path = LIST) -> list[Mutant]:
    """Return the mutations of a list."""
    entries = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(**(entry | {"tests": tuple(entry["tests"])})) for entry in entries]


def copy_repository(directory: Path) -> Path:
    """Copy what the tests need; compiled files are checked by content, so none can be stale."""
    root = directory / "repository"
    shutil.copytree(ROOT, root, ignore=NOT_COPIED)
    compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    subprocess.run([*compiled, str(root / "nmm_compiler")], check=True)
    return root


def run_tests(root: Path, node_ids: list[str], seconds: float) -> tuple[int, str]:
    """Run tests in a copy; return pytest's exit code (1 after a timeout) and the last line."""
    settings = {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", "long or not long"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *node_ids],
        cwd=root,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=seconds)[0].strip()
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return _FAILED, f"timed out after {seconds:.0f} s"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return process.returncode, (failed or output.splitlines() or [""])[-1]


def try_mutant(mutant: Mutant, root: Path) -> tuple[bool, str]:
    """Return whether the tests notice a mutation, and pytest's last words."""
    path = mutant.file(root)
    text = path.read_text()
    path.write_text(mutant.changed(text))
    try:
        code, words = run_tests(root, mutant.node_ids(root), SECONDS)
    finally:
        path.write_text(text)
    if code not in (_PASSED, _FAILED):
        raise ValueError(f"{mutant.name}: pytest could not run its tests: {words}")
    return code == _FAILED, words


def main(arguments: list[str] | None = None) -> int:
    """Try the mutations that the command line selects; return 1 if any survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="mutations whose name contains this")
    parser.add_argument("--room", help="mutations of this folder of the package")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args(arguments)
    mutants = [
        mutant
        for mutant in read_list()
        if (asked.only or "") in mutant.name and asked.room in (None, mutant.room)
    ]
    if not mutants:
        parser.error("no mutation has that name or room")
    started, survivors = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="nmm_mutants_") as directory:
        roots: queue.Queue[Path] = queue.Queue()
        first = copy_repository(Path(directory) / "0")
        roots.put(first)
        for number in range(1, min(asked.workers, len(mutants))):
            roots.put(Path(shutil.copytree(first, Path(directory) / str(number))))
        every = sorted({test for mutant in mutants for test in mutant.node_ids()})
        code, words = run_tests(first, every, SECONDS * len(mutants))
        if code != _PASSED:
            print(f"the tests fail without any mutation: {words}")
            return 1
        print(f"{len(mutants)} mutations; the tests pass without any: {words}", flush=True)

        def work(mutant: Mutant) -> tuple[Mutant, bool, str, float]:
            root, begun = roots.get(), time.monotonic()
            try:
                return mutant, *try_mutant(mutant, root), time.monotonic() - begun
            finally:
                roots.put(root)

        with ThreadPoolExecutor(asked.workers) as pool:
            for done, (mutant, killed, words, took) in enumerate(pool.map(work, mutants), 1):
                verdict = "killed" if killed else "SURVIVED"
                count = f"{done:3}/{len(mutants)}"
                print(f"{count} {took:5.1f} s  {verdict:8} {mutant.name}  {words:.120}", flush=True)
                if not killed:
                    survivors.append(mutant)
    for mutant in survivors:
        print(f"survivor: {mutant.name} ({mutant.file().relative_to(ROOT)}): {mutant.breaks}")
    print(f"{len(survivors)} survivors of {len(mutants)} in {time.monotonic() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
