"""Kernel text for tests of NKI Beta 1: a few lines of body become a file that imports neuronxcc."""

from __future__ import annotations

import hashlib
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from nmm_compiler.simulator.run import Simulation, simulate

HEADER = """\
import neuronxcc.nki as nki
import neuronxcc.nki.compiler as ncc
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
import numpy as np
from neuronxcc.nki.language import par_dim


def out(tile, dtype=None):
    result = nl.ndarray(tile.shape, dtype=dtype or tile.dtype, buffer=nl.shared_hbm)
    nl.store(result, tile)
    return result


"""


_FOLDER = Path(tempfile.mkdtemp(prefix="nmm-beta1-"))


def kernel_file(text: str) -> Path:
    """Write kernel text to a file of its own."""
    path = _FOLDER / f"kernel_{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
    path.write_text(text)
    return path


def run(body: str, *arrays: Any, names: str = "abcdefgh", **options: Any) -> Simulation:
    """Run `body` as a Beta 1 kernel whose arguments are a, b, c, ..."""
    arguments = ", ".join(names[: len(arrays)])
    lines = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    text = f"{HEADER}@nki.jit\ndef kernel({arguments}):\n{lines}\n"
    options.setdefault("mode", "functional")
    return simulate(f"{kernel_file(text)}:kernel", *arrays, **options)


def ops(result: Simulation) -> list[str]:
    """Return the instructions of a run."""
    return [instruction.op for instruction in result.trace.instructions]


def values(*shape: int, seed: int = 0) -> np.ndarray:
    """Return normal float32 values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
