"""NKI Beta 1: launch grids, decorators, modules, where errors point, and loads."""

import numpy as np
import pytest
from beta1_helpers import HEADER, run, values
from simulator_kernels import kernel_file

from nmm_compiler import errors
from nmm_compiler.simulator.beta1 import instructions, language
from nmm_compiler.simulator.beta1.table import beta_1
from nmm_compiler.simulator.loading.loader import load_file
from nmm_compiler.simulator.run import simulate

GRID = """
    r = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    i, j = nl.program_id(0), nl.program_id(1)
    assert nl.program_ndim() == 2 and nl.num_programs(axes=0) == 4
    rows, columns = nl.ds(i * 64, 64), nl.ds(j * 32, 32)
    nl.store(r[rows, columns], nl.load(a[rows, columns]) + (10.0 * i + j))
    return r
"""
BODY = "@nki.jit\ndef kernel(a):" + GRID


@pytest.mark.parametrize(
    "grid", ["(4, 2)", "(nl.nc(2) * 2, 2)", "(nl.spmd_dim(2, nl.nc(2)), 2)", ""]
)
def test_every_program_of_a_grid_runs_once(grid):
    launched, options = (f"kernel[{grid}]", {}) if grid else ("kernel", {"grid": (4, 2)})
    path = kernel_file(f"{HEADER}{BODY}\nlaunched = {launched}\n")
    a = values(256, 64)
    result = simulate(f"{path}:launched", a, mode="functional", **options)
    steps = 10 * np.repeat(np.arange(4), 64)[:, None] + np.repeat(np.arange(2), 32)
    assert np.array_equal(result.output, a + steps.astype(np.float32))
    assert not result.warnings
    assert len(result.traces) == (2 if "nc" in grid else 1)
    assert sum(len(t.instructions) for t in result.traces) == 3 * 8


CORES = """
    r = nl.ndarray((192, 64), dtype=a.dtype, buffer=nl.shared_hbm)
    i = nl.program_id(0)
    {}
    return r
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("nl.store(r[nl.ds(i * 64, 64)], nl.load(a))", "4096 of 12288 elements of output 'r'"),
        ("nl.store(r[nl.ds(i * 64, 128)], nl.load(b))", ""),
        ("""s = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    if i == {}:
        nl.store(s, nl.load(a))
        nl.store(r[0:128], nl.load(b))
    else:
        nl.store(r[128:192], nl.load(s))""", "two programs use one place"),
    ],
)  # fmt: skip
def test_two_cores_of_a_grid_share_their_outputs(body, said):
    """What one core has not written when it ends, the other one may still write."""
    text = f"{HEADER}@nki.jit\ndef kernel(a, b):{CORES.format(body.format(0))}"
    path = kernel_file(f"{text}\nlaunched = kernel[nl.nc(2)]\n")
    result = simulate(
        f"{path}:launched", *(np.ones((n, 64), np.float32) for n in (64, 128)), mode="functional"
    )
    assert len(result.warnings) == bool(said)
    assert all(said in one for one in result.warnings), result.warnings
    assert all(f"[{path}:" in one for one in result.warnings), result.warnings


@pytest.mark.parametrize("grid", ["nl.nc(2)", "2"])
def test_a_shared_constant_differs_by_core_or_by_program(grid):
    """The programs of one core run one after the other; those of two cores share a constant."""
    body = CORES.format("nl.store(r[nl.ds(i * 64, 128)], nl.load(nl.shared_constant(c + i)))")
    text = f"{HEADER}c = np.ones((128, 64), np.float32)\n@nki.jit\ndef kernel(a):{body}"
    path = kernel_file(f"{text}\nlaunched = kernel[{grid}]\n")
    a = np.ones((64, 64), np.float32)
    if grid == "2":
        assert simulate(f"{path}:launched", a, mode="functional").output[64, 0] == 2
        return
    with pytest.raises(errors.SimulationError, match="all programs of a grid share it"):
        simulate(f"{path}:launched", a, mode="functional")


def test_a_grid_inside_of_a_kernel_is_refused():
    text = f"{HEADER}{BODY}\n@nki.jit\ndef outer(a):\n    return kernel[4, 2](a)\n"
    with pytest.raises(errors.UnsupportedInstructionError, match="err_nested_kernel"):
        simulate(f"{kernel_file(text)}:outer", values(256, 64))


def test_simulate_kernel_benchmark_and_baremetal_run_here():
    text = f"""{HEADER}
def fill(a, result):
    nl.store(result, nl.exp(nl.load(a)))

@nki.baremetal(save_neff_name="file.neff")
def twice(a):
    return out(nl.load(a) * 2.0)

