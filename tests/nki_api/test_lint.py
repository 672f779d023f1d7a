"""Every rule of the lint: a snippet that breaks it, and one beside it that does not."""

import inspect
import textwrap

import pytest

from nmm_compiler.errors import LintError, UnknownNameError
from nmm_compiler.nki_api.api import api
from nmm_compiler.nki_api.lint import VERSIONS, check_source, lint_source, oldest_version
from nmm_compiler.simulator.loading.standins import MODULES

HEADER = """\
import nki
import nki.isa as nisa
import nki.language as nl

"""

CLEAN = (
    HEADER
    + """\
@nki.jit
def double(x):
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in range((rows + 127) // 128):
        start, stop = i * 128, min(rows, i * 128 + 128)
        tile = nl.ndarray((stop - start, columns), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x[start:stop, :])
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=out[start:stop, :], src=tile)
    return out
"""
)


def kernel(body, header=HEADER):
    """A kernel of tensors x and y around some statements."""
    return header + "@nki.jit\ndef k(x, y):\n" + textwrap.indent(textwrap.dedent(body), "    ")


def codes(source, nki="0.6"):
    return [finding.code.removeprefix("NKI-") for finding in lint_source(source, nki=nki)]


# code, statements that break the rule, statements that keep it; more are in
# test_versions_differ and test_aliases_are_resolved
STATEMENTS = [
    ("E101", "nisa.dma_copy(x, y, engine=nisa.engine.vectors)", "nisa.dma_copy(x, y)"),
    ("E101", "print(nl.tile_size.pmin)", "print(nl.tile_size.pmax)"),
    ("E103", "i = nl.arange(128)", "i = nl.ds(0, 128)"),
    ("W104", "for i in nl.affine_range(4): pass", "for i in range(4): pass"),
    ("W104", "nisa.memset(x, 0, engine=nisa.vector_engine)", "nisa.memset(x, 0)"),
    ("E112", "nisa.tensor_tensor(dst=x, data1=x, op=nl.add)", "nisa.tensor_tensor(*x)"),
    ("E113", "nisa.tensor_copy(x, y, dst=x)", "nisa.tensor_copy(x, src=y)"),
    ("E114", "nisa.reciprocal(x, y, None, 1)", "nisa.reciprocal(x, y, None)"),
    ("E115", "nisa.dma_copy(x, y, dst_rmw_op=nl.add)", "nisa.dma_compute(x, [y], nl.add)"),
    ("E115", "nisa.tensor_copy(x, y, mask=None)", "nisa.tensor_copy(x, y)"),
    (
        "E116",
        "nisa.dma_copy(x, y, dge_mode=2)",
        "nisa.dma_copy(x, y, dge_mode=nisa.dge_mode.hwdge)",
    ),
    ("E116", "nl.ndarray((1, 1), nl.int8, 'psum')", "nl.ndarray((1, 1), nl.int8, nl.psum)"),
    (
        "W116",
        "nisa.nc_matmul(x, x, y, perf_mode='double_row')",
        "nisa.nc_matmul(x, x, y, perf_mode=nisa.matmul_perf_mode.double_row)",
    ),
    ("E118", "nl.divide(x, y)", "nisa.tensor_tensor(x, x, y, nl.divide)"),
    ("E118", "nl.matmul(x, y)", "nl.matmul(x, y, transpose_x=True)"),
    ("E201", "if x is not y: pass", "if x != y: pass"),
    ("E203", "try:\n    nisa.tensor_copy(x, y)\nfinally:\n    pass", "nisa.tensor_copy(x, y)"),
    ("E204", "with open('f') as f: pass", "with nl.no_reorder(): nisa.tensor_copy(x, y)"),
    ("E205", "yield x", "return x"),
    ("W206", "a = [i for i in range(3)]", "a = [0, 1, 2]"),
    ("W206", "f = lambda: 1", "f = 1"),
    ("W206", "print(a := 1)", "a = 1"),
    ("W206", "match x:\n    case 1: pass", "if x == 1: pass"),
    ("E212", "global state\nstate = 1", "state = 1"),
    ("E214", "d = {1: x}", "d = {'one': x}"),
    ("E301", "nisa.tensor_copy(x, z)", "z = y\nnisa.tensor_copy(x, z)"),
    (
        "E302",
        "o = nl.ndarray((1, 1), nl.int8, nl.hbm)\nreturn o",
        "o = nl.ndarray((1, 1), nl.int8, nl.shared_hbm)\nreturn o",
    ),
    ("E302", "o = nl.zeros((1, 1), nl.int8)\nreturn x, o", "o = nl.zeros((1, 1), nl.int8)"),
    (
        "E303",
        "t = nl.ndarray((1, 8), nl.float32, nl.psum)\nnisa.dma_copy(x, t[:, 0:4])",
        "t = nl.ndarray((1, 8), nl.float32, nl.sbuf)\nnisa.dma_copy(x, t[:, 0:4])",
    ),
    (
        "E304",
        "t = nl.ndarray((1, 8), nl.int32)\nnisa.memset(t, 2.0)",
        "t = nl.ndarray((1, 8), nl.int32)\nnisa.memset(t, 2)",
    ),
    (
        "E303",
        "t = nl.ndarray((1, 8), nl.float32, nl.psum)\nnl.store(x, t.reshape((1, 2, 4)))",
        "t = nl.ndarray((1, 8), nl.float32)\nnl.store(x, t.reshape((1, 2, 4)))",
    ),
    (
        "E306",
        "t = nl.ndarray((1, 8), nl.int32, nl.psum)\nnisa.iota(t, [[1, 8]])",
        "t = nl.ndarray((1, 8), nl.int32)\nnisa.iota(t, [[1, 8]])",
    ),
    (
        "E306",
        "t = nl.ndarray((1, 8), nl.float32)\nnisa.nc_matmul(t, x, y)",
        "t = nl.ndarray((1, 8), nl.float32, nl.psum)\nnisa.nc_matmul(t, x, y)",
    ),
    ("E307", "nl.ndarray((129, 8), nl.int8)", "nl.ndarray((129, 8), nl.int8, nl.shared_hbm)"),
]


