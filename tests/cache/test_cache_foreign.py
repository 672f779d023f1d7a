"""Sources from elsewhere: kernels pass, anything that could do more does not."""

from pathlib import Path

import numpy as np
import pytest
from cache_helpers import key_of

from nmm_compiler.cache.entry import make
from nmm_compiler.cache.foreign import check_shape, check_sources
from nmm_compiler.cache.store import Store
from nmm_compiler.errors import CacheTrustError

HEAD = '"""A kernel."""\n\nimport nki\nimport nki.isa as nisa\nimport nki.language as nl\n\n\n'

KERNEL = (
    HEAD
    + '''TILE = 128
SHAPES: tuple = ((1, 2), [3], {"a": -1})


def load(dst, src, *, rows: int = 128):
    """Load rows."""
    nisa.dma_copy(dst=dst[0:rows, :], src=src.reshape((rows, 4)))


@nki.jit
def kernel(x, scale=1.0):
    assert x.shape[0] % TILE == 0, f"rows {x.shape[0]}"
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tiles = [nl.ndarray((128, 4), dtype=x.dtype, buffer=nl.sbuf) for _ in range(2)]
    for i, tile in enumerate(tiles):
        load(tile, x[i * TILE : (i + 1) * TILE])
        if i > 0 and scale != 1.0:
            nisa.activation(dst=tile, op=nl.copy, data=tile, scale=scale)
    nisa.memset(tiles.pop(), nl.tile_size.pmax, engine=nisa.engine.vector)
    return out
'''
)


def test_a_kernel_passes():
    check_shape("kernel.py", KERNEL)


def _in_body(line: str) -> str:
    return HEAD + f"@nki.jit\ndef kernel(x):\n    {line}\n    return x\n"


@pytest.mark.parametrize(
    "text",
    [
        "import os\n", "import os as nki\n", "import nki, os\n", "from os import path\n",
        "from . import kernel\n", "from .. import nki\n", "from nki import *\n",
        "from nki import _secret\n", "import nkix\n", "from nkix import y\n",
        "nki = __import__('os')\n", "x = open('/etc/passwd')\n", "print(1)\n",
        "class A:\n    pass\n", "if True:\n    x = 1\n", "for i in (1,):\n    x = 1\n",
        "try:\n    x = 1\nfinally:\n    x = 2\n", "del x\n", "x = y = f()\n", "x: f() = 1\n",
        "@eval\ndef f(x):\n    return x\n", "@nki.jit('x')\ndef f(x):\n    return x\n",
        "def f(x=print(1)):\n    return x\n", "def f(*, x=f()):\n    return x\n",
        "def f(x: print(1)):\n    return x\n", "def f(x) -> print(1):\n    return x\n",
        "async def f(x):\n    return x\n", "x = lambda: 1\n", "x = [open for _ in (1,)]\n",
        "with open('x') as f:\n    x = 1\n", "global x\n", "def f(:\n", "\0", "x = 1j.__class__\n",
        "(" * 5000,
        # what rebinds or imports more than the modules
        "def f(nl):\n    return nl\n", "def nisa(x):\n    return x\n", "import nki.meta\n",
        "from nki import compiler\n", "from nki.isa.constants import x\n",
        "x = 1\n" + "#" * (1 << 20),
        # a local name does not free a builtin
        "def f(open):\n    return open\n\n\ndef g(x):\n    return open('/etc/passwd')\n",
    ],
)  # fmt: skip
def test_a_file_that_does_more_than_define_kernels(text):
    with pytest.raises(CacheTrustError, match=r"kernel\.py"):
        check_shape("kernel.py", HEAD + text)


@pytest.mark.parametrize(
    "line",
    [
        "__import__('os').system('true')", "open('/etc/passwd')", "exec('1')", "eval('1')",
        "compile('1', '', 'eval')", "getattr(x, 'y')", "setattr(x, 'y', 1)", "globals()", "vars()",
        "x.__class__", "().__class__.__base__.__subclasses__()", "x._private", "type(x)", "input()",
        "(i for i in x).gi_frame", "x.gi_frame", "x.f_globals", "x.f_builtins",
        "x.tb_frame", "x.co_code",
        "import os", "from os import path", "from nki import _x", "global x", "breakpoint()",
        "delattr(x, 'y')", "y = [open('x') for open in x]", "y = __file__", "__loader__.x",
        "y = lambda: 1", "yield x", "__builtins__['open']", "os.system('true')", "y = print",
        "(y := open)",
    ],
)  # fmt: skip
def test_a_kernel_that_reaches_further(line):
    with pytest.raises(CacheTrustError, match="line"):
        check_shape("kernel.py", _in_body(line))


