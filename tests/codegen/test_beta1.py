"""Emitted NKI Beta 1: every family is right and says only what its dialect documents.

A kernel in this dialect issues the instructions of the same kernel in the current one: that is what
"one set of templates" means, and it is asserted count by count.
"""

import ast
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from kernels.judge import prove_right, spec_of
from kernels.specs import SPECS as RANDOM
from processes import ran

from nmm_compiler.cache.foreign import check_shape
from nmm_compiler.codegen.beta1.translate import to_beta_1
from nmm_compiler.codegen.build import _command, build_kernel, kernel_key
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.codegen.emitted_file import kernel_source
from nmm_compiler.errors import CacheTrustError, CapacityError, CodegenError, SpecError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.kernels.linear.specs import (
    LowRankSpec,
)
from nmm_compiler.nki_api.lint import lint_source
from nmm_compiler.options import Options
from nmm_compiler.simulator.beta1.table import beta_1
from nmm_compiler.targets import get

OFF = Options(cache="off")
FP8 = "float8_e4m3"
SPECS = {
    "lowrank": "lowrank m=40 k=200 r=130 n=300 bias activation=gelu",
    "lowrank_shared": "lowrank_shared m=40 k=200 pairs=64:128 pairs=130:200,130 "
    "bias=true,false,true activation=identity,silu,gelu out_layout=row,col,row",
    "matmul": "matmul m=130 k=200 n=300 out_layout=col bias w_layout=col",
    "gated_mlp_up": "gated_mlp_up m=40 k=200 n=300 gate_r=100 up_r=0 gate_bias",
    "gated_mlp": "gated_mlp m=40 k=130 n=200 gate_r=64 up_r=130 down_r=64 down_bias",
    "attention": "attention m=2 context=150 heads=4 kv_heads=2 d=48 window=90 soft_cap=2.0 rope=q",
}
VARIANTS = {
    "prefill": "attention m=140 context=333 heads=2 kv_heads=1 d=64 window=100 rope=qk",
    "prefill capped": "attention m=130 d=40 window=70 soft_cap=3.0 k_layout=col",
    "decode by columns": "attention m=3 context=150 heads=4 kv_heads=2 k_layout=col",
    "packed decode": "attention m=1 context=300 heads=6 kv_heads=3 d=32",
    "lowrank norm": "lowrank m=20 k=300 r=64 n=200 norm=layer norm_gain norm_bias residual",
    "gated_mlp norm": "gated_mlp m=1 k=256 n=384 r=64 norm=rms norm_gain residual",
    "lowrank_shared norm": "lowrank_shared m=30 k=300 pairs=128:256,300 pairs=200:300 norm=rms "
    "norm_gain",
    "lowrank fp8": "lowrank m=16 k=512 r=256 n=200 dtype=float8_e4m3 bias",
    "corrected fp8": "linear m=20 k=256 n=200 rank=16 weight=fp8",
    "matmul fp8": "matmul m=130 k=512 n=200 dtype=float8_e4m3 scales=channel",
    "lowrank base": "lowrank m=1 k=256 r=129 n=256 base",
}
QUICK = [(name, "trn1") for name in SPECS] + [
    ("lowrank", "trn2"),
    ("lowrank fp8", "trn2"),
    ("prefill", "trn1"),
    ("packed decode", "trn2"),
    ("lowrank norm", "trn1"),
]
CASES = QUICK + [
    pytest.param(name, "trn2", marks=pytest.mark.long)
    for name in {**SPECS, **VARIANTS}
    if (name, "trn2") not in QUICK
]


MODULES = {"nisa": "nki.isa.", "nl": "nki.language."}


def counts(kernel):
    """Return instructions by name, without what a loop on the device adds."""
    engines = kernel.profile().instructions
    return {e: c for e, c in engines.items() if not set(c) <= {"register_store", "register_alloc"}}


def test_every_family_is_here():
    chosen, few_bits = {"adapters", "experts"}, {"linear", "linear_mlp"}
    assert set(SPECS) == set(FAMILIES) - chosen - few_bits, "trn1 has neither an index nor fp8"


@pytest.mark.parametrize(("name", "target"), CASES)
def test_a_family_is_right_and_says_the_same_in_forms_of_beta_1(name, target):
    spec = spec_of({**SPECS, **VARIANTS}[name])
    kernel = build_kernel(spec, target, dialect="neuronxcc")
    current = build_kernel(spec, target, kernel.schedule, dialect="nki")
    prove_right(kernel, seed=1)
    assert lint_source(kernel.source) == ()
    assert max(map(len, kernel.source.partition("@nki.jit")[0].splitlines())) <= 100
    if spec.dtype != FP8:
        # a scale is spread over the partitions by TensorE here, by its DMA there
        assert counts(kernel) == counts(current)
        assert kernel.profile().hbm_write_bytes == current.profile().hbm_write_bytes

    check_says_only_what_beta_1_documents(kernel)
    # as of a sum that nothing has written
    assert not kernel.simulate(*random_arrays(spec, 1), mode="functional").warnings


