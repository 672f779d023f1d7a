"""Kernels of two cores: every way of sharing the work gives what float64 gives, in less time."""

import dataclasses

import pytest
import torch

from kernels.judge import best_of_each_split, prove_every_split, prove_right, spec_of
from nmm_compiler import LowRankSpec, build_kernel, rewrite, simulate
from nmm_compiler.codegen.check_against_float64 import random_arrays
from nmm_compiler.codegen.choose import choose, rank
from nmm_compiler.errors import CapacityError, CodegenError, SimulationError, SpecError
from nmm_compiler.kernels.base import SPLITS
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, MatmulSpec
from nmm_compiler.ops.call_options import executor_name
from nmm_compiler.options import Options
from nmm_compiler.prices.ways import ways
from nmm_compiler.runtime import executor as _registered  # noqa: F401
from nmm_compiler.runtime.kernels import KERNELS
from nmm_compiler.targets import get

SMALL = spec_of("lowrank m=6 k=512 r=200 n=384 lnc=2")
TRN2 = get("trn2")


@pytest.mark.parametrize(
    "line",
    [
        "matmul m=6 k=256 n=384 bias out_layout=col",
        "lowrank_shared m=6 k=256 pairs=200:256 pairs=128:384,128",
        "gated_mlp_up m=6 k=256 r=200 n=256 gate_bias",
        "gated_mlp m=6 k=256 r=200 n=256 down_bias",
        "gated_mlp m=6 k=256 n=256",
        "lowrank m=6 k=512 r=200 n=384",
        "lowrank m=6 k=512 r=200 n=384 x_layout=col out_layout=col bias",
        "lowrank m=6 k=512 r=200 n=384 u_layout=col v_layout=col scale=0.5 activation=silu",
        "lowrank m=6 k=512 r=200 n=384 inner_bias inner_activation=relu bias",
        "lowrank m=6 k=512 r=200 n=384 dtype=float8_e4m3 scales=channel",
        "lowrank m=6 k=512 r=200 n=384 base w_layout=col",
        pytest.param("lowrank m=320 k=512 r=256 n=512", marks=pytest.mark.long),
    ],
)
def test_every_split_agrees_with_float64(line):
    prove_every_split(spec_of(f"{line} lnc=2"), set(SPLITS))


def test_the_option_reaches_the_kernels_of_a_call():
    """Executor "simulator" runs the kernel of two cores, which this process then holds."""
    generator = torch.Generator().manual_seed(0)
    x, u, v = (torch.randn(size, generator=generator) for size in ((4, 256), (256, 64), (64, 128)))
    executor = executor_name(Options(executor="simulator", lnc=2, buckets=(4,)))
    got = torch.ops.nmm.lowrank_matmul(x, u, v, executor=executor)
    spec = LowRankSpec(m=4, k=256, r=64, n=128, dtype="float32", lnc=2)
    arrays = [tensor.numpy() for tensor in (x, u, v)]
    assert (abs(got.numpy() - spec.reference(*arrays)) <= spec.error_bound(*arrays)).all()
    assert any(kernel.spec == spec for kernel in KERNELS.found.values())


def test_one_core_runs_what_two_cannot_share():
    """As it is priced: an odd number of outputs, or what tensor parallelism left of an MLP."""
    executor = executor_name(Options(executor="simulator", lnc=2, buckets=(1,)))
    got = torch.ops.nmm.matmul(torch.ones(1, 256), torch.ones(256, 127), executor=executor)
    assert torch.equal(got, torch.full((1, 127), 256.0))
    narrow = GatedMLPSpec(m=1, k=256, n=128, gate_r=0, up_r=0, down_r=0)
    assert narrow.on_cores(2) == narrow
    assert dataclasses.replace(narrow, n=512).on_cores(2).lnc == 2


@pytest.mark.parametrize(
    ("sizes", "split"),
    [
        ("m=1 context=300 heads=8 kv_heads=2", "heads"),
        ("m=3 context=256 heads=4 kv_heads=1 rope=q", "query_heads"),
        ("m=130 heads=2 d=64 rope=qk window=100", "heads"),
        ("m=130 heads=2 kv_heads=1 d=64 k_layout=col", "query_heads"),
        ("m=1 context=256 heads=3 kv_heads=3 batch=2", "heads"),
    ],
)
@pytest.mark.parametrize("loop", [False, pytest.param(True, marks=pytest.mark.long)])
def test_attention_is_shared_by_heads(sizes, split, loop):
    """Prefill and decode; groups of heads, or the query heads of the only one."""
    spec = spec_of(f"attention d=32 lnc=2 {sizes}")
    choice = next(choice for choice in rank(spec, TRN2) if not choice.schedule.loop)
    schedule = (
        choice.schedule.in_loop(spec.share(choice.schedule.split), TRN2)
        if loop
        else choice.schedule
    )
    assert schedule.split == split
    prove_right(build_kernel(spec, "trn2", schedule))


