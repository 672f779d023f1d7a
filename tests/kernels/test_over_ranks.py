"""Low-rank kernels of many ranks: each rank's result is what float64 says of the whole product."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels.judge import best_of_each_split, prove_every_split, prove_right, spec_of
from kernels.op_calls import TOKENS, K, N, R, calls, weight
from nmm_compiler import LowRankSpec, build_kernel
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.codegen.choose import rank, simulated
from nmm_compiler.errors import (
    CodegenError,
    KernelArgumentError,
    NeuronSetupError,
    ShapeError,
    SpecError,
)
from nmm_compiler.ops.registration import DEFINITIONS, OPS
from nmm_compiler.runtime import neuron
from nmm_compiler.simulator.run import simulate_ranks
from nmm_compiler.targets import get
from nmm_compiler.targets.collective_time import collective_alone_us

WHOLE = LowRankSpec(m=6, k=512, r=256, n=384)
TRN2 = get("trn2")
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("changes", "tp"),
    [
        ("", 2),
        ("", 4),
        ("x_layout=col out_layout=col u_layout=col bias", 2),
        ("r=200 inner_bias inner_activation=silu", 2),
        pytest.param("scale=0.5 activation=silu v_layout=col", 2, marks=LONG),
        pytest.param("dtype=float32", 2, marks=LONG),
        ("dtype=float8_e4m3 scales=channel", 2),
        pytest.param("m=1100", 2, marks=LONG),
    ],
)
def test_the_result_of_every_rank_agrees_with_float64(changes, tp):
    spec = spec_of(f"lowrank m=6 k=512 r=256 n=384 {changes}").sharded(tp, "rows")
    prove_right(build_kernel(spec, "trn2", best_of_each_split(spec)[""]))


def test_two_cores_of_each_rank():
    prove_every_split(dataclasses.replace(WHOLE, lnc=2).sharded(2, "rows"), {"tokens", "weights"})


def test_the_rounding_before_the_sum_is_in_the_bound():
    """Sums of 4 ranks' bfloat16 parts may be further off, and no further than the bound says."""
    arrays = random_arrays(WHOLE)
    one, four = (spec.error_bound(*arrays) for spec in (WHOLE, WHOLE.sharded(4, "rows")))
    assert np.all(four > one)
    assert four.max() < 5 * one.max()


def test_the_time_is_that_of_its_collective_more():
    spec = WHOLE.sharded(4, "rows")
    alone = dataclasses.replace(spec, tp=1, tp_axis="")
    schedule = rank(spec, TRN2)[0].schedule
    taken, without = (simulated(one, schedule, TRN2)[0] for one in (spec, alone))
    assert spec.exchanged_bytes() == 6 * 256 * 2
    exchange = collective_alone_us(6 * 256 * 2, 4, TRN2)
    start = 1e6 * 2 * TRN2.dma_start_latency_seconds
    assert exchange - 1.0 < taken - without < exchange + start + 3.0


def test_the_timing_of_one_rank_is_that_of_all():
    kernel = build_kernel(WHOLE.sharded(4, "rows"), "trn2")
    every = kernel.simulate_ranks(*random_arrays(WHOLE))
    assert {one.profile.latency_us for one in every} == {kernel.profile().latency_us}


def test_refusals_say_what_to_do():
    """And those of test_refused_specs.py."""
    with pytest.raises(ShapeError, match="k is 512, which does not divide by 3 ranks"):
        WHOLE.sharded(3, "rows")
    spec = WHOLE.sharded(2, "rows")
    with pytest.raises(CodegenError, match="collectives between the 2 ranks"):
        build_kernel(spec, "trn2", dialect="neuronxcc")
    with pytest.raises(KernelArgumentError, match="simulate_ranks runs all of them"):
        build_kernel(spec, "trn2").simulate(*spec.shards(*random_arrays(WHOLE))[0])


def test_the_first_run_of_a_rank_is_compared_with_the_product_of_all():
    """Every process has the same operands, so that each knows what the others add."""
    spec = LowRankSpec(m=20, k=256, r=64, n=128, bias=True, v_layout="col").sharded(2, "rows")
    kernel = build_kernel(spec)

    def launch(built, tensors, part=1.0):
        arrays = [t.float().numpy().astype(ml_dtypes.bfloat16) for t in tensors]
        ranks = simulate_ranks(built, [arrays, arrays], target="trn2", mode="functional")
        return (torch.from_numpy(ranks[1].outputs[0].astype(np.float32)) * part,)

    cpu = torch.device("cpu")
    assert neuron.fault(kernel, cpu, launch) is None
    wrong = neuron.fault(kernel, cpu, lambda *given: launch(*given, part=0.5))
    assert "differs from the float64 reference" in wrong


# `nmm.lowrank_matmul` as one of many processes (gloo): results and gradients of one process.

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is missing")
SMALL = LowRankSpec(
    m=6, k=24, r=16, n=32, dtype="float32", u_layout="col", v_layout="col", bias=True,
    inner_bias=True, inner_activation="silu",
)  # fmt: skip
KEYWORDS = {"u_layout": "col", "v_layout": "col", "inner_activation": "silu"}


