"""Real kernel files through `simulate`: the trace of a kernel gives the timeline one expects."""

from pathlib import Path

import pytest

from nmm_compiler.simulator.run import ArraySpec, simulate

KERNELS = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
MATMUL = KERNELS / "matmul_steps.py"


def product(kernel, size=512, **arguments):
    operands = [ArraySpec((size, size), "bfloat16")] * 2
    return simulate(f"{MATMUL}:{kernel}", *operands, mode="timing", **arguments)


@pytest.mark.parametrize(
    ("kernel", "arguments", "loads"),
    [
        ("loaded_inside", {"hoisted": False}, 16 * 2),
        ("loaded_inside", {"hoisted": True}, 16 + 16),
        ("free_dimensions_blocked", {"block_m": 2, "block_n": 1, "whole_rows": False}, 16 + 2 * 4),
        ("free_dimensions_blocked", {"block_m": 4, "block_n": 1, "whole_rows": True}, 4 + 4),
    ],
)
def test_matmul_steps(kernel, arguments, loads):
    profile = product(kernel, **arguments).profile
    assert profile.instructions["tensor"] == {"nc_matmul": 16}
    assert profile.instructions["dma"] == {"dma_copy": loads + 4}
    assert profile.flops == 2 * 512**3
    assert profile.minimal_hbm_bytes == 3 * 512 * 512 * 2
    assert profile.hbm_write_bytes == 512 * 512 * 2
    assert profile.latency_us > profile.roofline_us


def test_each_step_is_at_least_as_fast_as_the_one_before():
    steps = [
        product("loaded_inside", 1024, hoisted=False),
        product("loaded_inside", 1024, hoisted=True),
        product("free_dimensions_blocked", 1024, block_m=4, block_n=2, whole_rows=False),
        product("free_dimensions_blocked", 1024, block_m=4, block_n=2, whole_rows=True),
    ]
    times = [step.profile.latency_us for step in steps]
    assert times == sorted(times, reverse=True)
