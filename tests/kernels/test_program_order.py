"""A compiler that keeps program order costs a kernel next to nothing: loads come before stores.

The timing model's default lets independent instructions and DMAs pass each other, as AWS documents;
`reorder=False` keeps the order of the file on every engine and queue.
"""

import dataclasses

import pytest

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.codegen.choose import choose
from nmm_compiler.errors import SpecError
from nmm_compiler.kernels.linear.specs import (
    GatedMLPSpec,
    GatedMLPUpSpec,
    LowRankSharedSpec,
    LowRankSpec,
    MatmulSpec,
)
from nmm_compiler.simulator.run import ArraySpec
from nmm_compiler.simulator.timing.timeline import time_trace
from nmm_compiler.targets import get, names

# Layers of Llama-3.2-1B, several panels of weights each, so that loads follow stores.
SPECS = {
    "matmul": MatmulSpec(m=128, k=2048, n=8192, x_layout="col"),
    "lowrank": LowRankSpec(m=512, k=2048, r=1312, n=8192, x_layout="col"),
    "lowrank_shared": LowRankSharedSpec(
        m=512, k=2048, pairs=((832, (2048,)), (320, (512,)), (320, (512,)))
    ),
    "gated_mlp_up": GatedMLPUpSpec(m=128, k=2048, n=8192, r=1312, x_layout="col", out_layout="col"),
    "gated_mlp": GatedMLPSpec(m=128, k=2048, n=8192, r=1312, x_layout="col"),
}


def latencies(kernel, target):
    """Return the predicted latency with and without leave to reorder."""
    arrays = [ArraySpec(t.shape, t.dtype) for t in kernel.spec.inputs()]
    trace = kernel.simulate(*arrays, mode="timing").trace
    return tuple(
        time_trace(trace, get(target), reorder=reorder).latency_us for reorder in (True, False)
    )


# trn1 has no queue of its own for stores: these two wait behind theirs.
BEHIND_STORES = {("lowrank_shared", "trn1"): 1.07, ("gated_mlp_up", "trn1"): 1.13}


@pytest.mark.parametrize("target", names())
@pytest.mark.parametrize("family", SPECS)
def test_program_order_costs_at_most_a_twentieth(family, target):
    free, kept = latencies(build_kernel(SPECS[family], target), target)
    most = BEHIND_STORES.get((family, target), 1.05)
    assert kept <= most * free, f"{kept:.1f} us in program order, {free:.1f} us without it"


def test_what_a_target_cannot_do_is_refused():
    spec = SPECS["lowrank"]
    schedule = choose(spec, "trn1")[0].schedule
    assert not schedule.own_queue
    with pytest.raises(SpecError, match="own_queue needs descriptors that the device writes"):
        dataclasses.replace(schedule, own_queue=True).check(spec, get("trn1"))
