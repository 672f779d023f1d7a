"""nki.collectives between simulated ranks: results, refusals, time."""

import numpy as np
import pytest
from simulator_kernels import HEADER, kernel_file, refusals

import nmm_compiler
from nmm_compiler import errors
from nmm_compiler.simulator.run import ArraySpec, simulate_ranks
from nmm_compiler.targets import get
from nmm_compiler.targets.collective_time import collective_alone_us

KERNEL = (
    "import nki.collectives as ncc\n"
    + HEADER
    + """@nki.jit
def kernel(a, n):
    group = ncc.ReplicaGroup([list(range(n))])
    dst = nl.ndarray({shape}, a.dtype, nl.shared_hbm)
    src = nl.ndarray(a.shape, a.dtype, nl.private_hbm)
    nisa.dma_copy(dst=src, src=a)
    {call}
    return dst
"""
)
CALLS = {
    "all_reduce": ("a.shape", "ncc.all_reduce([src], [dst], group, nl.add)", lambda x, r: x.sum(0)),
    "maximum": (
        "a.shape", "ncc.all_reduce([src], [dst], group, nl.maximum)", lambda x, r: x.max(0)
    ),
    "all_gather": (
        "(a.shape[0] * n, a.shape[1])", "ncc.all_gather([src], [dst], group, 0)",
        lambda x, r: np.concatenate(x),
    ),
    "reduce_scatter": (
        "(a.shape[0] // n, a.shape[1])", "ncc.reduce_scatter([src], [dst], group, 0, nl.add)",
        lambda x, r: np.split(x.sum(0), len(x))[r],
    ),
    "all_to_all": (
        "a.shape", "ncc.all_to_all([src], [dst], group, 0)",
        lambda x, r: np.concatenate([np.split(y, len(x))[r] for y in x]),
    ),
    "permute": (
        "a.shape",
        "ncc.collective_permute([src], [dst], [(i, (i + 1) % n) for i in range(n)])",
        lambda x, r: x[r - 1],
    ),
    "ring": (
        "a.shape", "ncc.collective_permute_implicit([[src]], [[dst]], group)",
        lambda x, r: x[r - 1],
    ),
    "ring with a reduction": (
        "a.shape",
        "ncc.collective_permute_implicit_reduce([[src]], [[src]], [[dst]], group, nl.add)",
        lambda x, r: 2 * x[r - 1],
    ),
}  # fmt: skip


def kernel_of(shape, call):
    return f"{kernel_file(KERNEL.format(shape=shape, call=call))}:kernel"


ALL_REDUCE = kernel_of(*CALLS["all_reduce"][:2])


def run(shape, call, inputs, **options):
    options.setdefault("mode", "functional")
    return simulate_ranks(kernel_of(shape, call), [(a, len(inputs)) for a in inputs], **options)


def data(ranks, rows=64):
    r = np.random.default_rng(ranks)
    return r.integers(-8, 8, (ranks, rows, 8)).astype(np.float32)  # sums are exact


@pytest.mark.parametrize("ranks", [2, 4, 64])
@pytest.mark.parametrize("name", list(CALLS))
def test_every_rank_gets_its_part(name, ranks):
    shape, call, wanted = CALLS[name]
    x = data(ranks)
    done = run(shape, call, x)
    assert len(done) == ranks
    for rank, result in enumerate(done):
        assert np.array_equal(result.output, wanted(x, rank))


def test_two_programs_a_rank():
    x = data(3, 6)
    inputs = [{"a": a, "n": 3} for a in x]
    for result in simulate_ranks(ALL_REDUCE, inputs, grid=2, mode="functional"):
        assert np.array_equal(result.output, x.sum(0))


def test_sbuf_tensors_gather_along_the_free_dimension():
    call = """s, t = load(a), nl.ndarray((8, 8 * n), a.dtype, nl.sbuf)
    ncc.all_gather([s], [t], group, 1)
    nisa.dma_copy(dst=dst, src=t)"""
    x = data(4, 8)
    for result in run("(8, 8 * n)", call, x):
        assert np.array_equal(result.output, np.concatenate(x, axis=1))


def test_a_ring_knows_whose_data_it_processes():
    call = """group = ncc.ReplicaGroup([list(range(n))[::-1]])
    me = nl.ndarray((1, 1), nl.int32)
    for step in range(n):
        rank = ncc.collective_permute_implicit_current_processing_rank_id(step, group)
        nisa.register_store(me, rank)
        nisa.dma_copy(dst=dst[0:1, step : step + 1], src=me)
    nisa.register_store(me, ncc.rank_id())
    nisa.dma_copy(dst=dst[0:1, n : n + 1], src=me)"""
    for rank, result in enumerate(run("(1, n + 1)", call, data(3))):
        assert result.output.tolist() == [[(rank + s) % 3 for s in range(3)] + [rank]]