def problems(name, operands, keywords, mesh, wanted=None):
    """Run a call at each of its rows; return what is not as the row says.

    wanted: what one process computes; None for the call itself.
    """
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    op, found = OPS[name], []
    want = tree_leaves(op(*operands, **keywords) if wanted is None else wanted)
    rule = DEFINITIONS[name]
    rows = rule.sharding(rule.bound(operands, keywords))
    assert len({str(row) for row in rows}) == len(rows)
    for outs, ins in rows:
        given = iter(p for p in ins if p is not None)
        placed = tree_map_only(
            torch.Tensor,
            lambda t, given=given: distribute_tensor(
                t,
                mesh,
                [Replicate() if isinstance(p := next(given), Partial) else p],
                src_data_rank=None,
            ),
            operands,
        )
        with torch.no_grad(), CommDebugMode() as comm:
            got = tree_leaves(op(*placed, **keywords))
        said = [y.placements for y in got]
        if said != [(out,) for out in outs] or comm.get_total_counts():
            found.append(f"{name} {keywords} {ins}: {said}, {comm.get_total_counts()} collectives")
        for y, right in zip(got, want, strict=True):
            if not torch.allclose(y.full_tensor(), right, rtol=1e-12, atol=1e-11):
                found.append(f"{name} {keywords} {ins} -> {outs}: wrong values")
    return found


@torch.no_grad()
def cut_blocks(mesh):
    """Refuse to cut MX weights of three blocks a row over two ranks; others may be."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def cut(tensor, dim):
        place = Replicate() if dim is None else Shard(dim)
        return distribute_tensor(tensor, mesh, [place], src_data_rank=None)

    op, x = OPS["corrected_matmul"], weight(TOKENS, 96) / 8
    values = (torch.arange(N * 48) % 251).byte().reshape(N, 48)
    scales = (torch.arange(N * 3) % 4 + 124).byte().reshape(N, 3)
    for call in (
        lambda: op(cut(x, 1), cut(values, 1), cut(scales, 1)),
        lambda: torch.ops.nmm.dequantize(cut(values, 1), cut(scales, 1), "mxfp4", x.dtype),
    ):
        # DTensor says which operator it is of
        with pytest.raises(Exception, match=r"(?s)^(?=.*3 blocks of 32 inputs).*multiple of 64"):
            call()
    for way in ((1, None), (None, 0)):  # x cut by features, the weight whole or by outputs
        got = op(cut(x, way[0]), cut(values, way[1]), cut(scales, way[1])).full_tensor()
        torch.testing.assert_close(got, op(x, values, scales), rtol=1e-12, atol=1e-11)


def every_row():
    """Each placement row of every op gives the full result without moving an operand first."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    cut_blocks(mesh)
    assert [one for call in calls() for one in problems(*call, mesh)] == []


def test_every_op_has_rules_and_a_call_here():
    assert all(op.sharding is not None for op in DEFINITIONS.values())
    assert {name for name, *_ in calls()} == set(DEFINITIONS)


def test_what_is_not_linear_is_never_summed_over_devices():
    x, u, v, w = weight(TOKENS, K), weight(K, R), weight(R, N), weight(K, N)

    def sums(name, *operands, **keywords):
        op = DEFINITIONS[name]
        rows = op.sharding(op.bound(operands, keywords))
        return sum("Partial" in str(outs) for outs, _ in rows)

    assert sums("lowrank_matmul", x, u, v) == 2
    assert sums("lowrank_matmul", x, u, v, activation="silu") == 0
    assert sums("gated_mlp_up", x, [u, v], [w]) == 0
    # A base has no rank to be cut along: its x w would be added once per device.
    assert sums("lowrank_matmul", x, u, v, None, w) == 1


def operands():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in SMALL.inputs()]


def call(x, u, v, bias, inner, **more):
    return OPS["lowrank_matmul"](x, u, v, bias, None, inner, **KEYWORDS, **more)


def compare_with_one():
    """Results, gradients, and the same call on DTensors, before which nothing moves."""
    from torch.distributed.device_mesh import init_device_mesh

    tp, rank = dist.get_world_size(), dist.get_rank()
    mesh, spec = init_device_mesh("cpu", (tp,)), SMALL.sharded(tp, "rows")
    said = {"tp": tp, "tp_axis": "rows", "group": mesh.get_group().group_name}
    alone = [t.requires_grad_() for t in operands()]
    mine = [t.detach().clone().requires_grad_() for t in spec.shards(*alone)[rank]]
    want, got = call(*alone), call(*mine, **said)
    for y in (want, got):
        y.square().sum().backward()
    gradients = spec.shards(*(t.grad for t in alone))[rank]
    for one, other in ((got, want), *zip((t.grad for t in mine), gradients, strict=True)):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    x, u, v, bias, inner = operands()
    given = "lowrank_matmul", (x, u, v, bias, None, inner), {**KEYWORDS, **said}
    assert problems(*given, mesh, want.detach()) == []


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=LONG)])
def test_processes_compute_what_one_does(count):
    """Of two each placement row of every op as well, in the same processes."""
    on_ranks(count, compare_with_one, *[every_row] * (count == 2))


def test_a_call_that_sums_names_its_group():
    shards = SMALL.sharded(2, "rows").shards(*operands())[0]
    with pytest.raises(SpecError, match="pass group="):
        call(*shards, tp=2, tp_axis="rows")


def test_one_process_runs_no_kernel_of_two_ranks():
    from nmm_compiler.runtime import executor as _registered  # noqa: F401

    shards = SMALL.sharded(2, "rows").shards(*(t.float() for t in operands()))[0]
    said = "one of 2 that exchange data; use .*, or executor 'reference' in as many processes"
    with pytest.raises((SpecError, NeuronSetupError), match=said):
        call(*shards, tp=2, tp_axis="rows", group="0", executor="simulator")
