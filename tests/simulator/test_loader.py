"""How kernels are found and loaded: paths, functions, packages; nothing leaks into sys.modules."""

import inspect
import itertools
import linecache
import os
import sys
import types

import ml_dtypes
import numpy as np
import pytest
import torch
from simulator_kernels import run

from nmm_compiler import errors
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.nki_api.api import api
from nmm_compiler.options import Options
from nmm_compiler.simulator.loading import standins
from nmm_compiler.simulator.loading.loader import resolve
from nmm_compiler.simulator.loading.source_text import LARGEST_SOURCE_BYTES, read_source
from nmm_compiler.simulator.run import simulate

ADD = """\
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def add(a, b, factor=1.0, *, label="x"):
    x, y = nl.load(a), nl.load(b)
    nisa.tensor_scalar(dst=y, data=y, op0=nl.multiply, operand0=factor)
    r = nl.ndarray(a.shape, a.dtype, nl.shared_hbm, name=label)
    nl.store(r, nl.add(x, y))
    return r


def plain(a):
    return add(a, a)


if __name__ == "__main__":
    raise RuntimeError("loaded as a script")
"""


@pytest.fixture
def add_file(tmp_path):
    path = tmp_path / "adding.py"
    path.write_text(ADD)
    return path


A = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_what_names_a_kernel(tmp_path):
    (tmp_path / "a:b").mkdir()
    for path in (tmp_path / "adding.py", tmp_path / "a:b" / "adding.py"):
        path.write_text(ADD)
        named = types.SimpleNamespace(path=path, name="add")
        for kernel in (f"{path}:add", str(path), path, named):
            assert np.array_equal(simulate(kernel, A, A, mode="functional").output, 2 * A)
    gone = types.SimpleNamespace(path=tmp_path / "gone.py", name="add", source=ADD)
    result = simulate(gone, A, A)
    assert np.array_equal(result.output, 2 * A)
    assert result.profile.hbm_read_bytes == 2 * A.nbytes


def test_keyword_arguments_and_plain_functions(add_file):
    result = simulate(f"{add_file}:add", A, b=A, factor=3.0, label="sum", mode="functional")
    assert np.array_equal(result.output, 4 * A)
    assert any(a.name == "sum" for a in result.trace.allocations.values())
    assert np.array_equal(simulate(f"{add_file}:plain", A, mode="functional").output, 2 * A)


def test_an_edited_file_is_loaded_again(add_file):
    assert simulate(f"{add_file}:add", A, A, mode="functional").output[0, 1] == 2
    add_file.write_text(ADD.replace("nl.add(x, y)", "nl.subtract(x, y)"))
    assert simulate(f"{add_file}:add", A, A, mode="functional").output[0, 1] == 0


def test_sys_modules_is_neither_read_nor_touched(add_file, monkeypatch):
    fake = types.ModuleType("nki")
    fake.jit = None
    monkeypatch.setitem(sys.modules, "nki", fake)
    before = set(sys.modules)
    assert np.array_equal(simulate(f"{add_file}:add", A, A, mode="functional").output, 2 * A)
    assert sys.modules["nki"] is fake
    assert not [m for m in set(sys.modules) - before if "nki" in m or "adding" in m]


def test_function_that_imports_nki_itself():
    def kernel(a, width):
        import nki.isa as nisa
        import nki.language as nl

        t = nl.ndarray(a.shape, a.dtype, nl.sbuf)
        nisa.dma_copy(dst=t, src=a)
        r = nl.ndarray((a.shape[0], width), a.dtype, nl.shared_hbm)
        nisa.dma_copy(dst=r, src=t[:, 0:width])
        return r

    result = simulate(kernel, A, 2, mode="functional")
    assert np.array_equal(result.output, A[:, :2])
    assert {i.file for i in result.trace.instructions} == {__file__}
    assert result.trace.instructions[0].line == kernel.__code__.co_firstlineno + 5


