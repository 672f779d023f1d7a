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
import errno
import io
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

from benchmarks.stress.tally import Tally

ROOT = Path(__file__).resolve().parents[2]
SECONDS_A_LINE = 60
LINES_A_WORKER = 500
PROCESS_SHARE = 100  # one line in so many is a real process

KERNEL = """import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def add(kernel, b):
    out = nl.ndarray(kernel.shape, dtype=kernel.dtype, buffer=nl.shared_hbm)
    left = nl.ndarray(kernel.shape, dtype=kernel.dtype, buffer=nl.sbuf)
    right = nl.ndarray(kernel.shape, dtype=kernel.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=left, src=kernel)
    nisa.dma_copy(dst=right, src=b)
    nisa.tensor_tensor(dst=left, data1=left, data2=right, op=nl.add)
    nisa.dma_copy(dst=out, src=left)
    return out
"""
MODEL = """import torch


def model():
    low = torch.nn.Sequential(torch.nn.Linear(16, 2, bias=False), torch.nn.Linear(2, 8))
    return low, {"input": torch.randn(4, 16)}


def none():
    return None


def clash():
    return torch.nn.Linear(2, 2), {"model": 1, "options": 2}


def leave():
    raise SystemExit(3)


class Refuses(torch.nn.Module):
    def forward(self, x):
        raise LookupError("forward")


def refuses():
    return Refuses(), {"x": torch.ones(2)}


value = 3
"""
RAISING = {
    "raises": "raise ValueError('at import')\n",
    "leaves": "import sys\nsys.exit('gone')\n",
    "syntax": "def f(:\n",
    "deep": "def model():\n    return model()\n\n\ndef add(b):\n    return add(b)\n",
    "odd": "class Odd(BaseException):\n    pass\n\n\nraise Odd(b'\\xff')\n",
    "mute": "import sys\n\n\ndef add(kernel, b):\n    sys.stdout.close()\n\n\nmodel = add\n",
}
INPUTS = (
    *(f"{name}.py" for name in RAISING), "add.py", "model.py", "latin.py", "nul.py", "text.txt",
    "key.json", "deep.json", "noise.tar", "directory", "none.py",
)  # fmt: skip
BAD = (
    "", " ", "-1", "0", "-0", "1", "3.5", "nan", "inf", "-inf", "1e400", "9" * 30, "9" * 5000,
    "0x10", "1_0", "٣", "²", "true", "None", "=", "a=b", "a:b", ":", "::", "x", "[red]",
    "[/red]", "{}", "\\", "'", '"', "*", "/proc", "-", "--", "~", "~nobody_here/x", "$HOME", "é",
    "\udcff", "\u202e", "\x1b[31m", "a\nb", "x" * 300, "x/" * 3000, "null", "full",
    "/proc/self/mem", "null/x", "directory", "none/none", "empty", "trn22", "--json", "--help",
)  # fmt: skip
SMALL = ("1", "8", "16", "64", "128")
OUTPUTS = ("new.json", "old.json", "made/new.json", "null", "full", "directory", "link")
GOOD: dict[str, tuple[str, ...]] = {
    "family": ("lowrank", "lowrank_shared", "matmul", "gated_mlp_up", "gated_mlp"),
    "m": SMALL, "k": SMALL, "n": SMALL, "r": SMALL, "align": SMALL, "batch": SMALL,
    "length": SMALL, "tokens": SMALL, "rank": SMALL, "recover_steps": ("0", "1"), "seed": SMALL,
    "grid": ("1", "2"), "max_bytes": ("0", "100000"), "ratio": ("0", "0.2", "0.999"),
    "target": ("trn1", "trn2", "trn3"), "mode": ("full", "functional", "timing"),
    "pairs": ("16:64", "16:64,32"), "dtype": ("bfloat16", "float16", "float32", "float8_e4m3"),
    "scales": ("tensor", "channel"), "intermediate": ("operand", "float32", "float8_e4m3"),
    "x_layout": ("row", "col"), "out_layout": ("row", "col"), "activation": ("gelu", "silu"),
    "field": ("bias=true", "scale=2", "m=8", "u_layout=col", "scale=nan", "bias=3", "pairs=1,2"),
    "kernel": ("add.py:add", "add.py", *(f"{name}.py:add" for name in RAISING), "model.py:value"),
    "arg": ("kernel=128x64:float32", "b=128x64:float32", "b=3", "kernel=8x8:bfloat16", "mode=1"),
    "files": INPUTS, "nki": ("0.6", "0.5", "0.3"), "trace": OUTPUTS, "out": OUTPUTS,
    "model": ("model.py:model", *(f"model.py:{name}" for name in
              ("none", "clash", "leave", "refuses", "value", "nope")),
              *(f"{name}.py:model" for name in RAISING), "directory", "broken"),
    "model_dir": ("tiny", "directory", "broken"),
    "out_dir": ("made/model", "old.json", "directory"),
    "json": OUTPUTS, "plot": ("new.png", *OUTPUTS), "output": ("new.mlir", *OUTPUTS),
    "text": INPUTS, "config": INPUTS, "resume": ("made/journal", "directory", "old.json"),
    "include": ("0", "*", "["), "exclude": ("0", "*", "["), "method": ("svd", "whitened", "auto"),
    "allocation": ("auto", "uniform", "global"), "sensitivity": ("gradient", "output"),
    "budget": ("parameters", "latency"), "dialect": ("torch", "linalg", "stablehlo"),
    "kernels": ("call", "inline"), "weights": ("args", "resources"),
    "directory": ("cache", "made/cache", "directory", "empty", "null"),
    "entry": ("0", "a", ""),
    "key": ("key.json", "deep.json", "directory", "-"), "prefix": ("", "0", "zz"),
    "path": ("new.tar", "new.tar.gz", "noise.tar", "text.txt", "directory", "full"),
    "cache export path": ("new.tar", "new.tar.gz", "old.json", "directory", "full"),
}  # fmt: skip
ENVIRONMENT = {
    "NMM_CACHE": ("nonsense", "ro", "off", "require", "²"),
    "NMM_CACHE_DIR": ("empty", "null", "/proc/none", "relative", "x" * 300, "x/" * 3000),
    "NMM_CACHE_MAX_BYTES": ("-1", "1e9", "9" * 5000, "nan", "٣", "0"),
    "NMM_REMOTE_CACHE": ("nonsense://x", "::", "directory", "file:///proc/none", "http://[::1"),
    "NMM_NONSENSE": ("1",),
    "COLUMNS": ("abc", "0", "-5", "1", "²", "999999999", "7"),
    "LINES": ("abc", "²", "0"),
    "TERMINAL_WIDTH": ("abc", "0"),
    "TERM": ("dumb", "", "nonsense"),
    "FORCE_COLOR": ("1",),
    "TTY_COMPATIBLE": ("nonsense",),
    "LANG": ("C", "nonsense"),
}
PROCESS_ENVIRONMENT = {
    **ENVIRONMENT,
    "PYTHONIOENCODING": ("ascii", "latin-1", "utf-16"),
    "PYTHONUTF8": ("0",),
    "PYTHONWARNINGS": ("nonsense",),
    "HOME": ("/nonexistent", "/dev/null"),
}
# Devices of the workshop's own: a line that replaced one of /dev would harm the whole machine.
DEVICES = {"null": 3, "full": 7}
STREAMS = ("plain",) * 12 + ("ascii", "full", "gone", "closed")
# A line that nothing is wrong with would run for half a minute.
ALWAYS = {"demo": ("--target", "trn9")}


