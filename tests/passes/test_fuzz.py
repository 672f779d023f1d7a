"""Random graphs: the rewritten graph computes what the original does, and chains do fire.

Every rewrite runs both graphs and holds shapes, strides, values and written inputs to bounds that
are derived from dtypes and contraction lengths (`verify`, which test_verify.py holds). What eager
PyTorch computes is compared once more without it, to half of the digits of the dtype.
"""

from collections import Counter

import pytest
import torch
from fuzz_graphs import build
from models import VERIFIED

from nmm_compiler.passes.pipeline import run


def check(seed: int, *dtype: torch.dtype) -> Counter:
    """Rewrite the graph of a seed, and the result once more; return the kinds found."""
    module, x = build(seed, *dtype)
    result = run(module, (x.clone(),), VERIFIED)
    for want, got in zip(module(x.clone()), result.graph_module(x.clone()), strict=True):
        largest = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(
            got / largest, want / largest, rtol=0.0, atol=torch.finfo(x.dtype).eps ** 0.5
        )
    again = run(result.graph_module, (x.clone(),))
    assert not again.matches, f"seed {seed}: a second run still rewrites\n{again}"
    return Counter(m.kind for m in result.matches)


def check_all(seeds, *dtype: torch.dtype) -> Counter:
    found: Counter = Counter()
    for seed in seeds:
        kinds = check(seed, *dtype)
        found.update(kinds)
        found["graphs with a match"] += bool(kinds)
    print(dict(found))
    return found


def test_twelve_random_graphs():
    found = check_all(range(12))
    assert found["graphs with a match"] >= 6
    assert found["lowrank"] >= 7


@pytest.mark.parametrize("seed", [1605, 2140, 6028, 11752])
def test_graphs_that_once_went_wrong(seed):
    """A copy between a write and its reader; an operand inside of a call; a scaled sum; a product
    that stays and sums in another order, since its operand lies in another one."""
    check(seed)


@pytest.mark.long
def test_two_thousand_random_graphs():
    found = check_all(range(12, 60)) + check_all(range(1000, 3000))
    least = {"graphs with a match": 1000, "lora": 100, "gated_mlp_up": 100}
    least |= dict.fromkeys(("gated_mlp", "shared_x", "shared_u"), 50)
    assert all(found[kind] >= count for kind, count in least.items()), found


@pytest.mark.parametrize(
    ("seeds", "least"),
    [
        (range(20, 24), {"lowrank": 1}),
        pytest.param(
            (*range(20), *range(3000, 4000)), {"lora": 50, "lowrank": 500},
            marks=pytest.mark.long,
        ),
    ],
    ids=["four", "a thousand"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_graphs_in_low_precision(dtype, seeds, least):
    found = check_all(seeds, dtype)
    assert all(found[kind] >= count for kind, count in least.items()), found


def check_dynamic(seed: int) -> int:
    """Compile the graph of a seed for any token count; return how many chains were found."""
    (module, first), results = build(seed), []

    def backend(module, inputs):
        results.append(run(module, inputs, VERIFIED))

        def call(*given):
            results[-1].check(*given)  # at each token count
            return results[-1].graph_module(*given)

        return call

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for more in (0, 2, 5):
        shape = list(first.shape)
        shape[-2] += more
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        try:
            module(x.clone())
        except RuntimeError:
            continue  # the graph holds a size of its own
        compiled(x)
    return sum(result.chains for result in results)


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(5000, 5200), marks=pytest.mark.long)], ids=str
)
def test_random_graphs_with_any_token_count(seeds):
    assert sum(map(check_dynamic, seeds)) >= len(seeds)