@pytest.mark.parametrize(("code", "broken", "kept"), STATEMENTS)
def test_statement_rules(code, broken, kept):
    assert codes(kernel(broken)) == [code]
    assert codes(kernel(kept)) == []


# code, whole file that breaks the rule, whole file that keeps it
FILES = [
    ("E001", "def k(:\n", ""),
    ("W105", "from nki.isa import *\n", "from nki.isa import dma_copy\n"),
    ("E101", "from nki.isa import dmacopy\n", "from nki.isa import dma_copy as copy\n"),
    (
        "E202",
        HEADER + "@nki.jit\ndef k(x, *, n=1): pass\n",
        HEADER + "@nki.jit\ndef k(x, n=1): pass\n",
    ),
    (
        "E207",
        HEADER + "class A: pass\n@nki.jit\ndef k(x): return A()\n",
        HEADER + "class A(nl.NKIObject): pass\n@nki.jit\ndef k(x): return A()\n",
    ),
    (
        "E208",
        HEADER + "@nki.jit\ndef f(x): return x\n@nki.jit\ndef k(x): return f(x)\n",
        HEADER + "def f(x): return x\n@nki.jit\ndef k(x): return f(x)\n",
    ),
    (
        "E209",
        HEADER + "@nki.jit\ndef k(x, s=[1, 1]): pass\n",
        HEADER + "@nki.jit\ndef k(x, s=(1, 1)): pass\n",
    ),
    (
        "E209",
        HEADER + "@nki.jit\ndef k(x, s): pass\ndef run(a): k[2](a, s=[1])\n",
        HEADER + "@nki.jit\ndef k(x, s): pass\ndef run(a): k[2](a, s=(1,))\n",
    ),
    (
        "E210",
        HEADER + "import numpy as np\n@nki.jit\ndef k(x): nisa.memset(x, np.pi)\n",
        HEADER + "import math\n@nki.jit\ndef k(x): nisa.memset(x, math.pi)\n",
    ),
    ("E211", "import nki\nimport neuronxcc.nki as old\n", "import nki\n"),
    ("E211", "import nki\nfrom neuronxcc import nki as old\n", "import nki\nfrom . import old\n"),
    ("E115", "import nki\n@nki.jit(platform_target='trn2')\ndef k(x): pass\n", ""),
    ("W115", "import nki\n@nki.jit(mode='trace')\ndef k(x): pass\n", ""),
]


@pytest.mark.parametrize(("code", "broken", "kept"), FILES)
def test_file_rules(code, broken, kept):
    assert codes(broken) == [code]
    assert codes(kept) == []


def loop(body, call):
    return kernel(f"def body(i):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n{call}")


