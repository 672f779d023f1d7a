"""Kills a process at every point of a sharded save, and looks at what is left.

Each attempt forks a child that saves a new model over an old one (every fourth: into no directory).
The child is killed by SIGKILL: either it kills itself before its k-th file operation, as Python's
audit events count them, or this process kills it after a random share of the time that a save
takes, which also hits the middle of writes that Python does not see. Then the directory must load
as exactly the old or the new model, with its other files; after a kill between the two renames, it
must do so from where the old one was put.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.stress.tally import Tally

_OPERATIONS = ("open", "os.", "shutil.", "tempfile.")
_IDS = torch.arange(12).reshape(2, 6)


def model(seed: int, layers: int) -> Any:
    """Return a small low-rank Llama."""
    import transformers

    from nmm_compiler.lowrank_models.apply import compress

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        vocab_size=64,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    compress(made, 0.2 + 0.1 * seed, align=4)
    return made


def _save(made: Any, directory: Path) -> None:
    from nmm_compiler.lowrank_models import hf

    hf.save(made, directory, max_shard_size="60KB", files={"report.json": "{}"})


def _logits(made: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = made(_IDS).logits
    return found


def _child(made: Any, directory: Path, kill_at: int | None) -> int:
    """Fork a child that saves, and kills itself before its file operation number kill_at."""
    child = os.fork()
    if child:
        return child
    seen = 0

    def hook(event: str, _: tuple[Any, ...]) -> None:
        nonlocal seen
        if event.startswith(_OPERATIONS):
            seen += 1
            if seen == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    code = 1
    try:
        _save(made, directory)
        code = 0
        if kill_at == 0:
            (directory.parent / "operations").write_text(str(seen))
    finally:
        os._exit(code)


def attempt(count: int, seed: int) -> Tally:
    """Kill `count` saves; wrong: another model loads, lost: none does, or other files are gone."""
    generator, tally = random.Random(seed), Tally()
    old, new = model(1, 2), model(2, 3)
    expected = [_logits(old), _logits(new)]
    root = Path(tempfile.mkdtemp(prefix="nmm-stress-save-"))
    try:
        _save(old, root / "model")
        started = time.monotonic()
        os.waitpid(_child(new, root / "model", 0), 0)
        took = time.monotonic() - started
        operations = int((root / "operations").read_text())
        order = list(range(1, operations + 1))
        generator.shuffle(order)
        for i in range(count):
            shutil.rmtree(root)
            root.mkdir()
            _one(i, root, (old, new), expected, order, took, generator, tally)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return tally


def _one(
    i: int,
    root: Path,
    models: tuple[Any, Any],
    expected: list[torch.Tensor],
    order: list[int],
    took: float,
    generator: random.Random,
    tally: Tally,
) -> None:
    from nmm_compiler.errors import NmmError
    from nmm_compiler.lowrank_models.load import load

    directory, fresh = root / "model", i % 4 == 3
    if not fresh:
        _save(models[0], directory)
        (directory / "notes").mkdir()
        (directory / "notes" / "mine.txt").write_text("kept")
    if i % 3 == 2:
        where = f"after {took * generator.random():.4f} s"
        child = _child(models[1], directory, None)
        time.sleep(float(where.split()[1]))
        os.kill(child, signal.SIGKILL)
    else:
        kill_at = order[(i - i // 3) % len(order)]
        where = f"before operation {kill_at} of {len(order)}"
        child = _child(models[1], directory, kill_at)
    _, status = os.waitpid(child, 0)
    tally.attempts += 1
    fault = ""
    aside = next(root.glob(".model.*/old"), directory)
    if not directory.exists() and aside.exists():
        aside.rename(directory)
    try:
        found = _logits(load(directory))
        if not any(torch.equal(found, each) for each in expected[fresh:]):
            tally.wrong, fault = tally.wrong + 1, "another model loads"
    except NmmError as error:
        if not fresh:  # with no old model, none is right
            tally.lost, fault = tally.lost + 1, f"no model loads: {error}"
    except Exception as error:
        tally.tracebacks, fault = tally.tracebacks + 1, f"{type(error).__name__}: {error}"
    if not fault and not fresh and not (directory / "notes" / "mine.txt").is_file():
        tally.lost, fault = tally.lost + 1, "another file is gone"
    if fault:
        tally.examples.append(f"save killed {where} (status {status}): {fault}")
    else:
        tally.right += 1
