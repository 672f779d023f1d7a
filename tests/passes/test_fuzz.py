"""Random graphs: the rewritten graph computes what the original does, and chains do fire."""

from collections import Counter

import pytest
import torch
from fuzz_graphs import build
from models import VERIFIED, Backend
from torch import fx

from nmm_compiler.passes.pipeline import run


class _Largest(fx.Interpreter):
    """Runs a graph and keeps the largest magnitude of any value."""

    largest = 1.0

    def run_node(self, node):
        value = super().run_node(node)
        if isinstance(value, torch.Tensor):
            self.largest = max(self.largest, float(value.abs().max()))
        return value


def _same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare strides; of a view with gaps (a slice) only the order is kept."""
    real = [d for d in range(a.dim()) if a.shape[d] != 1]
    order = sorted(real, key=lambda d: -a.stride()[d])
    if a.squeeze().permute([real.index(d) for d in order]).is_contiguous():
        return all(a.stride()[d] == b.stride()[d] for d in real)
    return order == sorted(real, key=lambda d: -b.stride()[d])


def assert_same(seed: int, wanted, found, bound: float) -> None:
    """Hold results to those of the original graph: shapes, strides, and values to a bound."""
    for index, (a, b) in enumerate(zip(wanted, found, strict=True)):
        assert a.shape == b.shape, f"seed {seed}, output {index}: {a.shape} != {b.shape}"
        assert _same_strides(a, b), f"seed {seed}, output {index}: {a.stride()} {b.stride()}"
        error = float((a - b).abs().max()) if a.numel() else 0.0
        assert error <= bound, f"seed {seed}, output {index}: {error:.2e} > {bound:.2e}"


def check(seed: int) -> Counter:
    """Rewrite the graph of a seed and compare it with the original; return the kinds found."""
    program = build(seed)
    result = run(program.module, (program.x.clone(),), VERIFIED)
    probe = _Largest(program.module)
    probe.run(program.x.clone())
    first, second = program.x.clone(), program.x.clone()
    want, got = program.module(first), result.graph_module(second)
    # Every op rounds once per element and every contraction at most once per term; weights have
    # norm 1, and products of activations scale an error by at most the largest value.
    bound = 2.0**-23 * program.length * 8 * probe.largest**2
    assert_same(seed, (*want, first), (*got, second), bound)
    again = run(result.graph_module, (program.x.clone(),))
    assert not again.matches, f"seed {seed}: a second run still rewrites\n{again}"
    return Counter(m.kind for m in result.matches)


def _run(seeds: range) -> Counter:
    found: Counter = Counter()
    for seed in seeds:
        kinds = check(seed)
        found.update(kinds)
        found["graphs"] += 1
        found["graphs with a match"] += bool(kinds)
    print(dict(found))
    return found


def test_thirty_random_graphs():
    found = _run(range(30))
    assert found["graphs with a match"] >= 15
    assert found["lowrank"] >= 20


@pytest.mark.parametrize("seed", [1605, 2140, 6028, 11752])
def test_graphs_that_once_went_wrong(seed):
    """A copy between a write and its reader; an operand inside of a call; a scaled sum; a product
    that stays and sums in another order, since its operand lies in another one."""
    check(seed)


@pytest.mark.long
def test_two_thousand_random_graphs():
    found = _run(range(30, 60)) + _run(range(1000, 3000))
    assert found["graphs with a match"] >= 1000
    assert found["lora"] >= 100
    assert found["gated_mlp_up"] >= 100
    assert found["gated_mlp"] >= 50
    assert found["shared_x"] >= 50
    assert found["shared_u"] >= 50


def check_low_precision(seed: int, dtype: torch.dtype) -> Counter:
    """Compare errors against float64 before and after; return the kinds found."""
    program, exact = build(seed, dtype), build(seed, dtype, torch.float64)
    result = run(program.module, (program.x.clone(),), VERIFIED)
    truth = exact.module(exact.x.clone())
    want = program.module(program.x.clone())
    got = result.graph_module(program.x.clone())
    probe = _Largest(exact.module)
    probe.run(exact.x.clone())
    unit = torch.finfo(dtype).eps / 2
    for index, (a, b, t) in enumerate(zip(want, got, truth, strict=True)):
        assert b.dtype == a.dtype, f"seed {seed}, output {index}: {b.dtype}"
        if not a.numel() or not bool(a.isfinite().all()):
            continue
        before, after = (float((y.double() - t).abs().max()) for y in (a, b))
        # A rewrite takes roundings away, but for those of folded and joined factors and biases:
        # one each, on values that products of activations scale by the largest value at most.
        allowed = 2 * before + 8 * unit * probe.largest**2
        assert after <= allowed, (
            f"seed {seed}, output {index}: {after:.1e} > {allowed:.1e}\n{result}"
        )
    return Counter(m.kind for m in result.matches)


def check_dynamic(seed: int) -> int:
    """Compile the graph of a seed for any token count; return how many chains were found."""
    program = build(seed)
    found = Backend(VERIFIED)
    probe = _Largest(program.module)
    compiled = torch.compile(program.module, backend=found, dynamic=True)
    shape = program.x.shape
    for more in (0, 2, 5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*shape[:-2], shape[-2] + more, shape[-1], generator=generator)
        try:
            want = program.module(x.clone())
        except RuntimeError:
            continue  # the graph holds a size of its own
        probe.run(x.clone())
        got = compiled(x.clone())
        bound = 2.0**-23 * program.length * 8 * probe.largest**2
        assert_same(seed, want, got, bound)
    return sum(result.chains for result in found)


@pytest.mark.parametrize(
    ("seeds", "least"),
    [
        (range(15), {"lowrank": 8}),
        pytest.param(
            (*range(15, 30), *range(3000, 4000)), {"lora": 50, "lowrank": 500},
            marks=pytest.mark.long,
        ),
    ],
    ids=["fifteen", "a thousand"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_graphs_in_low_precision(dtype, seeds, least):
    found = Counter()
    for seed in seeds:
        found.update(check_low_precision(seed, dtype))
    assert all(found[kind] >= count for kind, count in least.items()), found


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(5000, 5200), marks=pytest.mark.long)], ids=str
)
def test_random_graphs_with_any_token_count(seeds):
    assert sum(map(check_dynamic, seeds)) >= len(seeds)