@pytest.mark.parametrize(
    ("code", "broken"),
    [
        ("E216", loop("nisa.tensor_copy(x, y)", "with nl.no_reorder(): nl.fori_loop(0, 4, body)")),
        ("E217", loop("return i", "nl.fori_loop(0, 4, body)")),
        ("E217", loop("nisa.tensor_copy(x, y)", "nl.while_loop(x, body)")),
        ("E218", loop("nisa.tensor_copy(x, y)", "nl.fori_loop(0, 4, body, step=-1)")),
        ("E219", loop("nisa.tensor_copy(x, y[i * 4])", "nl.fori_loop(0, 4, body)")),
        ("", loop("nisa.tensor_copy(x, y.ap([[1, 1]], scalar_offset=i))", "")),
        ("", loop("nisa.tensor_copy(x, y)", "nl.fori_loop(0, 4, body, 2)")),
        ("", loop("return i", "nl.while_loop(x, body)")),
    ],
)
def test_device_loop_rules(code, broken):
    assert "".join(codes(broken)) == code


CARRIED = [
    "n += 1\nnisa.memset(x, n)",
    "nisa.memset(x, n)\nn = n + 1",
    "a, b = b, a\nnisa.tensor_copy(x, a)",
    "if n == 0:\n    nisa.memset(x, 1)\nn = 1",
    "for j in range(2):\n    n += j\nnisa.memset(x, n)",
    "kept.append(nl.ndarray((1, 1), nl.int8))\nnisa.tensor_copy(x, kept[0])",
    "kept[0] += 1\nnisa.memset(x, kept[0])",
    "table['n'] = 1\nnisa.tensor_copy(x, y)",
    "nisa.tensor_copy(x, kept.pop())",
]
OWN = [
    "m = 1\nm += 1\nnisa.memset(x, m)",
    "m = 0\nfor j in range(4):\n    m = m + j\nnisa.memset(x, m)",
    "own = []\nown.append(y)\nnisa.tensor_copy(x, own[0])",
    "n = 1\nnisa.memset(x, n)",
    "x[0:1] = y",
    "nisa.memset(x, kept[0])",
]
BEFORE = "n = 0\na = x\nb = y\nkept = [x, y]\ntable = {'n': 0}\n"
TURNS = {
    "fori_loop": "def body(i):\n    nonlocal n, a, b\n{}\nnl.fori_loop(0, 4, body)",
    "while_loop": "def body(i):\n    nonlocal n, a, b\n{}\n    return i\nnl.while_loop(x, body)",
    "dynamic_range": "for i in nl.dynamic_range(4):\n{}",
}


@pytest.mark.parametrize("loop", TURNS)
@pytest.mark.parametrize("body", [*CARRIED, *OWN])
def test_python_that_changes_from_turn_to_turn_is_found(loop, body):
    text = BEFORE + TURNS[loop].format(textwrap.indent(body, "    "))
    found = {code for code in codes(kernel(text)) if code != "W104"}
    assert found == ({"E221"} if body in CARRIED else set())


