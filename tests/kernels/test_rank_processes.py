"""`nmm.lowrank_matmul` as one of many processes (gloo): results and gradients of one process."""

import pytest
import torch
import torch.distributed as dist
from processes import on_ranks

from nmm_compiler.errors import NeuronSetupError, SpecError
from nmm_compiler.kernels.linear.specs import LowRankSpec
from nmm_compiler.ops.registration import OPS

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is missing")
WHOLE = LowRankSpec(
    m=6, k=24, r=16, n=32, dtype="float32", u_layout="col", v_layout="col", bias=True,
    inner_bias=True, inner_activation="silu",
)  # fmt: skip
KEYWORDS = {"u_layout": "col", "v_layout": "col", "inner_activation": "silu"}
# Sums of at most 32 terms in another order, in two products and their gradients.
BOUND = 8 * 32 * 2.0**-24


def operands():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t.shape, generator=generator) for t in WHOLE.inputs()]


def call(x, u, v, bias, inner, **more):
    return OPS["lowrank_matmul"](x, u, v, bias, None, inner, **KEYWORDS, **more)


def close(got, want):
    got, want = got.detach(), want.detach()
    return float((got - want).abs().max()) <= BOUND * float(want.abs().max())


def problems(mesh, rank):
    """Return what differs from one process: plain tensors, gradients, DTensors."""
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    tp, found = mesh.size(), []
    spec, given = WHOLE.sharded(tp, "rows"), operands()
    said = {"tp": tp, "tp_axis": "rows", "group": mesh.get_group().group_name}
    alone = [t.clone().requires_grad_() for t in given]
    want = call(*alone)
    shards = spec.shards(*given)[rank]
    mine = [t.clone().requires_grad_() for t in shards]
    got = call(*mine, **said)
    if not close(got, want):
        found.append("result")
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    (want * weight).sum().backward()
    (got * weight).sum().backward()
    grads = spec.shards(*(t.grad for t in alone))[rank]
    for place, tensor in enumerate(WHOLE.inputs()):
        if not close(mine[place].grad, grads[place]):
            found.append(f"gradient of {tensor.name}")
    # the same call on DTensors: nothing moves before it, and the result is whole
    from nmm_compiler.ops.registration import DEFINITIONS

    rows = DEFINITIONS["lowrank_matmul"].sharding(*given[:4], None, given[4], **KEYWORDS, **said)
    if len(rows) != 1:
        found.append(f"{len(rows)} rows")
    outs, ins = rows[0]
    placed = [p for p in ins if p is not None]
    with torch.no_grad():
        tensors = [
            distribute_tensor(tensor, mesh, [placement])
            for tensor, placement in zip(given, placed, strict=True)
        ]
        with CommDebugMode() as seen:
            y = call(*tensors, **said)
        moved = seen.get_total_counts()
        if [type(p) for p in y.placements] != [type(outs[0])] or moved:
            found.append(f"{y.placements}, {moved} collectives")
        if not close(y.redistribute(placements=[Replicate()]).to_local(), want):
            found.append("DTensor")
    return found


def compare_with_one():
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    said = problems(mesh, dist.get_rank())
    assert not said, said


def test_four_processes_compute_what_one_does():
    on_ranks(4, compare_with_one)


def test_a_call_that_sums_names_its_group():
    shards = WHOLE.sharded(2, "rows").shards(*operands())[0]
    with pytest.raises(SpecError, match="pass group="):
        call(*shards, tp=2, tp_axis="rows")


def test_one_process_runs_no_kernel_of_two_ranks():
    from nmm_compiler.runtime import executor as _registered  # noqa: F401

    shards = WHOLE.sharded(2, "rows").shards(*operands())[0]
    said = "one of 2 that exchange data; use .*, or executor 'reference' in as many processes"
    with pytest.raises((SpecError, NeuronSetupError), match=said):
        call(*shards, tp=2, tp_axis="rows", group="0", executor="simulator")
