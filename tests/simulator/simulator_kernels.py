"""Kernel text for simulator tests: a few lines of body become a kernel file that is run."""

import contextlib
import hashlib
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest

from nmm_compiler import errors
from nmm_compiler.simulator.run import simulate

HEADER = """\
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl


def load(x, buffer=nl.sbuf, dtype=None):
    tile = nl.ndarray(x.shape, x.dtype, nl.sbuf, name="tile")
    nisa.dma_copy(dst=tile, src=x)
    if dtype is None and buffer is nl.sbuf:
        return tile
    other = nl.ndarray(x.shape, dtype or x.dtype, buffer, name="tile")
    nisa.tensor_copy(dst=other, src=tile)
    return other


def out(tile, dtype=None):
    if tile.buffer is nl.psum:
        moved = nl.ndarray(tile.shape, tile.dtype, nl.sbuf)
        nisa.tensor_copy(dst=moved, src=tile)
        tile = moved
    result = nl.ndarray(tile.shape, dtype or tile.dtype, nl.shared_hbm, name="result")
    nisa.dma_copy(dst=result, src=tile)
    return result


"""
_FOLDER = Path(tempfile.mkdtemp(prefix="nmm-kernels-"))


def kernel_file(text):
    """Write kernel text to a file of its own."""
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    path = _FOLDER / f"kernel_{name}.py"
    if not path.exists():
        path.write_text(text)
    return path


def values(shape, dtype=np.float32, seed=0, scale=1.0):
    """Return normally distributed numbers, the same for a seed in every dtype; or integers."""
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return generator.integers(max(info.min, -100), min(info.max, 100), shape).astype(dtype)
    return (scale * generator.standard_normal(shape, dtype=np.float32)).astype(dtype)


def run(body, *arrays, names="abcdefgh", header=HEADER, **options):
    """Run `body` as a kernel whose arguments are a, b, c, ..."""
    arguments = ", ".join(names[: len(arrays)])
    lines = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    text = f"{header}@nki.jit\ndef kernel({arguments}):\n{lines}\n"
    options.setdefault("mode", "functional")
    return simulate(f"{kernel_file(text)}:kernel", *arrays, **options)


def refusals(rows):
    """Return the code, its error and what that says, of lines `code  # Error: what it says`.

    "; " parts lines of code.
    """
    found = []
    for row in rows.strip().splitlines():
        code, _, said = row.partition("  # ")
        kind, _, words = said.partition(": ")
        found.append((code.replace("; ", "\n"), getattr(errors, kind), words))
    return found


def refused(kind, match=None, *, unless):
    """Expect a refusal of the block, unless a condition holds: then it runs."""
    return contextlib.nullcontext() if unless else pytest.raises(kind, match=match)


def check(body, arrays, *wanted, within=0.0, **options):
    """Run `body`, and hold each output to the wanted array, up to a largest difference of each."""
    outputs, bounds = run(body, *arrays, **options).outputs, np.broadcast_to(within, len(wanted))
    for output, array, bound in zip(outputs, wanted, bounds, strict=True):
        assert output.shape == array.shape
        assert np.abs(output.astype(np.float64) - array).max() <= bound
