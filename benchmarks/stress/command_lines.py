"""Random command lines of every `nmm` command: each must end in a way that is documented.

The options come from the commands themselves, so a new option is tried without a change here. Half
of the values are good ones, the others are wrong in kind, size, encoding or place; some lines run
under a broken environment or write to a full or closed output. Lines run in worker processes
through `main`, which is what the entry point calls, and a sample runs as real processes.

Right: exit code 0, 1, 2 or 141, and a line on stderr with 2. Wrong: another code, no line, a run
past the time limit, a crash. Traceback: one on any stream, or exit code 70 (a fault of nmm itself).
Lost: an input that changed, an output file left half-written, a device replaced by a file.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.stress.line_values import (
    ALWAYS,
    BAD,
    DEVICES,
    ENVIRONMENT,
    FIELDS,
    FILES,
    GOOD,
    INPUTS,
    OUTPUT_NAMES,
    PROCESS_ENVIRONMENT,
    STREAMS,
)
from benchmarks.stress.processes import ROOT, Verdict, verdicts_of
from benchmarks.stress.save import dense

Verdicts = Iterator[Verdict]
SECONDS_A_LINE = 60
LINES_A_WORKER = 500
PROCESS_SHARE = 100  # one line in so many is a real process


def commands() -> dict[str, Any]:
    """Return every command as typed, "kernel" or "cache list"."""
    import typer

    from nmm_compiler.cli.commands import app

    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        if inner is None:
            found[name] = command
        else:
            found.update({f"{name} {sub}": one for sub, one in inner.items()})
    return found


def lines(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` attempts: words, environment, kind of output; the same for the same seed."""
    choose = random.Random(seed)
    known = commands()
    names = sorted(known)
    for number in range(count):
        name = names[number % len(names)]
        words = _words(choose, name, known[name])
        variables = choose.sample(sorted(ENVIRONMENT), choose.choice((0, 0, 0, 1, 2)))
        environment = {v: choose.choice(ENVIRONMENT[v]) for v in variables}
        stream = choose.choice(STREAMS)
        yield {"words": words, "environment": environment, "stream": stream}


def _words(choose: random.Random, name: str, command: Any) -> list[str]:
    positional: list[str] = []
    options: list[list[str]] = []
    wrong = choose.choice((0.0, 0.1, 0.5))
    for parameter in command.params:
        if parameter.name == "help":
            continue
        if not parameter.opts[0].startswith("-"):
            for _ in range(choose.choice((1, 1, 1, 2)) if parameter.nargs == -1 else 1):
                if choose.random() > wrong / 5:
                    positional.append(_value(choose, name, parameter.name, wrong))
            continue
        likely = 0.95 if parameter.required or parameter.name == "arg" else 0.15
        for _ in range(choose.choice((1, 2, 3)) if parameter.multiple else 1):
            if choose.random() > likely:
                continue
            option = [choose.choice([*parameter.opts, *parameter.secondary_opts])]
            if not parameter.is_flag:
                option.append(_value(choose, name, parameter.name, wrong))
                inputs = {word.partition(":")[0] for word in positional} & set(INPUTS)
                if parameter.name in OUTPUT_NAMES and inputs and choose.random() < 0.1:
                    option[-1] = min(inputs)
            options.append(option)
    for field in FIELDS if name == "kernel" else ():
        if choose.random() < (0.9 if field in ("m", "k", "n", "r") else 0.15):
            flag = f"--{field.replace('_', '-')}"
            options.append([flag, _value(choose, name, field, wrong)])
    if choose.random() < wrong / 4:
        options.append([choose.choice(("--nonsense", "-z", "--json", "--", "--help", "--seed"))])
    choose.shuffle(options)
    parts = [[word] for word in positional] + options
    if choose.random() < 0.3:
        choose.shuffle(parts)
    words = [*name.split(), *(word for part in parts for word in part), *ALWAYS.get(name, ())]
    if choose.random() < wrong / 20:
        words[choose.randrange(len(words))] = choose.choice(BAD)
    return words


def _value(choose: random.Random, command: str, name: str, wrong: float) -> str:
    good = GOOD.get(f"{command} {name}") or GOOD.get(name)
    if good is None or choose.random() < wrong:
        return choose.choice(BAD)
    return choose.choice(good)


