"""Writes a page in out/: what each command of nmm prints on a terminal of 80 columns.

    python docs/captures.py              # all commands: some minutes
    python docs/captures.py kernel lint  # these anew, the others as they stand

Each command runs in tmux (apt-get install tmux), in a temporary directory with the small files
below and a kernel cache of its own.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "out" / "screens.md"
WIDTH = 80
INSTALL = "tmux is missing: apt-get install tmux"

HEAD = """# What each command prints

Terminals of 80 columns, captured with tmux by `make captures`. Latencies are simulated; other times
are of the machine that made the page. No word is broken: a path that is wider than the page stands
on a longer line.
"""

MODEL = """
import torch


def make():
    layers = [torch.nn.Linear(256, 64, bias=False), torch.nn.Linear(64, 512), torch.nn.ReLU(),
              torch.nn.Linear(512, 256)]
    return torch.nn.Sequential(*layers), {"input": torch.randn(16, 256)}
"""
WRONG = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def copy(a):
    b = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    try:
        nisa.dma_copy(dst=b, source=a)
    finally:
        return b
"""
CONFIG = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
"intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4000}
"""
SAVE = """
import torch, transformers
import nmm_compiler.cli.models as models
torch.manual_seed(0)
config = transformers.LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, vocab_size=30522, max_position_embeddings=256)
transformers.LlamaForCausalLM(config).save_pretrained("llama")
tokenizer = models.with_weights(models.ENCODER)[1]
tokenizer.eos_token = tokenizer.sep_token
tokenizer.save_pretrained("llama")
"""

SPECS = '{"family": "lowrank", "spec": {"m": 16, "k": 512, "r": 64, "n": 1024}}\n'

ARRAYS = "--arg a=128x4096:bf16 --arg b=128x4096:bf16"
COMMANDS = {
    "demo": "nmm demo --help",
    "kernel": "nmm kernel lowrank --m 64 --k 512 --r 128 --n 1024 --check --schedules",
    "explain": "nmm explain model.py:make",
    "plan": "nmm plan config.json --ratio 0.2 --batch 1,8",
    "build": "nmm build specs.jsonl --search candidates",
    "simulate": f"nmm simulate add.py:add {ARRAYS} --reference add.py:expected",
    "profile": f"nmm profile add.py:add {ARRAYS} --arg block=128,512,2048",
    "lint": "nmm lint wrong.py",
    "compress": "nmm compress llama lowrank --ratio 0.2 --include mlp",
    "eval": "nmm eval --help",
    "export": "nmm export model.py:make -o model.mlir",
    "doctor": "nmm doctor",
    "cache": "NMM_CACHE_DIR=listed nmm cache list",
}
"""One example of each command; the help of those that need a trained model or a device."""


def prepare(folder: Path, *, saved: bool = True) -> None:
    """Write the files that the commands name into a folder. saved: a transformers model, too."""
    tutorial = (ROOT / "docs" / "tutorials" / "kernel.md").read_text(encoding="utf-8")
    kernel = re.search(r"```python\n(# add\.py\n.*?)```", tutorial, re.DOTALL)
    assert kernel is not None, "docs/tutorials/kernel.md has no block that is add.py"
    files = {
        "add.py": kernel[1],
        "model.py": MODEL,
        "wrong.py": WRONG,
        "config.json": CONFIG,
        "specs.jsonl": SPECS,
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if saved:
        command = [sys.executable, "-c", SAVE]
        subprocess.run(command, cwd=folder, env=_environment(folder), check=True)
        for m in (1, 64):
            build = f"nmm kernel lowrank --m {m} --k 512 --r 128 --n 1024"
            places = {**_environment(folder), "NMM_CACHE_DIR": "listed"}
            subprocess.run(shlex.split(build), cwd=folder, env=places, check=True)


def capture(command: str, folder: Path, width: int = WIDTH) -> str:
    """Return what a terminal of `width` columns shows after a command, as text.

    Lines that the terminal had to break are whole again, so that what is wider than it can be seen.
    Raises RuntimeError without tmux.
    """
    found = shutil.which("tmux")
    if found is None:
        raise RuntimeError(INSTALL)
    # A server of its own each time: the one before may still be on its way out.
    tmux = [found, "-L", f"nmm_captures_{time.monotonic_ns()}", "-f", "/dev/null"]
    settings = {**_environment(folder), "TERM": "screen"}
    # Progress and what libraries say while they load go to standard error.
    line = f"{command} 2>/dev/null; {shlex.join([*tmux, 'wait-for', '-S', 'done'])}; sleep 60"
    try:
        start = ["new-session", "-d", "-x", str(width), "-y", "400", "sh", "-c", line]
        subprocess.run([*tmux, *start], cwd=folder, env=settings, check=True)
        subprocess.run([*tmux, "wait-for", "done"], env=settings, check=True, timeout=900)
        shown = subprocess.run(
            [*tmux, "capture-pane", "-p", "-J"], env=settings, check=True, capture_output=True,
            text=True,
        )  # fmt: skip
    finally:
        subprocess.run([*tmux, "kill-server"], env=settings, check=False, capture_output=True)
    return "\n".join(line.rstrip() for line in shown.stdout.rstrip().splitlines())


def wide_lines(text: str, width: int = WIDTH) -> list[str]:
    """Return the lines that are wider than the terminal without a reason.

    Two have one: a line with a long path, and a finding of `nmm lint`, which is one line so that
    editors can jump to its place.
    """
    wide = [line for line in text.splitlines() if len(line) > width]
    findings = re.compile(r"\S+:\d+:\d+ NKI-")
    return [n for n in wide if not findings.match(n) and not _holds_a_long_path(n, width)]


def _holds_a_long_path(line: str, width: int) -> bool:
    indent = len(line) - len(line.lstrip())
    paths = [word for word in line.split() if "/" in word]
    others = [word for word in line.split() if "/" not in word]
    return any(len(path) + indent > width - 20 for path in paths) and len(" ".join(others)) < width


def _environment(folder: Path) -> dict[str, str]:
    home = {"HOME": str(folder), "NMM_CACHE_DIR": "cache", "PYTHONPATH": str(ROOT)}
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return {**home, **quiet, "PATH": path, "LANG": "C.UTF-8"}


def sections(page: str) -> dict[str, str]:
    """Return what a page shows of each command."""
    found = re.findall(r"^## nmm (\S+)\n\n```text\n\$ .*?\n(.*?)\n?```$", page, re.S | re.M)
    return dict(found)


def main(wanted: list[str]) -> int:
    """Write the page; 2 without tmux or for a name that is no command."""
    unknown = set(wanted) - set(COMMANDS)
    if shutil.which("tmux") is None or unknown:
        print(INSTALL if not unknown else f"no command {', '.join(unknown)}", file=sys.stderr)
        return 2
    shown = sections(PAGE.read_text(encoding="utf-8")) if wanted and PAGE.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="nmm") as temporary:
        folder = Path(temporary)
        prepare(folder)
        for name, command in COMMANDS.items():
            if wanted and name not in wanted:
                continue
            print(command, flush=True)
            shown[name] = capture(command, folder).replace(temporary, "/home/you")
            for line in wide_lines(shown[name]):
                print(f"  wider than {WIDTH} columns: {line}")
    made = [f"## nmm {name}\n\n```text\n$ {command}\n{shown[name]}\n```\n"
            for name, command in COMMANDS.items() if name in shown]  # fmt: skip
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join([HEAD, *made]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