def check_says_only_what_beta_1_documents(kernel):
    tree = ast.parse(kernel.source)
    check_shape("kernel.py", kernel.source)
    assert "dialect: neuronxcc.nki (NKI Beta 1" in ast.get_docstring(tree)
    api = beta_1()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            module, _, short = called.partition(".")
            if module in MODULES and short.isidentifier():
                known = set(api.functions[MODULES[module] + short].parameters)
                assert {k.arg for k in node.keywords} <= known, called
                assert "dst" not in {k.arg for k in node.keywords} or short == "dma_copy"
            else:
                assert called != "range"  # Beta 1 reads it as sequential_range
            assert not called.endswith((".reshape_dim", ".permute", ".select", ".broadcast"))
            if called in ("nl.load", "nl.store"):  # no name, no parameter of a helper
                assert isinstance(node.args[0], ast.Subscript), ast.unparse(node)
    (kernel_function,) = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]
    shared = [n for n in ast.walk(tree) if ast.unparse(n) == "nl.shared_hbm"]
    made = [s for s in kernel_function.body if "nl.shared_hbm" in ast.unparse(s)]
    assert len(made) == len(shared)  # err_shared_hbm_must_in_kernel_level
    assert all(isinstance(s, (ast.Assign, ast.Expr)) for s in made)


@pytest.mark.parametrize("layout", ["row", "col"])
def test_a_loop_on_the_device_is_an_affine_range(layout):
    spec = LowRankSpec(m=2100, k=256, r=128, n=512, x_layout=layout, out_layout=layout)
    options = Options(cache="off", instruction_budget=50)
    kernel = build_kernel(spec, "trn1", dialect="neuronxcc", options=options)
    assert kernel.schedule.m_loop
    assert "fori_loop" not in kernel.source
    assert "register" not in kernel.source
    body = kernel.source.partition("@nki.jit")[2]
    assert "for i in nl.affine_range(" in body
    assert lint_source(kernel.source) == ()
    prove_right(kernel, seed=1)


VIEWS = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def kernel(x):
    out = nl.ndarray((512, 64), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 4, 16), dtype=x.dtype, buffer=nl.sbuf)
    {}
    return out
"""


@pytest.mark.parametrize(
    ("lines", "made"),
    [
        (
            ["nisa.dma_copy(dst=out[0:128, 0:32], src=tile[0:128, a : a + 2, 0:16]"
             ".reshape((128, 32)))",
             "tile = nl.ndarray((128, 8, 16), dtype=x.dtype, buffer=nl.sbuf)",
             "nisa.dma_copy(dst=out[0:128, 0:32], src=tile[0:128, 0:2, 0:16].reshape((128, 32)))"],
            ["nl.store(out[0:128, 0:32], value=tile.reshape((tile.shape[0], "
             "tile.shape[1] * tile.shape[2]))[0:128, a * tile.shape[2] : a * tile.shape[2] + 32])",
             "tile = nl.ndarray((128, 8, 16), dtype=x.dtype, buffer=nl.sbuf)",
             "nl.store(out[0:128, 0:32], value=tile.reshape((tile.shape[0], "
             "tile.shape[1] * tile.shape[2]))[0:128, 0:32])"],
        ),
        (
            ["gain = tile[0:128, 0, 2:6].reshape((128, 4, 1))",
             "nisa.tensor_tensor(dst=tile, data1=tile, data2=gain.broadcast(2, 16), op=nl.add)"],
            ["tile[...] = nisa.tensor_tensor(data1=tile, data2=tile[nl.arange(128)[:, None, None], "
             "0, 2 + nl.arange(4)[None, :, None]].broadcast_to((128, 4, 16)), op=nl.add, "
             "dtype=tile.dtype)"],
        ),
        (
            ["nisa.tensor_copy(dst=out[0:512, 0:16].reshape_dim(0, (4, 128)).permute((1, 0, 2)), "
             "src=x[0:256, 0:16].reshape_dim(0, (2, 128)).permute((1, 0, 2)))"],
            ["out[nl.arange(128)[:, None, None] + 128 * nl.arange(4)[None, :, None], "
             "nl.arange(16)[None, None, :]] = nisa.tensor_copy(src=x[nl.arange(128)[:, None, None] "
             "+ 128 * nl.arange(2)[None, :, None], nl.arange(16)[None, None, :]], "
             "dtype=out.dtype)"],
        ),
        (  # pred has the shape of the tile, as the documentation wants, with every axis of it
            ["nisa.affine_select(dst=tile, pattern=[[0, 4], [0, 16]], channel_multiplier=-1, "
             "offset=9, on_true_tile=tile, on_false_value=0.0, cmp_op=nl.greater_equal)"],
            ["tile[...] = nisa.affine_select(pred=(9 - nl.arange(tile.shape[0])[:, None, None] + "
             "0 * nl.arange(4)[None, :, None] + 0 * nl.arange(16)[None, None, :] >= 0), "
             "on_true_tile=tile, on_false_value=0.0, dtype=tile.dtype)"],
        ),
        (
            ["flat = tile.reshape((128, 64))",
             "nisa.tensor_copy(dst=x[0:128, 0:64], src=flat)"],
            ["x[0:128, 0:64] = nisa.tensor_copy(src=tile.reshape((128, 64))[0:128, 0:64], "
             "dtype=x.dtype)"],
        ),
    ],
    ids=["free axes as one", "an axis of one element", "two strided views", "a predicate",
         "a whole tile in two dimensions"],
)  # fmt: skip
def test_views(lines, made):
    (kernel,) = ast.parse(to_beta_1(VIEWS.format("\n    ".join(lines)))).body[3:]
    body = [ast.unparse(statement) for statement in kernel.body]
    assert body[-1 - len(made) : -1] == [ast.unparse(ast.parse(line)) for line in made]


KERNEL = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def kernel(x):
    out = nl.ndarray((128, 64), dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 64), dtype=x.dtype, buffer=nl.sbuf)
    {}
    nisa.dma_copy(dst=out[0:128, 0:64], src=tile)
    return out
"""


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("nisa.rng(dst=tile)", "nisa.rng"),
        (
            "nisa.dma_copy(dst=tile, src=x[0:128, 0:64].expand(1).permute((1, 0)))",
            "the view x[0:128, 0:64].expand(1).permute((1, 0))",
        ),
        (
            "nisa.dma_copy(dst=tile, src=x[0:128, 0:64].reshape_dim(1, (4, 4, 4)))",
            "the view .reshape_dim(1, (4, 4, 4))",
        ),
    ],
)
def test_what_has_no_form_is_refused_by_name(line, what):
    with pytest.raises(CodegenError) as refused:
        to_beta_1(KERNEL.format(line))
    assert f"no form for {what}, which" in str(refused.value)