def test_function_of_a_module_with_an_installed_nki(tmp_path, monkeypatch):
    """Globals that are a real `nki` are replaced, in helpers and closures too."""
    nki, nl, nisa = (types.ModuleType(n) for n in ("nki", "nki.language", "nki.isa"))
    nki.language, nki.isa = nl, nisa
    nki.jit = lambda f: f
    for name, module in (("nki", nki), ("nki.language", nl), ("nki.isa", nisa)):
        monkeypatch.setitem(sys.modules, name, module)
    text = ADD.replace("import nki.isa as nisa", "from nki import isa as nisa")
    (tmp_path / "user_module_for_loader_test.py").write_text(text.split("if __name__")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    import user_module_for_loader_test as user

    assert np.array_equal(simulate(user.plain, A, mode="functional").output, 2 * A)
    assert user.nl is nl


def test_packages_relative_imports_and_dataclasses(tmp_path):
    package = tmp_path / "kernels_pkg"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("WIDTH = 2\n")
    (package / "inner" / "__init__.py").write_text("")
    (package / "shared.py").write_text(
        "from __future__ import annotations\n"
        "import importlib\n"
        "from dataclasses import dataclass, field\n"
        "import nki.language as nl\n"
        "from nki.language import NKIObject\n"
        "@dataclass\n"
        "class Config(NKIObject):\n"
        "    width: int\n"
        "    note: 'str'\n"
        "    tiles: list = field(default_factory=list)\n"
        "    depth = 2\n"
        "class Plain(NKIObject):\n"
        "    left: int\n"
        "    right: int = 5\n"
        "def load(x):\n"
        "    return nl.load(x)\n"
        "sibling = importlib.import_module('..helper', 'kernels_pkg.inner')\n"
    )
    (package / "helper.py").write_text("import nki.isa as nisa\nNAME = __name__\n")
    (package / "inner" / "kernel.py").write_text(
        "import nki, nki.language as nl\n"
        "from .. import WIDTH, helper\n"
        "from ..shared import Config, Plain, load, sibling\n"
        "import kernels_pkg.shared as again\n"
        "import inspect\n"
        "@nki.jit\n"
        "def kernel(a):\n"
        "    config = Config(WIDTH)\n"
        "    assert config.note is None and config.tiles == [] and Config(1, depth=3).depth == 3\n"
        "    for wrong in ({'depht': 3}, {'width': 1, 'notes': ''}):\n"
        "        try:\n"
        "            Config(**wrong)\n"
        "        except TypeError as error:\n"
        "            assert 'Config has no field' in str(error)\n"
        "        else:\n"
        "            raise AssertionError(wrong)\n"
        "    assert Plain(1).right == 5 and Plain(1, right=2).right == 2\n"
        "    assert sibling is helper and again.Config is Config\n"
        "    assert helper.NAME == 'kernels_pkg.helper'\n"
        "    assert inspect.getmodule(load) is again\n"
        "    r = nl.ndarray((a.shape[0], config.width), a.dtype, nl.shared_hbm)\n"
        "    nl.store(r, load(a)[:, 0:config.width])\n"
        "    return r\n"
    )
    path = package / "inner" / "kernel.py"
    assert np.array_equal(simulate(path, A, mode="functional").output, A[:, :2])
    assert not [m for m in sys.modules if m.startswith("kernels_pkg")]


def test_torch_tensors_and_dtypes(add_file):
    t = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    result = simulate(f"{add_file}:add", t, t.clone(), mode="functional").output
    assert result.dtype == ml_dtypes.bfloat16
    assert np.array_equal(result.astype(np.float32), 2 * t.float().numpy())
    strided = torch.arange(24, dtype=torch.float32).reshape(4, 6).t()[::2]
    result = simulate(f"{add_file}:add", strided, strided, mode="functional").output
    assert np.array_equal(result, 2 * strided.numpy())
    turned = torch.zeros(4, 3, dtype=torch.bfloat16).t()
    run("nisa.dma_copy(dst=a, src=b)\nreturn a", turned, t)
    assert torch.equal(turned, t)


def test_bool_arrays_come_back_as_bool():
    result = run("assert a.dtype == nl.bool_\nreturn out(load(a))", A > 3).output
    assert result.dtype == np.bool_
    assert np.array_equal(result, A > 3)


@pytest.mark.parametrize("made", [np.zeros, torch.zeros])
def test_inputs_that_the_kernel_writes_are_updated_and_others_are_not(made):
    a, b = made((3, 4)), A.copy()
    a = a.astype(np.float32) if made is np.zeros else a
    result = run("nisa.dma_copy(dst=a, src=b)\nreturn a", a, b).output
    assert all(np.array_equal(values, A) for values in (a, b, result))


def test_returned_arrays_share_memory_with_none_that_anybody_holds():
    """A part of a tensor does not hold the whole, either."""
    given = A.copy()
    body = "nisa.dma_copy(dst=a, src=load(a))\nr = out(load(a))\nreturn a, r, r, r[:, 0:2]"
    outputs = run(body, given).outputs
    for one, other in itertools.combinations([given, *outputs], 2):
        assert not np.shares_memory(one, other)
    for output in outputs:
        assert np.array_equal(output, A[:, : output.shape[1]])
    assert outputs[3].flags.owndata


def test_nki_simulate_inside_a_file_and_grids(tmp_path):
    path = tmp_path / "k.py"
    path.write_text(
        ADD.split("if __name__")[0]
        + "import numpy as np\nRESULT = nki.simulate(add)(np.ones((2, 2), np.float32),"
        " np.ones((2, 2), np.float32))\nassert (RESULT == 2).all()\n"
        "@nki.jit(platform_target='trn2')\ndef programs(a):\n"
        "    r = nl.ndarray((2, 4), nl.float32, nl.shared_hbm)\n"
        "    me = nl.program_id(0)\n    nl.store(r[me:me + 1], nl.load(a[me:me + 1]))\n"
        "    return r\nlaunched = programs[2]\n"
    )
    assert np.array_equal(simulate(f"{path}:launched", A, mode="functional").output, A[:2])


@pytest.mark.parametrize(
    ("text", "name", "kind", "shown"),
    [
        (ADD, "ad", errors.KernelArgumentError, "did you mean 'add'"),
        ("x = 1\n", "", errors.KernelArgumentError, "0 kernels"),
        (ADD + "@nki.jit\ndef other(a):\n    return a\n".replace("@", "\n@"), "",
         errors.KernelArgumentError, "2 kernels"),
        ("def broken(:\n", "broken", errors.KernelFailedError, "syntax error"),
        ("import nki.nothing\n", "k", errors.UnsupportedInstructionError, "nki.nothing"),
        ("import neuronxcc.nki.isa as isa\nisa.matmull\n", "k",
         errors.UnsupportedInstructionError, "matmull"),
        ("import no_such_package_at_all\n", "k", errors.KernelFailedError, "ModuleNotFoundError"),
        ("raise ValueError('top')\n", "k", errors.KernelFailedError, "ValueError: top"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(tmp_path, text, name, kind, shown):
    path = tmp_path / "bad.py"
    path.write_text(text.replace('raise RuntimeError("loaded as a script")', "pass"))
    with pytest.raises(kind) as caught:
        simulate(f"{path}:{name}" if name else path, A)
    assert shown in str(caught.value)
    assert "bad.py" in str(caught.value)


@pytest.mark.parametrize(("kernel", "shown"), [("/nowhere/k.py:k", "does not exist"), (3, "is no")])
def test_what_is_no_kernel(kernel, shown):
    with pytest.raises(errors.KernelArgumentError, match=shown):
        simulate(kernel, A)


def test_nki_calls_outside_a_run():
    with pytest.raises(errors.SimulationError, match="outside a simulation"):
        standins.MODULES["nki.language"].ndarray((2, 2), "float32")


def test_simulate_inside_a_kernel_is_refused():
    body = "from nmm_compiler.simulator.run import simulate\nsimulate(__file__, a)\nreturn a"
    with pytest.raises(errors.SimulationError, match="inside a kernel"):
        run(body, A)


@pytest.mark.parametrize("module", ["nki.isa", "nki.language"])
def test_the_standins_cover_the_documented_names(module):
    assert set(api("0.6").names(module)) <= set(vars(standins.MODULES[module]))


@pytest.mark.parametrize("error", ["SystemExit(0)", "GeneratorExit", "BaseException('x')"])
@pytest.mark.parametrize("grid", [1, 2])
@pytest.mark.parametrize("when", ["the kernel raised: ", "could not be loaded: "])
def test_leaving_python_is_an_error_of_the_kernel(tmp_path, error, grid, when):
    path = tmp_path / "leaving.py"
    path.write_text(f"def k(a):\n    raise {error}\n{'' if 'raised' in when else 'k(1)'}\n")
    with pytest.raises(errors.KernelFailedError, match=when) as caught:
        simulate(f"{path}:k", A, grid=grid)
    assert caught.value.line == 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("raise ValueError('a\\n  b\\n' + 'x' * 5000)", r"ValueError: a b x{900,1000}\.\.\. \["),
        ("class E(Exception):\n    def __str__(self): return 1 / 0\nraise E()",
         "its message raised ZeroDivisionError"),
    ],
)  # fmt: skip
def test_the_message_of_a_kernels_error_is_one_line_and_may_raise(text, shown):
    with pytest.raises(errors.KernelFailedError, match=shown):
        run(text, A)


# Tensors have the names of the variables that hold them, and print shows their values.

NAMES = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def kernel(x):
    tiles = []
    weights = nl.ndarray(
        (128, 64),
        dtype=nl.float32,
        buffer=nl.sbuf,
    )
    for _ in range(2):
        tiles.append(nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf))
    named = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf, name="mine")
    for tile in (weights, tiles[0], tiles[1], named):
        nisa.dma_copy(dst=tile, src=x)
    print(weights)
    out = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=weights)
    return out
"""


@pytest.mark.parametrize("name", ["weights", "first"])
def test_names_and_printed_values(tmp_path_factory, capsys, name):
    path = tmp_path_factory.getbasetemp() / "kernel.py"  # the file of before, changed
    path.write_text(NAMES.replace("weights", name))
    run = simulate(f"{path}:kernel", np.full((128, 64), 2.5, np.float32))
    names = [a.name for a in run.trace.allocations.values()]
    assert names == ["x", name, "tiles", "tiles", "mine", "out"]
    said = capsys.readouterr().out
    assert said.startswith(f"NkiTensor({name!r}, shape=(128, 64), dtype=float32, sbuf)")
    assert "2.5" in said


# The text that was verified is the text that runs, whatever becomes of the file it came from.

SPEC = LowRankSpec(m=8, k=32, r=8, n=24, x_layout="col")
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
    with pytest.raises(errors.FileError, match=shown):
        read_source(path)