@pytest.mark.parametrize(
    "line",
    [
        "x.load().tofile('/tmp/nmm-evil')", "y = x.load", "y = x.data", "y = x.numpy()",
        "x.shape.tofile('y')", "y = nl.load(x).tofile", "y = nl.load.tofile", "y = nl.np.save",
        "y = nki.compiler", "y = nki.meta.tensor", "y = x.tobytes()", "y = x.dump('z')",
        "nl.sbuf = x", "nisa.engine.vector = x", "x.shape = (1,)", "nl = x", "nisa, y = x",
        "while True:\n        pass", "y = 10 ** 10", "y = pow(10, 1000000)", "x **= 9",
        "y = 1 << 1000000", "x <<= 9", "y = 'a' * 1000000000", "y = 1000000000 * [0]",
        "y = (0,) * x", "y = [0 for _ in (1,)] * x", "y = f'{x:1000000000}'", "y = 'a' % x",
        "y = 99999999999999999999", "y = 'a'.join(x)", "y = '{}'.format(x)", "y = 'a'.ljust(9)",
        "for i in range(10000000000):\n        x = i", "y = x @ x", "y = f'{x}' * x",
        "y = x.extend(x)",
    ],
)  # fmt: skip
def test_a_kernel_that_writes_files_or_makes_much_of_little(line):
    """Refused by the shape, or by the lint, which knows what names nki has."""
    entry = make(key_of(1), {"kernel.py": _in_body(line)}, {})
    with pytest.raises(CacheTrustError, match=r"line|kernel\.py:"):
        check_sources(entry, "elsewhere")


def test_every_name_listed_is_one_of_the_api_or_of_python():
    """What the list allows must exist: tensors of either dialect have it, or a list or dict has."""
    from nmm_compiler.cache import foreign
    from nmm_compiler.simulator.beta1.tensor import Tensor
    from nmm_compiler.simulator.tensors.tensor import NkiTensor

    of_python = {name for kind in (list, dict) for name in dir(kind)}
    assert (
        set(dir(NkiTensor)) | set(dir(Tensor)) | of_python | {"shape", "dtype"}
        >= foreign.ATTRIBUTES
    )
    assert not {"load", "data", "extend", "numpy", "storage"} & foreign.ATTRIBUTES


@pytest.mark.parametrize("run", ["simulate", "simulate_ranks", "neuron"])
def test_a_source_found_in_the_cache_is_checked_before_it_runs(tmp_path, monkeypatch, run):
    """Another process wrote it, and its digest fits; a read alone does not parse it."""
    from nmm_compiler.codegen import build
    from nmm_compiler.kernels.linear.specs import MatmulSpec
    from nmm_compiler.options import Options
    from nmm_compiler.runtime import neuron

    spec, options = MatmulSpec(m=4, k=8, n=4), Options(cache=str(tmp_path / "cache"))
    kernel = build.build_kernel(spec, options=options)
    key = build.kernel_key(spec, kernel.target, None)
    evil = kernel.source.replace("    return", "    x.load().tofile('evil')\n    return")
    store = Store(tmp_path / "cache")
    store.prune(0)
    store.get_or_build(key, lambda: {build.SOURCE_FILE: evil}, dict(kernel.meta))
    monkeypatch.setattr(build, "_KERNELS", {})
    build.Store.open(options)._held.clear()
    found = build.build_kernel(spec, options=options)
    x, w = (np.ones(shape, np.float32) for shape in ((4, 8), (8, 4)))
    monkeypatch.setattr(neuron, "_imported", lambda module, problem: None)
    runs = {
        "simulate": lambda: found.simulate(x, w),
        "simulate_ranks": lambda: found.simulate_ranks(x, w),
        "neuron": lambda: neuron.load(found),
    }
    with pytest.raises(CacheTrustError, match=r"attribute tofile|attribute load"):
        runs[run]()
    assert not Path("evil").exists()