def test_it_takes_the_published_time():
    for ranks, size in ((4, 64), (64, 64), (64, 65536)):
        spec = ArraySpec((size, 32), "float32")
        results = simulate_ranks(ALL_REDUCE, [(spec, ranks)] * ranks, mode="timing")
        trace = results[0].trace.instructions
        (record,) = [i for i in trace if i.op == "all_reduce"]
        wanted = collective_alone_us(size * 32 * 4, ranks, get("trn2"))
        assert record.attributes["collective_us"] == wanted
        alone = simulate_ranks(ALL_REDUCE, [(spec, 1)], mode="timing")[0].profile
        assert wanted < results[0].profile.latency_us < wanted + alone.latency_us


def test_ranks_are_timed_in_program_order_too():
    text = (
        "import nki\nimport nki.isa as nisa\nimport nki.language as nl\n"
        + """
@nki.jit
def kernel(a):
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for row in range(0, a.shape[0], 128):
        tile = nl.ndarray((128, a.shape[1]), dtype=a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=a[row : row + 128, :])
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        nisa.dma_copy(dst=result[row : row + 128, :], src=tile)
    return result
"""
    )
    path, spec = f"{kernel_file(text)}:kernel", ArraySpec((512, 512), "float32")
    taken = []
    for reorder in (True, False):
        ranks = simulate_ranks(path, [(spec,)] * 2, mode="timing", reorder=reorder)
        alone = nmm_compiler.simulate(path, spec, mode="timing", reorder=reorder)
        assert {r.profile.latency_us for r in ranks} == {alone.profile.latency_us}
        taken.append(alone.profile.latency_us)
    assert taken[0] < taken[1]  # loads do not wait for the stores before them


REFUSED = refusals(r"""
ncc.all_reduce([src], [dst], group, nl.multiply)  # UnsupportedInstructionError: nl.multiply
ncc.all_reduce([src], [load(a)], group, nl.add)  # OperandError: in HBM
ncc.all_to_all([load(a)], [load(a)], group, 0)  # OperandError: must be in HBM
s = load(a); ncc.all_reduce([s, s], [s, s], group, nl.add)  # OperandError: 2 tensors
ncc.all_gather([src], [dst], group, 1)  # OperandError: collective_dim=1
ncc.all_gather([src], [dst], group, 0)  # OperandError: makes
ncc.all_reduce([src], [dst], group, nl.add, priority=1)  # OperandError: priority
ncc.all_reduce(src, [dst], group, nl.add)  # KernelArgumentError: a list
ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0, 9]]), nl.add)  # KernelArgumentError: groups
ncc.all_reduce([src], [dst], ncc.ReplicaGroup([[0], [0, 1]]), nl.add)  # KernelArgumentError: one group
ncc.collective_permute([src], [dst], [(0, 1), (1, 1)])  # KernelArgumentError: receives once
""")  # noqa: E501


@pytest.mark.parametrize(("call", "kind", "said"), REFUSED)
def test_refusals(call, kind, said):
    for mode in ("functional", "timing"):
        with pytest.raises(kind, match=said):
            run("a.shape", call.replace("\n", "\n    "), data(2), mode=mode)


def test_a_rank_that_never_comes_is_an_error_and_no_hang():
    call = "if a.shape[0] == 4:\n        ncc.all_reduce([src], [dst], group, nl.add)"
    inputs = [(np.ones((4, 8), np.float32), 2), (np.ones((6, 8), np.float32), 2)]
    with pytest.raises(errors.SimulationError, match="all_reduce of ranks"):
        simulate_ranks(kernel_of("a.shape", call), inputs)
    with pytest.raises(errors.KernelArgumentError, match="65 ranks"):
        simulate_ranks(ALL_REDUCE, inputs[:1] * 65)


def test_unwritten_elements_stay_unknown_on_the_other_rank():
    call = """src = nl.ndarray(a.shape, a.dtype, nl.private_hbm, name="open")
    nisa.dma_copy(dst=src[0:32], src=a[0:32])
    ncc.all_reduce([src], [dst], group, nl.add)"""
    with pytest.raises(errors.HazardError, match="'open'"):
        run("a.shape", call, data(2))