@pytest.mark.parametrize(
    ("header", "call"),
    [
        ("import nki\nfrom nki import isa, language as lang\n", "isa.tensor_copy(x, y, wrong=1)"),
        ("import nki\nfrom nki.isa import tensor_copy as tc\n", "tc(x, y, wrong=1)"),
        ("import nki\nimport nki.isa\n", "nki.isa.tensor_copy(x, y, wrong=1)"),
        ("import nki\nimport nki.isa as nisa\ncopy = nisa.tensor_copy\n", "copy(x, y, wrong=1)"),
        ("import nki\nimport nki.isa as nisa\n", "mine = nisa.tensor_copy\nmine(x, y, wrong=1)"),
    ],
)
def test_aliases_are_resolved(header, call):
    assert codes(kernel(call, header)) == ["E111"]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("nisa.topk(x, x, y, 4)", {"0.3": "E102", "0.5": "E102", "0.6": "", "0.7": ""}),
        ("nisa.activate2(x, nl.exp, y, 1, 2, nl.add, nl.add)", {"0.3": "E102", "0.4": ""}),
        ("print(nl.tile_size.psum_num_banks)", {"0.4": "E102", "0.5": ""}),
        (
            "nisa.dma_compute(x, [y], nl.add, oob_mode=nisa.oob_mode.skip)",
            {"0.3": "E117", "0.4": ""},
        ),
        ("nisa.tensor_scalar_reduce(x, y, nl.add, 1.0, nl.add)", {"0.5": "E112", "0.6": ""}),
        ("nisa.tensor_copy_dynamic_src(x, y)", {"0.4": "E103", "0.7": "E103"}),
        ("for i in nl.dynamic_range(4): pass", {"0.5": "", "0.6": "W104", "0.7": "E103"}),
        ("r = nisa.register_alloc()\nwhile r: pass", {"0.5": "", "0.6": "W215", "0.7": "E215"}),
        (
            "def body(i): nisa.register_store(x, i)\nnl.fori_loop(0, 4, body)",
            {"0.6": "", "0.7": "E220"},
        ),
        (
            "def body(i): nisa.register_store(x, i)\nnl.fori_loop(0, nisa.register_alloc(4), body)",
            {"0.6": "", "0.7": ""},
        ),
        (
            "def body(i): nisa.register_store(x, i)\nn = nisa.register_alloc(4)\n"
            "nl.fori_loop(lower=0, upper=n, body_fun=body)",
            {"0.6": "", "0.7": ""},
        ),
        ("print(nl.tile_size.psum_fmax)", {"0.3": "", "0.4": "W104"}),
        ("y = x.permute((1, 0)).reshape_dim(0, (2, 64))", {"0.4": "E102E102", "0.5": ""}),
        ("print(nl.select(x))", {"0.4": "E101", "0.5": "E101"}),
        ("if x is None: pass", {"0.3": "E201", "0.6": "E201", "0.7": ""}),
        ("a = max(i for i in range(3))", {"0.6": "E205", "0.7": ""}),
        ("nl.something_new(x)", {"0.6": "E101", "0.7": "W106"}),
        ("i = nisa.scalar_load(x)\nnisa.scalar_store(y, i)", {"0.6": "E102E102", "0.7": ""}),
        ("t = nl.tiles(x, tile_shape=(128, 256))[0, 0].data", {"0.6": "E102", "0.7": ""}),
        ("nl.blocks(x, tile_shapes=(128, 256))", {"0.7": "E111"}),
    ],
)
def test_versions_differ(statement, expected):
    found = {version: "".join(codes(kernel(statement), version)) for version in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("statement", "version"),
    [
        ("nisa.tensor_copy(x, y)", "0.3"),
        ("x.permute((1, 0))", "0.5"),
        ("nl.tiles(x, tile_shape=(128, 256))", "0.7"),
        ("nl.fori_loop(0, x.permute((1, 0)), print)", "0.6"),
    ],
)
def test_the_oldest_version_has_all_that_a_kernel_uses(statement, version):
    assert oldest_version(kernel(statement)) == version


def test_findings_say_where_and_suggest():
    (finding,) = lint_source(kernel("nisa.tensor_cpy(x, y)"))
    assert (finding.line, finding.column) == (7, 5)
    assert "did you mean 'tensor_copy'?" in finding.message


def test_check_source_names_every_error_and_lets_warnings_pass():
    check_source(kernel("for i in nl.affine_range(4): pass"))
    with pytest.raises(LintError) as caught:
        check_source(kernel("nisa.nope(x)\nnisa.memset(x)"), filename="k.py")
    assert [f.code for f in caught.value.findings] == ["NKI-E101", "NKI-E112"]
    assert "k.py:7:5 NKI-E101" in str(caught.value)
    assert "k.py:8:5 NKI-E112" in str(caught.value)


@pytest.mark.parametrize("version", [*VERSIONS, "0.6.0"])
def test_a_clean_kernel_has_no_findings(version):
    assert lint_source(CLEAN, nki=version) == ()
    check_source(CLEAN, nki=version)


def test_versions_are_checked():
    with pytest.raises(UnknownNameError, match=r"unknown NKI version '0\.9'"):
        lint_source(CLEAN, nki="0.9")


HOST = """
import numpy as np
def check(a):
    try:
        with open("f") as f:
            return [f for _ in a if a is not None] + list(i for i in np.zeros(3))
    except OSError:
        return {1: a}
"""
HELPER = HEADER + "def helper(a):\n    return a is None\n"
ROWS = "class Rows:\n    def select(self): pass\n"
USES_ROWS = "@nki.jit\ndef k(x, rows):\n    rows.select()\n    x.select(0, 1)\n"


