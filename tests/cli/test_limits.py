"""`nmm simulate` and `nmm lint` on files that loop, fill the memory, end or crash their process."""

import json
import os
import re
import signal
import time

import pytest

from nmm_compiler.cli.kernels import arguments_of
from nmm_compiler.cli.limited import run_limited
from nmm_compiler.errors import InternalFaultError, ShapeError, WorkerError
from nmm_compiler.nki_api.lint import lint_source

HEAD = (
    "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n\n\n@nki.jit\ndef k(a):\n"
    "    t = nl.ndarray((8, 8), nl.float32, nl.sbuf)\n"
)


def limited(work, seconds=20.0, gigabytes=1.0):
    return run_limited(work, "k.py", seconds, gigabytes)


def forever():
    while True:
        pass


def fill():
    held = []
    while True:
        held.append(bytearray(1 << 24))


def blame():
    raise InternalFaultError("a fault of ours")


def refuse():
    raise ShapeError("no \x1b[2J shape \ud800")


def test_what_ends_well_prints_and_gives_its_code(capfd):
    assert limited(lambda: print("x" * 100_000, flush=True) or 1) == (1, "")
    assert capfd.readouterr().out.count("x") == 100_000  # more than a pipe holds


@pytest.mark.parametrize(
    ("work", "limit", "shown"),
    [
        (forever, {"seconds": 0.2}, "k.py ran longer than --time-limit=0.2 seconds"),
        (lambda: os._exit(3), {}, "exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), {}, "SIGTERM"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), {}, "want of memory"),
        (lambda: os.closerange(3, 4096), {}, "ended the process"),
    ],
)
def test_an_ended_process_is_one_error(work, limit, shown):
    started = time.monotonic()
    with pytest.raises(WorkerError, match=shown):
        limited(work, **limit)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("work", "code", "shown"),
    [
        (refuse, 2, r"^error: no \?\[2J shape \?$"),
        (fill, 2, "^error: out of memory.* --memory-limit"),
        (lambda: 1 / 0, 70, "ZeroDivisionError: division by zero at .*test_limits.py"),
        (blame, 70, "^error: a fault of ours$"),
        (lambda: json.loads("{"), 70, "nmm itself failed: JSONDecodeError.*report it"),
    ],
)
def test_errors_come_over_as_one_printable_line(work, code, shown):
    ended, said = limited(work, gigabytes=0.25)
    assert ended == code
    assert re.search(shown, said)


@pytest.mark.parametrize(
    ("before", "again", "after"),
    [("x = ", "(", ""), ("x = 1", " + 1", ""), ("x = a", ".b", ""), ("x = ", "not ", "1")],
)
def test_deep_nesting_is_one_finding(before, again, after):
    for times in (400, 3000, 100_000):
        found = lint_source(f"y = 1\n{before}{again * times}{after}\n")
        assert [f.code for f in found] in (["NKI-E001"], [])
    assert found[0].line in (1, 2)


def test_timing_mode_makes_no_data():
    (array,) = arguments_of(["a=99999999x99999999:float32"], data=False).values()
    assert array.shape == (99999999, 99999999)