def command_names() -> list[str]:
    """Return every command as typed, "kernel" or "cache list"."""
    return sorted(_commands())


def _commands() -> dict[str, Any]:
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


def lines(seed: int, count: int, only: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield `count` attempts: words, environment, kind of output; the same for the same seed."""
    choose = random.Random(seed)
    commands = _commands()
    names = sorted(commands) if only is None else [only]
    for number in range(count):
        name = names[number % len(names)]
        words = _words(choose, name, commands[name])
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
        likely = 0.95 if parameter.required or parameter.name in ("r", "n", "arg") else 0.15
        for _ in range(choose.choice((1, 2, 3)) if parameter.multiple else 1):
            if choose.random() > likely:
                continue
            option = [choose.choice([*parameter.opts, *parameter.secondary_opts])]
            if not parameter.is_flag:
                option.append(_value(choose, name, parameter.name, wrong))
            options.append(option)
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
    for name, text in {"add": KERNEL, "model": MODEL, **RAISING}.items():
        (place / f"{name}.py").write_text(text)
    (place / "latin.py").write_bytes(b"x = '\xe9'\n")
    (place / "nul.py").write_bytes(b"x = 1\0\n")
    (place / "text.txt").write_text("one line of text\n" * 40)
    (place / "key.json").write_text('{"family": "toy", "spec": {"m": 8}}')
    (place / "deep.json").write_text("[" * 100_000)
    (place / "noise.tar").write_bytes(b"noise" * 500)
    (place / "link").symlink_to("old.json")
    for name, number in DEVICES.items():
        try:
            os.mknod(place / name, stat.S_IFCHR | 0o666, os.makedev(1, number))
        except PermissionError:  # a user who cannot make a device cannot replace one either
            (place / name).symlink_to(f"/dev/{name}")
    (place / "directory").mkdir()
    (place / "broken").mkdir()
    (place / "broken" / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    (place / "cache").mkdir(mode=0o700)
    if with_model:
        with contextlib.suppress(ImportError):  # compress then says which package is missing
            _save_tiny_model(place / "tiny")


def _save_tiny_model(directory: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


class _Broken(io.RawIOBase):
    """An output that refuses every byte: a full disk or a pipe without a reader."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.null = open(os.devnull, "w")  # noqa: SIM115  # rich points the descriptor elsewhere

    def fileno(self) -> int:
        return self.null.fileno()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(self.number, os.strerror(self.number))


class TooSlow(BaseException):
    """A line ran past the limit."""


_kept: list[Any] = []


def _errors() -> Any:
    """Return an empty error stream, the same one for each line as long as no line closes it.

    The log handlers of libraries that a line imports keep the stream of that moment.
    """
    if not _kept or _kept[-1].closed:
        _kept.append(io.TextIOWrapper(io.BytesIO(), errors="backslashreplace"))
    _kept[-1].buffer.seek(0)
    _kept[-1].buffer.truncate()
    return _kept[-1]


def run_here(words: Sequence[str], environment: dict[str, str], stream: str) -> tuple[Any, str]:
    """Run one line in this process, in the current directory; return (exit code, all output)."""
    from nmm_compiler.cli.main import main

    wanted = {"full": errno.ENOSPC, "gone": errno.EPIPE}.get(stream)
    raw: Any = io.BytesIO()
    out = io.TextIOWrapper(
        io.BufferedWriter(_Broken(wanted), 64) if wanted else raw,
        encoding="ascii" if stream == "ascii" else "utf-8",
    )
    errors = _errors()
    said = errors.buffer
    before = sys.stdin, sys.stdout, sys.stderr, dict(os.environ), os.getcwd()
    sys.stdin = io.TextIOWrapper(io.BytesIO(b"{}"))
    sys.stdout, sys.stderr = out, errors
    if stream == "closed":
        sys.stdout = None  # type: ignore[assignment]  # as Python starts with a closed descriptor
    os.environ.update(environment)
    code: Any = None
    try:
        main(list(words))
    except SystemExit as ended:
        code = ended.code
    finally:
        with contextlib.suppress(OSError, ValueError):
            errors.flush()
        with contextlib.suppress(OSError, ValueError):
            out.flush()
        sys.stdin, sys.stdout, sys.stderr = before[:3]
        os.environ.clear()
        os.environ.update(before[3])
        os.chdir(before[4])
    written = b"".join(stream.getvalue() for stream in (said, raw) if not stream.closed)
    # A wrapper that is collected would flush and close its stream.
    with contextlib.suppress(OSError, ValueError):
        out.detach()
    return code, written.decode("utf-8", "replace")


def fault(code: Any, said: str) -> tuple[str, str] | None:
    """Return (field of the tally, why) for an ending that is not documented, else None."""
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


def judge(line: dict[str, Any], guarded: Guarded, ended: tuple[Any, str]) -> dict[str, str]:
    """Return {} for a right ending, else the field of the tally and the example."""
    found = fault(*ended)
    damage = guarded.damage()
    if damage is not None:
        found = ("lost", damage)
    guarded.restore()
    return {} if found is None else {"field": found[0], "example": f"{_shown(line)}: {found[1]}"}


def work(place: Path, seed: int, start: int, stop: int, only: str | None = None) -> Iterator[dict]:
    """Run lines number `start` to `stop` of a seed here; yield a verdict for each."""

    def too_slow(number: int, frame: Any) -> None:
        raise TooSlow

    before, home = signal.signal(signal.SIGALRM, too_slow), os.getcwd()
    os.chdir(place)
    guarded = Guarded(place)
    try:
        for number, line in enumerate(lines(seed, stop, only)):
            if number < start:
                continue
            signal.alarm(SECONDS_A_LINE)
            ended = run_here(line["words"], line["environment"], line["stream"])
            signal.alarm(0)
            yield judge(line, guarded, ended)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        os.chdir(home)


def as_process(line: dict[str, Any], place: Path) -> tuple[Any, str]:
    """Run one line as a user's shell does; return (exit code, all output)."""
    command = [sys.executable, "-m", "nmm_compiler.cli.main", *line["words"]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **line["environment"]}
    if line["stream"] == "ascii":
        environment["PYTHONIOENCODING"] = "ascii"
    with open("/dev/full", "w") as full, tempfile.TemporaryFile() as said:
        if line["stream"] == "gone":
            reader, writer = os.pipe()
            os.close(reader)
            out: Any = writer
        elif line["stream"] == "closed":
            command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
            out = None
        else:
            out = {"plain": said, "ascii": said, "full": full}[line["stream"]]
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=said, cwd=place,
                env=environment, timeout=4 * SECONDS_A_LINE, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = "too slow"
        finally:
            if line["stream"] == "gone":
                os.close(writer)
        said.seek(0)
        return code, said.read().decode("utf-8", "replace")


def _add(tally: Tally, verdict: dict[str, str]) -> None:
    tally.attempts += 1
    if not verdict:
        tally.right += 1
        return
    setattr(tally, verdict["field"], getattr(tally, verdict["field"]) + 1)
    tally.examples.append(verdict["example"])


def attempt(count: int = 3000, seed: int = 0) -> Tally:
    """Run `count` command lines, one in PROCESS_SHARE as a real process; return the counts."""
    tally = Tally()
    processes = max(1, count // PROCESS_SHARE)
    with tempfile.TemporaryDirectory(prefix="nmm-lines-") as name:
        place = Path(name)
        make_workshop(place)
        start, here = 0, count - processes
        while start < here:
            stop = min(here, start + LINES_A_WORKER)
            done = _worker(place, seed, start, stop)
            for verdict in done:
                _add(tally, verdict)
            start += len(done)
            if start < stop:  # the worker died of line number `start`
                line = list(lines(seed, start + 1))[start]
                _add(tally, {"field": "wrong", "example": f"{_shown(line)}: the process died"})
                start += 1
        guarded = Guarded(place)
        choose = random.Random(seed)
        for line in lines(seed + 1, processes):
            variable = choose.choice(sorted(PROCESS_ENVIRONMENT))
            line["environment"] = {variable: choose.choice(PROCESS_ENVIRONMENT[variable])}
            _add(tally, judge(line, guarded, as_process(line, place)))
    return tally


def _worker(place: Path, seed: int, start: int, stop: int) -> list[dict[str, str]]:
    """Run lines in a process of their own; return the verdicts that it came to."""
    program = "from benchmarks.stress.command_lines import worker; worker()"
    given = [str(place), str(seed), str(start), str(stop)]
    done = subprocess.run(
        [sys.executable, "-c", program, *given], cwd=ROOT, stdout=subprocess.PIPE, check=False,
        stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NMM_CACHE_DIR": str(place / "cache")},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def worker() -> None:
    """Print the verdicts of the lines that the arguments name, one JSON object a line."""
    place, seed, start, stop = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    out = os.fdopen(os.dup(1), "w")  # the lines may close standard output
    for verdict in work(place, seed, start, stop):
        out.write(json.dumps(verdict) + "\n")
        out.flush()