@pytest.mark.parametrize(
    ("text", "version", "expected"),
    [
        ("\0", "0.6", "E001"),
        ("", "0.6", ""),
        ("a = b = a\nb = a\nb.c(d)\n" * 3, "0.6", ""),
        ("import nki\nx = x\nnki.jit(x)(nki.jit)\n", "0.6", ""),
        (HEADER + "def k(nisa):\n    nisa.anything(1, 2, wrong=3)\n", "0.6", ""),
        ("import nki\nimport neuronxcc.nki as old\n", "0.3", "W211"),
        (CLEAN + HOST, "0.6", ""),
        (HELPER, "0.6", ""),
        (HELPER + "@nki.jit\ndef k(x): return helper(x)\n", "0.6", "E201"),
        (HELPER + "def f(x): return helper(x)\nk = nki.jit(f)\n", "0.6", "E201"),
        ("from helpers import *\n" + kernel("nisa.tensor_copy(x, tile)"), "0.6", ""),
        (kernel("print(__file__, __name__)"), "0.6", ""),
        (HEADER + ROWS + USES_ROWS, "0.4", ""),
        (HEADER + USES_ROWS, "0.4", "E102E102"),
    ],
)
def test_what_the_rules_are_about(text, version, expected):
    """Odd text is no crash; host code, local names and a file's own methods are free."""
    assert "".join(codes(text, version)) == expected


BETA_1 = """
from neuronxcc import nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl

@nki.jit
def kernel(a):
    r = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    t = nisa.activation(op=nl.exp, data=nl.load(a), scale=2.0, mask=None)
    nl.store(r, value=t[nl.arange(128)[:, None], nl.arange(512)[None, :]])
    return r
"""


def test_the_import_decides_that_a_file_is_beta_1():
    assert lint_source(BETA_1) == ()
    mixed = {f.code for f in lint_source(BETA_1 + "import nki\n")}
    assert mixed == {"NKI-E211"}


@pytest.mark.parametrize(
    ("old", "new", "code", "shown"),
    [
        ("nisa.activation(", "nisa.activate2(", "NKI-E102", "checked for 0.1"),
        ("nl.exp", "nl.expp", "NKI-E101", "did you mean 'exp'"),
        ("nki.jit", "nki.simulate", "NKI-E101", "nki has no 'simulate'"),
        ("data=nl.load(a), ", "", "NKI-E112", "'data'"),
        ("scale=2.0", "scales=2.0", "NKI-W117", "did you mean 'scale'"),
        ("nl.load(a)", "nl.load(a, None, None, None)", "NKI-E114", "4 positional"),
    ],
)
def test_a_beta_1_file_is_checked_against_its_own_names(old, new, code, shown):
    (finding,) = lint_source(BETA_1.replace(old, new, 1))
    assert (finding.code, shown in finding.message) == (code, True)


# The signatures that the lint reads are those of the simulator's functions, as documented.

TABLE = {
    name: function
    for name, function in api().functions.items()
    if name.rpartition(".")[2] in vars(MODULES[name.rpartition(".")[0]])
}
DOCUMENTED = [
    "nc_matmul(dst, stationary, moving, is_stationary_onezero=False, is_moving_onezero=False, "
    "is_transpose=False, accumulate=None, tile_position=(), tile_size=(), "
    "perf_mode=matmul_perf_mode.none, name=None)",
    "activation(dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, "
    "reduce_cmd=reduce_cmd.idle, name=None)",
    "dma_copy(dst, src, priority=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown, "
    "engine=engine.unknown, name=None)",
    "sendrecv(src, dst, send_to_rank, recv_from_rank, pipe_id, dma_engine=dma_engine.dma, "
    "name=None)",
    "ndarray(shape, dtype, buffer=sbuf, name='', address=None)",
    "shared_identity_matrix(n, dtype=uint8, dst=None)",
    "rms_norm(x, w, axis, n, epsilon=1e-06, dtype=None, compute_dtype=None)",
    "load_transpose2d(src, dtype=None)",
]
"""Some signatures of the stubs of NKI 0.6, one for each way in which a default is written."""


@pytest.mark.parametrize("signature", DOCUMENTED)
def test_signatures_are_the_documented_ones(signature):
    short = signature.partition("(")[0]
    (found,) = (f for name, f in TABLE.items() if name.endswith(f".{short}"))
    assert str(found) == signature


@pytest.mark.parametrize("name", TABLE)
def test_a_function_takes_its_arguments_by_position_or_name(name):
    module, _, short = name.rpartition(".")
    parameters = inspect.signature(vars(MODULES[module])[short]).parameters.values()
    assert {p.kind for p in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
