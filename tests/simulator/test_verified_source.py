"""The text that was verified is the text that runs, whatever becomes of the file it came from."""

import inspect
import linecache
import os
import types

import ml_dtypes
import numpy as np
import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.errors import FileError
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.options import Options
from nmm_compiler.simulator.loading.loader import resolve
from nmm_compiler.simulator.loading.source_text import LARGEST_SOURCE_BYTES, read_source
from nmm_compiler.simulator.run import simulate

SPEC = LowRankSpec(m=8, k=32, r=8, n=24, x_layout="col")
ADD = """\
import nki
import nki.language as nl


@nki.jit
def add(a, b):
    r = nl.ndarray(a.shape, a.dtype, nl.shared_hbm)
    nl.store(r, nl.add(nl.load(a), nl.load(b)))
    return r
"""
A = np.arange(12, dtype=np.float32).reshape(3, 4)


CHANGES = {
    "text in front": "open({marker!r}, 'w').close()\n{text}",
    "text behind": "{text}\n\ndef {name}(*a):\n    return a\n",
    "no Python": "not Python at all (",
    "gone": None,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    options = Options.make(cache=str(tmp_path_factory.mktemp("cache")))
    kernel = build_kernel(SPEC, options=options)
    generator = np.random.default_rng(0)
    operands = [
        generator.standard_normal(t.shape, dtype=np.float32).astype(ml_dtypes.bfloat16)
        for t in SPEC.inputs()
    ]
    return kernel, operands, kernel.simulate(*operands)


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_built_runs_after_its_file_was_changed(built, change, tmp_path):
    kernel, operands, wanted = built
    marker, text = tmp_path / "ran", CHANGES[change]
    kernel.path.parent.chmod(0o700)
    kernel.path.unlink(missing_ok=True)
    if text is not None:
        changed = text.format(marker=str(marker), text=kernel.source, name=kernel.path.stem)
        kernel.path.write_text(changed)
    run = kernel.simulate(*operands)
    assert run.output.tobytes() == wanted.output.tobytes()
    assert run.profile.latency_us == wanted.profile.latency_us
    assert not marker.exists()


def test_a_file_beside_a_verified_kernel_is_not_imported(tmp_path):
    (tmp_path / "nki.py").write_text("raise RuntimeError('beside')\n")
    (tmp_path / "helper.py").write_text("raise RuntimeError('beside')\n")
    kernel = types.SimpleNamespace(path=tmp_path / "k.py", name="add", source=ADD)
    assert np.array_equal(simulate(kernel, A, A, mode="functional").output, 2 * A)
    kernel.source = "import helper\n" + ADD
    with pytest.raises(Exception, match="No module named 'helper'"):
        simulate(kernel, A, A)


def test_the_source_that_is_shown_is_the_source_that_ran(tmp_path):
    path = tmp_path / "shown.py"
    path.write_text(ADD.replace("nl.add(", "nl.subtract("))
    kernel = types.SimpleNamespace(path=path, name="add", source=ADD)
    function = resolve(kernel).function
    linecache.checkcache()
    assert inspect.getsource(function) in ADD
    assert "nl.add(" in inspect.getsource(function)


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda path: path.mkdir(), "no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
        (os.mkfifo, "no regular file"),  # a pipe would never end
        (lambda path: path.write_bytes(b"x = 1\n\xff\xfe"), "not UTF-8"),
        (lambda path: path.write_bytes(b"#" * (LARGEST_SOURCE_BYTES + 1)), "larger than"),
        (lambda path: path.symlink_to(path), "cannot be read"),
        (lambda path: None, "cannot be read"),
    ],
)
def test_files_that_are_no_source(tmp_path, make, shown):
    path = tmp_path / "k.py"
    make(path)
    with pytest.raises(FileError, match=shown):
        read_source(path)
