"""Random graphs: the rewritten graph computes what the original does, and chains do fire."""

from collections import Counter

import pytest
import torch
from fuzz_graphs import build
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


def check(seed: int) -> Counter:
    """Rewrite the graph of a seed and compare it with the original; return the kinds found."""
    program = build(seed)
    result = run(program.module, (program.x.clone(),))
    probe = _Largest(program.module)
    probe.run(program.x.clone())
    first, second = program.x.clone(), program.x.clone()
    want, got = program.module(first), result.graph_module(second)
    # Every op rounds once per element and every contraction at most once per term; weights have
    # norm 1, and products of activations scale an error by at most the largest value.
    bound = 2.0**-23 * program.length * 8 * probe.largest**2
    for index, (a, b) in enumerate([*zip(want, got, strict=True), (first, second)]):
        assert a.shape == b.shape, f"seed {seed}, output {index}: {a.shape} != {b.shape}"
        error = float((a - b).abs().max()) if a.numel() else 0.0
        assert error <= bound, f"seed {seed}, output {index}: {error:.2e} > {bound:.2e}\n{result}"
    again = run(result.graph_module, (program.x.clone(),))
    assert not again.rewritten, f"seed {seed}: a second run still rewrites\n{again}"
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


def test_sixty_random_graphs():
    found = _run(range(60))
    assert found["graphs with a match"] >= 30
    assert found["lowrank"] >= 40


@pytest.mark.long
def test_two_thousand_random_graphs():
    found = _run(range(1000, 3000))
    assert found["graphs with a match"] >= 1000
    assert found["lora"] >= 100
    assert found["gated_mlp_up"] >= 100
    assert found["gated_mlp"] >= 50
    assert found["shared_x"] >= 50
    assert found["shared_u"] >= 50
