"""Hostile kernel files against `nmm simulate` and `nmm lint`, as a user types the commands.

Each attempt writes one file and runs one command on it in a process of its own. Right is: the exit
code that the case expects, within the time limit, and one line on stderr for a refusal.

    python -m benchmarks.stress.hostile_files          every case once
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.stress.tally import Tally

TIME_LIMIT = 2  # seconds, given to each command
START_SECONDS = 30  # what starting Python and NumPy may take on a machine that is busy
HEAD = "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n\n"
KERNEL = "\n\n@nki.jit\ndef k(a):\n    t = nl.ndarray((8, 8), nl.float32, nl.sbuf)\n    {}\n"


@dataclass(frozen=True)
class Case:
    """One file. make: writes it. codes: exit codes that are right. shown: a word of stderr."""

    name: str
    make: Callable[[Path, int], None]
    command: str
    codes: tuple[int, ...]
    shown: str = ""


def _text(text: str) -> Callable[[Path, int], None]:
    return lambda path, size: path.write_text(text.replace("SIZE", str(size)), encoding="utf-8") * 0


def _bytes(data: bytes) -> Callable[[Path, int], None]:
    return lambda path, size: path.write_bytes(data) * 0


def _repeated(before: str, again: str, after: str = "") -> Callable[[Path, int], None]:
    """Return a writer of `again`, some 100 times the seeded size."""
    return lambda path, size: path.write_text(f"{before}{again * (100 * size)}{after}\n") * 0


# name, statements inside the kernel, word of the refusal
BODIES = (
    ("loop", "while True: pass", "--time-limit"),
    ("loop with except", "exec('while 1:\\n try: 1/0\\n except BaseException: pass')", "limit"),
    ("sleep", "import time; time.sleep(10**6)", "--time-limit"),
    ("long sum", "sum(range(10**12))", "--time-limit"),
    ("huge power", "x = 10 ** 10 ** 10", "--time-limit"),
    ("regular expression", "import re; re.match('(a+)+$', 'a' * 60 + 'b')", "--time-limit"),
    ("lock", "import threading; l = threading.Lock(); l.acquire(); l.acquire()", "--time-limit"),
    ("join", "import threading as t; t.Thread(target=t.Event().wait).start(); t.Event().wait()",
     "--time-limit"),
    ("ignored signals", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1e6)",
     "--time-limit"),
    ("masked signals", "import signal, time; signal.pthread_sigmask(0, range(1, 32)); "
     "time.sleep(1e6)", "--time-limit"),
    ("instructions", "while True: nisa.memset(dst=t, value=0.0)", "max_instructions"),
    ("device loop", "nl.fori_loop(0, 10**9, lambda i: None)", "max_instructions"),
    ("device while", "r = nisa.register_alloc(1); nl.while_loop(r, lambda r: r)",
     "max_instructions"),
    ("list", "x = []\n    while True: x.append(bytearray(10**8))", "--memory-limit"),
    ("string", "x = 'a' * 10 ** 12", "--memory-limit"),
    ("array", "import numpy; numpy.ones(10 ** 12)", "--memory-limit"),
    ("tensor", "nl.ndarray((10**6, 10**6), nl.float32, nl.shared_hbm)", "--memory-limit"),
    ("dictionary", "x = dict.fromkeys(range(10**9))", "limit"),
    ("exit", "import sys; sys.exit(0)", "SystemExit"),
    ("exit with text", "raise SystemExit('no')", "SystemExit"),
    ("quit", "quit()", "SystemExit"),
    ("hard exit", "import os; os._exit(0)", "exit code 0"),
    ("hard exit 3", "import os; os._exit(3)", "exit code 3"),
    ("abort", "import os; os.abort()", "SIGABRT"),
    ("kill", "import os; os.kill(os.getpid(), 9)", "ended the process"),
    ("kill the group", "import os; os.killpg(0, 9)", "ended the process"),
    ("terminate", "import os; os.kill(os.getpid(), 15)", "SIGTERM"),
    ("segmentation fault", "import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    ("deep recursion", "f = lambda: f()\n    f()", "recursed"),
    ("stack overflow", "import sys; sys.setrecursionlimit(10**9); f = lambda n: f(n + 1)\n    f(0)",
     ""),
    ("close everything", "import os; os.closerange(0, 4096)", "ended the process"),
    ("fork", "import os; os.fork()\n    raise ValueError('twice')", "ValueError"),
    ("grandchild", "import os, time\n    if not os.fork(): time.sleep(10**6)\n"
     "    raise ValueError('x')", "ValueError"),
    ("new session", "import os; os.execv('/bin/true', ['true'])", "exit code 0"),
    ("input", "input()", "EOFError"),
    ("base exception", "raise BaseException('x')", "BaseException"),
    ("generator exit", "raise GeneratorExit", "GeneratorExit"),
    ("message that raises", "raise type('E', (Exception,), {'__str__': lambda s: 1 / 0})()",
     "ZeroDivisionError"),
    ("long message", "raise ValueError('x' * 10**7)", "ValueError"),
    ("lines in a message", "raise ValueError('a\\nb\\n' * 100)", "ValueError"),
    ("escape codes", "raise ValueError('\\x1b[2J\\x1b]0;gone\\x07')", "ValueError"),
    ("half a character", "raise ValueError('\\ud800')", "ValueError"),
    ("markup", "raise ValueError('[/red][bold')", "ValueError"),
    ("print that raises", "import builtins; builtins.print = None\n    raise ValueError('x')",
     "ValueError"),
    ("no stdout", "import sys; sys.stdout = sys.stderr = None\n    raise ValueError('x')",
     "ValueError"),
    ("wrong result", "return 3", "returned int"),
    ("result that lies", "return type('T', (), {'__class__': nl.ndarray})()", "returned"),
    ("huge print", "while True: print('x' * 10**5)", "--time-limit"),
)  # fmt: skip
# name, the file's text, word of the refusal
FILES = (
    ("exit at the top", "import sys\nsys.exit(0)\n", "SystemExit"),
    ("hard exit at the top", "import os\nos._exit(0)\n", "exit code 0"),
    ("loop at the top", "while True: pass\n", "--time-limit"),
    ("raise at the top", "raise KeyError('x')\n", "KeyError"),
    ("no kernel", "x = 1\n", "0 kernels"),
    ("endless import", "import k_itself\n", "k_itself"),
    ("wrong syntax", "def k(:\n", "syntax error"),
    ("module that lies", "import sys\nsys.modules[__name__] = dict()\n", "0 kernels"),
    ("kernel that is no function", HEAD + "k = nki.jit(3)\n", ""),
    ("wrong signature", HEAD + "@nki.jit\ndef k(a): return a\nk.function.__signature__ = 3\n", ""),
)  # fmt: skip
# name, writer, exit codes of simulate, exit codes of lint
SHAPES: tuple[tuple[str, Callable[[Path, int], None], tuple[int, ...], tuple[int, ...]], ...] = (
    ("parentheses", _repeated("x = ", "("), (2,), (1,)),
    ("brackets", _repeated("x = " + "[" * 5000, "", "]" * 5000), (2,), (1,)),
    ("minus signs", _repeated("x = ", "-", "1"), (2,), (1,)),
    ("sum", _repeated("x = 1", " + 1"), (2,), (1,)),
    ("attributes", _repeated("x = a", ".b"), (2,), (1,)),
    ("calls", _repeated("x = a", "()"), (2,), (1,)),
    ("not", _repeated("x = ", "not ", "1"), (2,), (1,)),
    ("lambdas", _repeated("x = ", "lambda: ", "1"), (2,), (1,)),
    ("else if", _repeated("if 1: pass\n", "elif 2: pass\n"), (2,), (0, 1)),
    ("zero bytes", _bytes(b"x = 1\0\n"), (2,), (1,)),
    ("not utf-8", _bytes(b"x = '\xff\xfe'\n"), (2,), (2,)),
    ("large", _repeated("", "#" * 100_000 + "\n"), (2,), (2,)),
    ("empty", _bytes(b""), (2,), (0,)),
    ("folder", lambda path, size: path.mkdir(), (2,), (2,)),
    ("pipe", lambda path, size: os.mkfifo(path), (2,), (2,)),
    ("endless device", lambda path, size: path.symlink_to("/dev/zero"), (2,), (2,)),
    ("link to itself", lambda path, size: path.symlink_to(path), (2,), (2,)),
    ("missing", lambda path, size: None, (2,), (2,)),
    ("many names", _repeated(HEAD, "x = nisa.memset\n", "x()"), (2,), (0, 1)),
)
LINTED = (  # never executed by lint, so that nothing of them may be felt
    ("exit", "import os\nos._exit(7)\n"),
    ("loop", "while True: pass\n"),
    ("power", "x = 10 ** 10 ** 10\n"),
    ("string", "x = 'a' * 10 ** 12\n"),
)


def cases() -> list[Case]:
    """Return all cases."""
    made = [
        Case(name, _text(HEAD + KERNEL.format(body)), "simulate", (2,), shown)
        for name, body, shown in BODIES
    ]
    made += [Case(name, _text(text), "simulate", (2,), shown) for name, text, shown in FILES]
    for name, make, simulated, linted in SHAPES:
        made += [Case(name, make, "lint", linted), Case(name, make, "simulate", simulated)]
    return made + [Case(name, _text(text), "lint", (0,)) for name, text in LINTED]


def attempt(count: int, seed: int) -> Tally:
    """Try `count` cases, in an order and with sizes that `seed` sets; return what happened."""
    generator = random.Random(seed)
    chosen = cases()
    generator.shuffle(chosen)
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="nmm-hostile-") as folder:
        for number in range(count):
            case = chosen[number % len(chosen)]
            path = Path(folder) / f"k{number}.py"
            case.make(path, generator.randint(20, 60))
            _try(case, path, tally)
    return tally


def _try(case: Case, path: Path, tally: Tally) -> None:
    tally.attempts += 1
    words = [sys.executable, "-m", "nmm_compiler.cli.main", case.command, str(path)]
    words += [f"--time-limit={TIME_LIMIT}", "--memory-limit=1"]
    if case.command == "simulate":
        words += ["--arg", "a=8x8:float32", "--mode", "functional", "--max-instructions", "20000"]
    started = time.monotonic()
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=START_SECONDS + TIME_LIMIT, check=False
        )
        code, errors = done.returncode, done.stderr.decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        code, errors = -1, "did not end"
    lines = errors.strip().splitlines()
    named = case.shown in errors
    if "Traceback" in errors:
        tally.tracebacks += 1
    elif code in case.codes and named and len(lines) == (code == 2):
        tally.right += 1
        return
    elif code == 0:
        tally.wrong += 1
    shown = lines[-1][:120] if lines else ""
    seconds = time.monotonic() - started
    tally.examples.append(f"{case.command} {case.name}: code {code}, {seconds:.1f} s, {shown!r}")


if __name__ == "__main__":
    everything = attempt(len(cases()), 0)
    print(*everything.examples, sep="\n")
    print(f"{everything.right} of {everything.attempts} right, {everything.tracebacks} tracebacks")
    sys.exit(not everything.clean)