timed = nki.benchmark(warmup=2, iters=3)(twice)
simulate_kernel = nki.simulate_kernel
"""
    module = load_file(kernel_file(text))
    a, result = values(128, 64), np.zeros((128, 64), np.float32)
    module.simulate_kernel(module.fill, a, result)  # fills its parameter, as kernels used to
    assert np.allclose(result, np.exp(a), rtol=2.0**-22)
    assert np.array_equal(module.twice(a), 2 * a)
    module.timed(a)
    profile = simulate(module.twice, a).profile
    latency = module.timed.benchmark_result.nc_latency
    assert latency.get_latency_percentile(99) == profile.device_us


@pytest.mark.parametrize("mode", ["auto", "jax", "torchxla", "baremetal", "simulation", "trace"])
def test_every_mode_of_jit_runs_here(mode):
    text = f"""{HEADER}
@nki.jit(mode={mode!r})
def twice(a):
    return out(nl.load(a) * 2.0)
"""
    a = values(128, 64)
    assert np.array_equal(load_file(kernel_file(text)).twice(a), 2 * a)
    timed = load_file(kernel_file(text.replace(repr(mode), "'benchmark'"))).twice
    assert timed(a) is None
    assert timed.benchmark_result.nc_latency.get_latency_percentile(50) > 0
    with pytest.raises(errors.KernelArgumentError, match="mode 'fast'; Beta 1 has auto, jax"):
        load_file(kernel_file(text.replace(repr(mode), "'fast'")))


def test_a_mutable_parameter_may_be_written():
    text = f"""{HEADER}@nki.jit
def kernel(a: nt.mutable_tensor):
    nl.store(a, nl.load(a) + 1.0)
    return a
"""
    a = values(128, 64)
    assert np.array_equal(simulate(f"{kernel_file(text)}:kernel", a.copy()).output, a + 1)


def test_frameworks_that_are_missing_load_and_are_refused_when_called():
    text = """
import torch_xla.core.xla_model as xm
from neuronxcc.nki._private.private_api import do_while
from torch_neuronx.xla_impl.ops import nki_jit
import neuronxcc.nki.language as nl

@nki_jit
def kernel(a, r):
    nl.store(r, nl.load(a))

def calls(a):
    return do_while(a, a)
"""
    path = kernel_file(text)
    a, r = values(4, 4), np.zeros((4, 4), np.float32)
    simulate(f"{path}:kernel", a, r)
    assert np.array_equal(a, r)
    with pytest.raises(errors.UnsupportedInstructionError, match="do_while"):
        simulate(f"{path}:calls", a)


def test_instructions_and_errors_carry_the_line_that_issued_them():
    text = f"{HEADER}@nki.jit\ndef kernel(a):\n    x = nl.exp(nl.load(a))\n\n    return out(x)\n"
    path = kernel_file(text)
    trace = simulate(f"{path}:kernel", values(8, 8)).trace
    line = text[: text.index("x = nl.exp")].count("\n") + 1
    assert [i.line for i in trace.instructions][:2] == [line, line]
    with pytest.raises(errors.OperandError) as caught:
        run(
            """
            p = nl.load(a)
            x = nisa.tensor_copy(p, engine=nisa.tensor_engine)

            return out(x)
            """, values(8, 8),
        )  # fmt: skip
    assert caught.value.line == HEADER.count("\n") + 4


def test_direct_allocation_puts_blocks_where_it_says():
    result = run(
        """
        t = nl.ndarray((4, par_dim(128), 64), dtype=nl.float32,
                       buffer=ncc.sbuf.mod_alloc(base_addr=1024, num_free_tiles=(2,)))
        r = nl.ndarray((512, 64), dtype=nl.float32, buffer=nl.shared_hbm)
        for i in nl.affine_range(4):
            t[i] = nl.load(a[nl.ds(i * 128, 128), :])
            nl.store(r[nl.ds(i * 128, 128), :], t[i])
        return r
        """, values(512, 64),
    )  # fmt: skip
    assert np.array_equal(result.output, values(512, 64))
    places = [a.address for a in result.trace.allocations.values() if a.address]
    assert places == [(0, 1024), (0, 1280), (0, 1024), (0, 1280)]


@pytest.mark.parametrize("module", [instructions, language])
def test_every_name_of_the_table_is_there(module):
    owner = "nki.isa" if module is instructions else "nki.language"
    assert {n for n in beta_1().names(owner) if "." not in n} <= set(module.NAMES)


LOADS = """
    r = nl.ndarray((512, 512), dtype=nl.float32, buffer=nl.shared_hbm)
    i = nl.mgrid[0:128, 0:512]
    for m in nl.affine_range(4):
        t = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.sbuf)
        t[i.p, i.x] = nl.load(a[i.p, i.x])
        nl.store(r[128 * m + i.p, i.x], t * (1.0 + m))
    return r
"""


def test_every_load_is_charged():
    result = run(LOADS, values(128, 512), mode="full")
    assert result.profile.hbm_read_bytes == 4 * 128 * 512 * 4