def make_workshop(place: Path, with_model: bool = True) -> None:
    """Fill an empty directory with the files that the lines name; the model takes a few seconds."""
    for name, text in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(text.encode("latin-1"))
    (place / "link").symlink_to("old.json")
    (place / "directory").mkdir()
    (place / "cache").mkdir(mode=0o700)
    for name, number in DEVICES.items():
        try:
            os.mknod(place / name, stat.S_IFCHR | 0o666, os.makedev(1, number))
        except PermissionError:  # a user who cannot make a device cannot replace one either
            (place / name).symlink_to(f"/dev/{name}")
    if with_model:
        with contextlib.suppress(ImportError):  # compress then says which package is missing
            dense(0, 1).save_pretrained(place / "tiny")
        _save_verdicts(place / "verdicts.json", place / "mine.json")


def _save_verdicts(path: Path, target: Path) -> None:
    """Write the verdicts of a device that is a fifth slower than predicted, and its target."""
    from nmm_compiler import targets
    from nmm_compiler.device import ladder
    from nmm_compiler.device.ladder import calibrate
    from nmm_compiler.runtime import machine

    timed = [rung for rung in ladder.RUNGS if not rung.compiled]
    predicted = [(rung, ladder.predicted_us(rung, targets.get("trn2"))) for rung in timed]
    verdicts = tuple(
        ladder.Verdict(rung=rung.name, construct=rung.construct, verdict="passed", time_us=1.2 * us)
        for rung, us in predicted if us is not None
    )  # fmt: skip
    found = ladder.Ladder(
        executor="neuron", target="trn2", machine=machine.probe(), verdicts=verdicts
    )
    path.write_text(json.dumps(found.to_dict()))
    target.write_text(json.dumps(calibrate(path).file()))


def _output(stream: str) -> int:
    """Return what a line writes its output to: a file, a full disk, or a pipe without a reader."""
    if stream == "full":
        return os.open("/dev/full", os.O_WRONLY)
    if stream == "gone":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    return os.memfd_create("output")


def _written(file: int) -> str:
    """Close a file that `_output` made and return its text."""
    with contextlib.suppress(OSError), open(file, "rb") as written:
        written.seek(0)  # a pipe and a full disk refuse
        return written.read().decode("utf-8", "replace")
    return ""


class TooSlow(BaseException):
    """A line ran past the limit."""


