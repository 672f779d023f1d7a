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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

_OPERATIONS = ("open", "os.", "shutil.", "tempfile.")
_IDS = torch.arange(12).reshape(2, 6)


def dense(seed: int, layers: int) -> Any:
    """Return a small Llama."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def model(seed: int, layers: int) -> Any:
    """Return a small low-rank Llama."""
    from nmm_compiler.lowrank_models.apply import compress

    made = dense(seed, layers)
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


def attempts(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Kill `count` saves; wrong: another model loads, lost: none does, or other files are gone."""
    generator, models = random.Random(seed), (model(1, 2), model(2, 3))
    expected = [_logits(each) for each in models]
    with tempfile.TemporaryDirectory(prefix="nmm-stress-save-") as name:
        directory = Path(name) / "root" / "model"
        _save(models[0], directory)
        started = time.monotonic()
        os.waitpid(_child(models[1], directory, 0), 0)
        took = time.monotonic() - started
        operations = int((directory.parent / "operations").read_text())
        order = generator.sample(range(1, operations + 1), operations)
        for i in range(count):
            shutil.rmtree(directory.parent)
            directory.parent.mkdir()
            others = directory / "notes" / "mine.txt"
            fresh = i % 4 == 3
            if not fresh:
                _save(models[0], directory)
                others.parent.mkdir()
                others.write_text("kept")
            kill_at = None if i % 3 == 2 else order[(i - i // 3) % operations]
            child = _child(models[1], directory, kill_at)
            where = f"before operation {kill_at} of {operations}"
            if kill_at is None:
                seconds = took * generator.random()
                where = f"after {seconds:.4f} s"
                time.sleep(seconds)
                os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            outcome, fault = _judged(directory, [] if fresh else [others], expected[fresh:])
            yield outcome, f"save killed {where} (status {status}): {fault}"


def _judged(directory: Path, others: list[Path], expected: list[torch.Tensor]) -> tuple[str, str]:
    """Return what became of a save. others: what was there before, beside an old model."""
    from nmm_compiler.errors import NmmError
    from nmm_compiler.lowrank_models.hf import load

    put_aside = next(directory.parent.glob(".model.*/old"), directory)
    if not directory.exists() and put_aside.exists():
        put_aside.rename(directory)
    try:
        found = _logits(load(directory))
        if not any(torch.equal(found, each) for each in expected):
            return "wrong", "another model loads"
    except NmmError as error:
        if others:  # with no old model, none is right
            return "lost", f"no model loads: {error}"
    except Exception as error:  # the user would see it
        return "tracebacks", f"{type(error).__name__}: {error}"
    return ("right", "") if all(map(Path.is_file, others)) else ("lost", "another file is gone")
