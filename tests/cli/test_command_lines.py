"""No command line ends in a traceback: random lines in this process, and the guard itself."""

import errno
import io
import logging
import os
import signal
import stat
import subprocess
import sys
import time

import pytest
import typer

from benchmarks.stress import command_lines
from nmm_compiler.errors import SpecError


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    place = tmp_path_factory.mktemp("lines")
    command_lines.make_workshop(place, with_model=False)
    return place


def _faults(place, seed, count):
    verdicts = list(command_lines.work(place, seed, 0, count))
    assert len(verdicts) == count
    return [": ".join(verdict) for verdict in verdicts if verdict[0] != "right"]


def test_random_lines_of_every_command(workshop):
    assert _faults(workshop, 11, len(command_lines.commands())) == []


def test_what_is_wrong_is_counted(workshop, monkeypatch):
    """The judge itself: a traceback, a fault, silence and damage are all seen."""
    line = {"words": ["doctor"], "environment": {}, "stream": "plain"}
    guarded = command_lines.Guarded(workshop)
    for ended, outcome in (
        ((0, "Traceback (most recent call last)"), "tracebacks"),
        ((70, "error: nmm itself failed"), "tracebacks"),
        ((2, ""), "wrong"),
        ((3, "?"), "wrong"),
        ((0, "error: but nothing happened"), "wrong"),
    ):
        assert command_lines.judge(line, guarded, ended)[0] == outcome
    assert command_lines.judge(line, guarded, (0, "fine")) == ("right", "")
    (workshop / "old.json").write_text("")
    assert command_lines.judge(line, guarded, (0, ""))[0] == "lost"
    (workshop / ".nmm-1.part").write_text("")
    assert command_lines.judge(line, guarded, (0, ""))[0] == "lost"
    (workshop / ".nmm-1.part").unlink()

    def broken(*words):
        raise ZeroDivisionError("deliberate")

    monkeypatch.setattr(typer.core.TyperGroup, "invoke", broken)
    faults = _faults(workshop, 0, 1)
    assert len(faults) == 1
    assert "nmm itself failed: ZeroDivisionError: deliberate" in faults[0]


ARRAYS = ["--arg", "kernel=8x8:float32", "--arg", "b=8x8:float32"]

# The guard: what ends a command, what is said, the exit code.


class Odd(BaseException):
    pass


def _interrupt_behind_a_library():
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        raise ImportError("could not import") from error


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (SpecError("m is 0"), 2, "error: m is 0\n"),
        (KeyboardInterrupt(), 130, "no output file is half-written"),
        (_interrupt_behind_a_library, 130, "interrupted"),
        (SystemExit(0), 2, "a file that this command ran raised SystemExit: 0"),
        (Odd("x"), 2, "a file that this command ran raised Odd: x"),
        (MemoryError("8 TB"), 2, "out of memory (8 TB)"),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), 2, "error: /a: Permission"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (ZeroDivisionError("zero"), 70, "NMM_TRACEBACK=1 nmm doctor 'a b'"),
    ],
)
def test_every_ending_is_one_line_and_a_code(monkeypatch, nmm, error, code, said):
    def ends(*args):
        if callable(error):
            error()
        raise error

    monkeypatch.setattr(typer.core.TyperGroup, "invoke", ends)
    monkeypatch.delenv("NMM_TRACEBACK", raising=False)
    shown = nmm("doctor", "a b", code=code).err
    assert said in shown
    assert shown.count("\n") == (1 if said else 0)
    monkeypatch.setenv("NMM_TRACEBACK", "1")
    shown = nmm("doctor", "a b", traceback=True).err
    assert ("ImportError" if callable(error) else type(error).__name__) in shown