def run_here(words: Sequence[str], environment: dict[str, str], stream: str) -> tuple[Any, str]:
    """Run one line in this process, in the current directory; return (exit code, all output)."""
    from nmm_compiler.cli.main import main

    file, code = _output(stream), None
    said = os.memfd_create("said")
    # a line may close its streams
    out = open(os.dup(file), "w", encoding="ascii" if stream == "ascii" else "utf-8")  # noqa: SIM115
    errors = open(os.dup(said), "w", errors="backslashreplace")  # noqa: SIM115
    with (
        mock.patch.dict(os.environ, environment),
        contextlib.chdir("."),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}"))),
        # None: as Python starts with it closed
        contextlib.redirect_stdout(None if stream == "closed" else out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main(list(words))
        except SystemExit as ended:
            code = ended.code
        finally:
            for one in (errors.flush, out.close):
                with contextlib.suppress(OSError, ValueError):
                    one()
    return code, _written(said) + _written(file)


def fault(code: Any, said: str) -> tuple[str, str] | None:
    """Return (outcome, why) for an ending that is not documented, else None."""
    if "TooSlow" in said:
        return "wrong", f"ran past {SECONDS_A_LINE} s"
    if "Traceback (most recent call last)" in said or code == 70:
        found = [line for line in said.splitlines() if "nmm itself failed" in line]
        return "tracebacks", (found or said.splitlines()[-1:] or [""])[0]
    if code not in (0, 1, 2, 141):
        return "wrong", f"exit code {code!r}: {said[-300:]}"
    if code == 2 and not said.strip():
        return "wrong", "exit code 2 without a word"
    if code == 0 and "\nerror:" in f"\n{said}":
        return "wrong", f"exit code 0 with an error: {said[-300:]}"
    return None


class Guarded:
    """What no line may touch: the inputs, the old output file, the devices."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.restore()
        self.bytes = {name: self._read(name) for name in INPUTS}

    def _read(self, name: str) -> bytes | None:
        path = self.place / name
        return path.read_bytes() if path.is_file() else None

    def restore(self) -> None:
        """Put the old output file back, and remove what lines have made."""
        (self.place / "old.json").write_text("old")
        (self.place / "empty").write_text("")  # a line may name it as its output
        for name in ("made", "new.json", "new.png", "new.mlir", "new.tar", "new.tar.gz"):
            path = self.place / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def damage(self) -> str | None:
        """Return what is gone or half-written since `restore`, or None."""
        changed = [name for name, data in self.bytes.items() if self._read(name) != data]
        if changed:
            return f"changed: {', '.join(changed)}"
        if not self._read("old.json"):
            return "the old output file is empty or gone"
        for name in DEVICES:
            if not stat.S_ISCHR((self.place / name).stat().st_mode):
                return f"{name} was replaced"
        left = [path.name for path in self.place.rglob("*.part")]
        return f"left behind: {', '.join(left)}" if left else None


def _shown(line: dict[str, Any]) -> str:
    variables = [f"{k}={v[:60]}" for k, v in line["environment"].items()]
    return ascii(
        shlex.join([*variables, "nmm", *(word[:100] for word in line["words"])])
        + ("" if line["stream"] == "plain" else f"  (output {line['stream']})")
    )


def judge(line: dict[str, Any], guarded: Guarded, ended: tuple[Any, str]) -> tuple[str, str]:
    """Return what a line came to, and the line with the reason where that is not right."""
    found = fault(*ended)
    damage = guarded.damage()
    if damage is not None:
        found = ("lost", damage)
    guarded.restore()
    return (found[0], f"{_shown(line)}: {found[1]}") if found else ("right", "")


def work(place: str | Path, seed: int, start: int, stop: int) -> Verdicts:
    """Run lines number `start` to `stop` of a seed here; yield a verdict for each."""

    def too_slow(number: int, frame: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, too_slow)
    guarded = Guarded(Path(place))
    try:
        with contextlib.chdir(place):
            for line in itertools.islice(lines(seed, stop), start, None):
                signal.alarm(SECONDS_A_LINE)
                ended = run_here(**line)
                signal.alarm(0)
                yield judge(line, guarded, ended)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def as_process(line: dict[str, Any], place: Path) -> tuple[Any, str]:
    """Run one line as a user's shell does; return (exit code, all output)."""
    command = [sys.executable, "-m", "nmm_compiler", *line["words"]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **line["environment"]}
    if line["stream"] == "ascii":
        environment["PYTHONIOENCODING"] = "ascii"
    if line["stream"] == "closed":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    out, said = _output(line["stream"]), os.memfd_create("said")
    plain = line["stream"] in ("plain", "ascii")
    try:
        code: Any = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=said if plain else out, stderr=said,
            cwd=place, env=environment, timeout=4 * SECONDS_A_LINE, check=False,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        code = "too slow"
    os.close(out)
    return code, _written(said)


def attempts(count: int = 3000, seed: int = 0) -> Verdicts:
    """Run `count` command lines, one in PROCESS_SHARE as a real process."""
    processes = max(1, count // PROCESS_SHARE)
    with tempfile.TemporaryDirectory(prefix="nmm-lines-") as name:
        place = Path(name)
        make_workshop(place)
        start, here = 0, count - processes
        while start < here:
            stop = min(here, start + LINES_A_WORKER)
            done, _ = verdicts_of(
                __name__, "work", (name, seed, start, stop), NMM_CACHE_DIR=str(place / "cache")
            )
            yield from done
            start += len(done)
            if start < stop:  # the worker died of line number `start`
                line = list(lines(seed, start + 1))[start]
                yield "wrong", f"{_shown(line)}: the process died"
                start += 1
        guarded = Guarded(place)
        choose = random.Random(seed)
        for line in lines(seed + 1, processes):
            variable = choose.choice(sorted(PROCESS_ENVIRONMENT))
            line["environment"] = {variable: choose.choice(PROCESS_ENVIRONMENT[variable])}
            yield judge(line, guarded, as_process(line, place))