def test_beta_1_is_refused_where_it_does_not_compile():
    with pytest.raises(SpecError, match="NKI Beta 1 does not compile for trn3"):
        build_kernel(spec_of(SPECS["matmul"]), "trn3", dialect="neuronxcc", options=OFF)


def test_the_dialect_is_in_the_key_the_name_and_the_metadata():
    spec, target = LowRankSpec(m=4, k=64, r=16, n=64), get("trn1")
    made = {name: build_kernel(spec, "trn1", dialect=name) for name in ("nki", "neuronxcc")}
    keys = {name: kernel_key(spec, target, None, dialect=name) for name in made}
    assert [k.to_dict()["dialect"] for k in keys.values()] == list(made)
    assert len({k.digest for k in keys.values()}) == len({k.name for k in made.values()}) == 2
    assert {name: kernel.meta["dialect"] for name, kernel in made.items()} == {n: n for n in made}
    again = build_kernel(spec, "trn1", dialect="neuronxcc")
    assert again.source == made["neuronxcc"].source
    assert again.dialect == "neuronxcc"
    schedule = made["nki"].schedule
    assert kernel_source(spec, schedule, target, "neuronxcc")[1] == again.source
    assert "--dialect neuronxcc" in _command(again.spec, again.target, again.dialect)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("import neuronxcc.nki as nki", "import neuronxcc.nki"), "import of neuronxcc.nki"),
        (("import neuronxcc.nki as nki", "import neuronxcc as nki"), "import of neuronxcc"),
        (("neuronxcc.nki.isa as nisa", "neuronxcc.nki.nccl as nisa"), "import of neuronxcc.nki.nc"),
        (("nl.static_range(2)", "nl.static_range(1000000000)"), "a range of 1000000000"),
        (("@nki.jit", "@nki.baremetal"), "decorator nki.baremetal"),
    ],
)
def test_a_foreign_file_of_beta_1_is_a_kernel_and_nothing_else(change, reason):
    source = build_kernel(spec_of(SPECS["lowrank"]), "trn1", dialect="neuronxcc").source
    assert change[0] in source
    with pytest.raises(CacheTrustError, match=reason):
        check_shape("kernel.py", source.replace(*change))


@pytest.mark.long
@pytest.mark.parametrize("target", ["trn1", "trn2"])
@pytest.mark.parametrize("family", SPECS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_random_specs_are_right(family, target, data):
    spec = data.draw(RANDOM[family])
    try:
        kernel = build_kernel(spec, target, dialect="neuronxcc", options=OFF)
    except (SpecError, CapacityError):
        return  # nothing legal, in either dialect
    assert lint_source(kernel.source) == ()
    prove_right(kernel, seed=1)


# In an interpreter that is not ours.

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "beta1_interpreter.py"
INSTALL = (
    "git clone https://github.com/Deep-Learning-Profiling-Tools/triton-viz; "
    "pytest tests/codegen --triton-viz triton-viz"
)


@pytest.mark.parametrize("target", ["trn1", "trn2"])
def test_every_family_is_right_in_triton_viz(request, target):
    clone = request.config.getoption("--triton-viz", default=None)
    if clone is None:
        pytest.skip(INSTALL)
    lines = ran(SCRIPT, clone, "--target", target, timeout=600).stdout.splitlines()
    assert len(lines) == 28
    assert all(": right, " in line for line in lines)