def test_a_user_file_is_named_with_its_line(workshop, monkeypatch, nmm):
    monkeypatch.chdir(workshop)
    for words, said in (
        (["explain", "raises.py:model"], "raises.py:1: it raised: ValueError: at import"),
        (["explain", "leaves.py:model"], "leaves.py:2: it raised: SystemExit: gone"),
        (["explain", "syntax.py:f"], "syntax.py:1: it raised: SyntaxError"),
        (["explain", "model.py:clash"], "running it raised: TypeError"),
        (["export", "model.py:refuses", "-o", "x.mlir"], "cannot trace Refuses: forward"),
        (["explain", "model.py:none"], "none() must return (model, dict of inputs)"),
        (["simulate", "leaves.py"], "leaves.py"),
        (["simulate", "add.py:add", "--arg", "kernel=3", "--arg", "b=3"], "add.py"),
        (["simulate", "add.py", "--arg", "b=1", "--arg", "b=2"], "'b' is given twice"),
        (["simulate", "add.py", "--arg", "b=99999999x99999999:int8"], "nmm profile needs no data"),
        (["simulate", "add.py", "--arg", "b=8x8:object"], "unknown dtype"),
        (["simulate", "add.py", "--arg", "b=@missing.npy"], "missing.npy"),
        (["simulate", "add.py:add", *ARRAYS, "--reference", "missing.py:f"], "missing.py"),
        (["simulate", "add.py", "--arg", f"b={'9' * 5000}x2:float32"], "not like 128x512"),
    ):
        in_a_kernel = said in ("leaves.py", "add.py")
        assert said in nmm(*words, code=1 if in_a_kernel else 2).err
    # any name of a kernel's argument can be given
    nmm("simulate", "add.py", *ARRAYS, code=0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "x", "--html", "."], "cannot write .: it is a directory"),
        (["explain", "x", "--html", "none/x.html"], "cannot write none/x.html"),
        (["explain", "x", "--tokens", "9" * 5000], "is not a whole number from 1"),
        (["explain", "x", "--target", "trn22"], "did you mean 'trn2'"),
        (["plan", "x", "--ratio", "nan"], "'nan' is not a share"),
    ],
)
def test_a_bad_value_is_named_before_any_work(nmm, monkeypatch, words, said):
    monkeypatch.setenv("COLUMNS", "20")
    shown = nmm(*words, code=2).err
    assert f"'{words[2]}'" in shown
    assert said in shown
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1, "a box breaks paths, and a script reads lines"
    assert shown.endswith(f"; nmm {words[0]} --help lists what it takes\n")


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "--fit", "key.json", "--out", "key.json"],
        ["doctor", "--fit", "key.json", "-okey.json"],
        ["plan", "key.json", "--html=./key.json"],
        ["profile", "add.py:add", "--html", "add.py"],
        ["simulate", "raises.py", "--arg", "b=key.json", "--save", "key.json"],
    ],
)
def test_an_input_is_not_written_over(workshop, monkeypatch, nmm, words):
    monkeypatch.chdir(workshop)
    before = {path.name: path.read_bytes() for path in workshop.glob("*.[pj]*") if path.is_file()}
    assert "the command line names it twice" in nmm(*words, code=2).err
    after = {path.name: path.read_bytes() for path in workshop.glob("*.[pj]*") if path.is_file()}
    assert after == before


def test_an_old_output_and_a_device_are_written(workshop, monkeypatch, nmm):
    monkeypatch.chdir(workshop)
    for words in (["--trace", "old.json"], ["--html", "/dev/null", "--trace", "/dev/null"]):
        nmm("profile", "add.py:add", *ARRAYS, *words, code=0)
    assert "traceEvents" in (workshop / "old.json").read_text()
    for words in (["simulate", "add.py:add", *ARRAYS, "--save", "null"],
                  ["build", "specs.jsonl", "--jobs", "1", "--archive", "null"]):  # fmt: skip
        nmm(*words, code=0)
        assert stat.S_ISCHR((workshop / "null").stat().st_mode), "the device was replaced"


# Real processes: what only an interpreter of its own can show.


@pytest.mark.parametrize(
    ("stream", "code", "said"),
    [("full", 2, "standard output, or a connection: No space left"), ("gone", 141, ""),
     ("closed", 0, ""), ("ascii", 0, "\\xe9.py:1:")],
)  # fmt: skip
def test_outputs_of_a_process(tmp_path, stream, code, said):
    (tmp_path / "é.py").write_text(
        "import nki.language as nl\n\n\ndef k():\n    nl.affine_range()\n"
    )
    line = {"words": ["lint", "é.py"], "environment": {}, "stream": stream}
    ended = command_lines.as_process(line, tmp_path)
    assert ended[0] == (1 if code == 0 else code), ended
    assert said.replace("1:", "") in ended[1]
    assert "Traceback" not in ended[1]
    assert "Exception ignored" not in ended[1]


def test_interrupt_of_a_process(tmp_path):
    (tmp_path / "wait.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "nmm_compiler", "simulate", "wait.py"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(command_lines.ROOT)},
        # A shell starts its background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "here\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.startswith("interrupted: no output file is half-written")
    assert "Traceback" not in said


def test_questions_that_are_declined_and_libraries_that_chatter(monkeypatch, nmm):
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert nmm("cache", "clear", code=1).err == "stopped: nothing was changed\n"
    assert not logging.getLogger("torchao.float8").isEnabledFor(logging.WARNING)
    assert not logging.getLogger("torch.utils._pytree").isEnabledFor(logging.WARNING)
    assert logging.getLogger("torchao").isEnabledFor(logging.ERROR)