@pytest.mark.parametrize(("split", "x", "w"), [("tokens", 1, 2), ("weights", 2, 1)])
def test_a_profile_counts_the_bytes_of_both_cores(split, x, w):
    """Tokens split: each core reads all of w. Weights split: each reads all of x."""
    spec = MatmulSpec(m=64, k=256, n=512, lnc=2)
    kernel = build_kernel(spec, "trn2", best_of_each_split(spec)[split])
    profile, (x_tensor, w_tensor) = kernel.profile(), spec.inputs()
    assert profile.hbm_read_bytes == x * x_tensor.bytes + w * w_tensor.bytes
    assert profile.hbm_write_bytes == spec.outputs()[0].bytes
    assert profile.minimal_hbm_bytes == profile.hbm_read_bytes + profile.hbm_write_bytes
    moved = profile.mbu * profile.latency_us * 1e-6 * TRN2.hbm_bytes_per_second
    assert 2 * moved == pytest.approx(profile.hbm_read_bytes + profile.hbm_write_bytes)


def test_passes_decide_for_the_cores_of_the_options():
    """Options(lnc=2): a match's predicted times are those of two cores."""
    inputs = tuple(map(torch.randn, ((16, 1024), (1024, 128), (128, 1024))))
    spec = LowRankSpec(m=16, k=1024, r=128, n=1024, dtype="float32")
    for lnc in (1, 2):
        (match,) = rewrite(lambda x, u, v: x @ u @ v, inputs, options=Options(lnc=lnc)).matches
        assert match.info["predicted"]["fused"] == ways(spec, "trn2", lnc).fused


@pytest.mark.parametrize(
    ("changes", "splits"),
    [
        ({"m": 7}, {"weights"}),
        ({"n": 333}, {"tokens"}),
        ({"k": 384}, {"tokens", "weights"}),
    ],
)
def test_only_even_sizes_are_shared(changes, splits):
    assert set(best_of_each_split(dataclasses.replace(SMALL, **changes))) == splits


@pytest.mark.parametrize(
    ("spec", "given", "error", "words"),
    [
        (SMALL, {"lnc": 3}, SpecError, "pass 1 or 2"),
        (SMALL, {"dialect": "neuronxcc"}, CodegenError, "lnc=2"),
        (dataclasses.replace(SMALL, lnc=1), {"schedule": {}}, SpecError, "is for two cores"),
        (SMALL, {"schedule": {"split": ""}}, SpecError, "split is ''"),
        (SMALL, {"schedule": {"banks": 9}}, CapacityError, "PSUM banks"),
    ],
    ids=str,
)
def test_what_two_cores_cannot_do_is_refused(spec, given, error, words):
    if "schedule" in given:
        schedule = best_of_each_split(SMALL)["weights"]
        given = {"schedule": dataclasses.replace(schedule, **given["schedule"])}
    with pytest.raises(error, match=words):
        build_kernel(spec, **{"target": "trn2"} | given)


def test_one_core_and_two_are_told_apart():
    kernel = build_kernel(dataclasses.replace(SMALL, lnc=1), "trn2", lnc=2)
    assert kernel.spec == SMALL
    assert "_lnc2_" in kernel.name


ATTENTION = "attention heads=8 kv_heads=4 d=64"
WIDE = "lowrank k=2048 r=1280 n=8192 x_layout=col"


@pytest.mark.parametrize(
    ("line", "split", "least"),
    [
        (f"{WIDE} m=1", "weights", 1.8),
        pytest.param(f"{WIDE} m=1024", "tokens", 1.85, marks=pytest.mark.long),
        # whole groups need no exchange, so only starts and ends of a kernel do not shrink
        (f"{ATTENTION} m=1 context=16384", "heads", 1.5),
        (f"{ATTENTION} m=1024", "heads", 1.5),
    ],
)
def test_two_cores_take_about_half_of_the_time(line, split, least):
    one, two = (choose(spec_of(f"{line} lnc={lnc}"))[0] for lnc in (1, 2))
    assert two.schedule.split == split
    assert least <= one.simulated_us / two.simulated_us <= 2.0


def test_the_exchange_needs_the_other_core():
    kernel = build_kernel(SMALL, "trn2", best_of_each_split(SMALL)["weights"])
    assert kernel.source.count("nisa.sendrecv(") == 1
    with pytest.raises(SimulationError, match="single program has no peer"):
        simulate(kernel, *random_arrays(SMALL), grid=1)