# Statements of a kernel, and a word of the refusal.
BODIES = [
    ("while True: pass", "--time-limit"),
    ("import sys; sys.exit(0)", "SystemExit"),
    ("import os; os._exit(0)", "exit code 0"),
    ("return 3", "returned int"),
    ("exec('while 1:\\n try: 1/0\\n except BaseException: pass')", "limit"),
    ("x = 10 ** 10 ** 10", "--time-limit"),
    ("import threading; l = threading.Lock(); l.acquire(); l.acquire()", "--time-limit"),
    (
        "import signal, time; signal.pthread_sigmask(0, range(1, 32)); time.sleep(1e6)",
        "--time-limit",
    ),
    ("nl.fori_loop(0, 10**9, lambda i: None)", "limit"),
    ("r = nisa.register_alloc(1); nl.while_loop(r, lambda r: r)", "limit"),
    ("import numpy; numpy.ones(10 ** 12)", "--memory-limit"),
    ("import os; os.abort()", "SIGABRT"),
    ("import os; os.killpg(0, 9)", "ended the process"),
    ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    ("f = lambda: f()\n    f()", "maximum recursion depth exceeded"),
    ("import os; os.closerange(0, 4096)", "ended the process"),
    (
        "import os, time\n    if not os.fork(): time.sleep(10**6)\n    raise ValueError('x')",
        "ValueError",
    ),
    ("import os; os.execv('/bin/true', ['true'])", "exit code 0"),
    ("raise GeneratorExit", "GeneratorExit"),
    ("raise ValueError('a\\nb\\n' * 100)", "ValueError"),
    ("raise ValueError('\\x1b[2J\\x1b]0;gone\\x07')", "ValueError"),
    ("raise ValueError('\\ud800')", "ValueError"),
    ("raise ValueError('[/red][bold')", "ValueError"),
    ("import builtins; builtins.print = None\n    raise ValueError('x')", "ValueError"),
    ("import sys; sys.stdout = sys.stderr = None\n    raise ValueError('x')", "ValueError"),
    ("return type('T', (), {'__class__': nl.ndarray})()", "returned"),
    ("while True: print('x' * 10**5)", "limit"),
]
LIMITS = ("--time-limit=1", "--memory-limit=1")
QUICK = 4  # of them; the rest takes a minute
FILES = {  # what stands at the top of a file, and what `nmm lint` finds
    "import sys\nsys.exit(0)\n": 0,
    "import os\nos._exit(0)\n": 0,
    "while True: pass\n": 0,
    "x = " + "(" * 5000 + "\n": 1,
    "x = 1\0\n": 1,
}


@pytest.mark.parametrize(
    ("body", "shown"),
    [*BODIES[:QUICK], *(pytest.param(*row, marks=pytest.mark.long) for row in BODIES[QUICK:])],
)
def test_a_hostile_kernel_is_refused_on_one_line(tmp_path, nmm, body, shown):
    path = tmp_path / "k.py"
    path.write_text(f"{HEAD}    {body}\n")
    code, _, said = nmm("simulate", path, "--arg", "a=8x8:float32", *LIMITS)
    assert code in (1, 2)  # of the kernel, or past a limit
    assert shown in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("text", "found"), FILES.items())
def test_a_hostile_file_is_refused_and_linted_unread(tmp_path, nmm, text, found):
    path = tmp_path / "k.py"
    path.write_text(text)
    code, _, said = nmm("simulate", path, *LIMITS)
    assert code in (1, 2)
    assert said.count("\n") == 1
    nmm("lint", path, code=found)


@pytest.mark.parametrize("command", ["simulate", "profile"])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return nl.ndarray((256, 4), dtype=a.dtype, buffer=nl.sbuf)", 1),
        ("return 1 / 0", 1),
        ("raise SystemExit(5)", 1),
        ("return a.no_such_name", 1),
        # past a limit: in the simulator where it makes data, else here
        ("nl.ndarray((128, 1 << 20), dtype=a.dtype, buffer=nl.shared_hbm); bytearray(1 << 29)", 2),
    ],
)
def test_an_error_in_a_kernel_ends_with_1(command, body, code, tmp_path, nmm):
    head = "import nki\nimport nki.language as nl\n\n\n@nki.jit\ndef k(a):\n    "
    (tmp_path / "k.py").write_text(f"{head}{body}\n")
    line = (command, f"{tmp_path / 'k.py'}:k", "--arg", "a=8x8:float32", "--memory-limit", "0.02")
    assert nmm(*line, code=code).err.startswith("error: ")


def test_other_errors_of_a_kernel_end_with_2(tmp_path, nmm):
    (tmp_path / "k.py").write_text("def k(a):\n    return a\n")
    file = tmp_path / "k.py"
    limits = [["--time-limit", "0"], ["--memory-limit", "nan"]]
    for words in ([f"{file}:q"], [f"{file}:k", "--arg", "b=1"], *([file, *one] for one in limits)):
        nmm("simulate", *words, code=2)
