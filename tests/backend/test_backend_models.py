"""Real model code through the backend: token counts, generation, training, regions, threads."""

import copy
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from backend.small_models import FactorPair, small_llama
from processes import ran
from torch import nn
from torch._dynamo.utils import counters
from toy_models import Model

from nmm_compiler.backend import compile_graph as backend
from nmm_compiler.runtime.kernels import KERNELS

QUICK = {"kernels": "lazy", "inner": "aot_eager"}
CHAINS_PER_LAYER = 7  # q, k, v, o, gate, up, down


def with_nmm(model, **options):
    return torch.compile(model, backend="nmm", options={**QUICK, **options})


def tolerance(model, dtype=torch.float32):
    """Return how far two correct evaluations of `model` may differ, for logits of size ~1.

    A product of contraction length K, summed in another order, moves its result by about
    eps sqrt(K) of its norm; layers are normalized, so the products' errors add, twice (two
    evaluations) and with both signs.
    """
    eps = torch.finfo(dtype).eps
    return 4 * eps * sum(m.in_features**0.5 for m in model.modules() if isinstance(m, nn.Linear))


def rewritten():
    return sum(r.chains for r in backend.reports())


def tokens(n, batch=1):
    return torch.arange(batch * n).reshape(batch, n) % 128


def graphs_compiled(run, calls):
    """Return how many graphs Dynamo compiled for these calls, and their results."""
    before = counters["stats"]["unique_graphs"]
    outs = [run(call) for call in calls]
    return counters["stats"]["unique_graphs"] - before, outs


def two_pairs():
    pairs = FactorPair(nn.Linear(64, 96), 8), FactorPair(nn.Linear(96, 64), 8)
    return nn.Sequential(pairs[0], nn.SiLU(), pairs[1])


@torch.no_grad()
def test_seven_token_counts_compile_as_often_as_under_plain_inner():
    model = two_pairs()
    counts = (5, 1, 16, 17, 33, 64, 100)
    plain_run = torch.compile(model, backend="eager")
    run = with_nmm(model, inner="eager")
    plain, _ = graphs_compiled(lambda n: plain_run(torch.ones(1, n, 64)), counts)
    torch._dynamo.reset()
    ours, outs = graphs_compiled(lambda n: run(torch.ones(1, n, 64)), counts)
    assert ours == plain == len(backend.reports())
    assert rewritten() == 2 * ours
    for n, out in zip(counts, outs, strict=True):
        assert (out - model(torch.ones(1, n, 64))).abs().max() <= tolerance(model)


@pytest.mark.parametrize(
    ("buckets", "counts", "wanted"),
    [
        ((8, 32), (5, 1, 16, 17, 8, 30, 32), {8, 32}),
        pytest.param(
            # The first count is static, then Dynamo makes 1 static too, and the rest symbolic.
            None, (5, 1, 16, 17, 33, 64, 100), {5, 1, 16, 32, 64, 128}, marks=pytest.mark.long
        ),
    ],
    ids=["given", "default"],
)  # fmt: skip
def test_seven_token_counts_build_one_kernel_per_bucket_and_run_in_the_simulator(
    buckets, counts, wanted
):
    model = two_pairs()
    run = with_nmm(model, executor="simulator", kernels="build", buckets=buckets, inner="eager")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="nmm:.*")  # no call fell back to PyTorch
        for n in counts:
            x = torch.randn(1, n, 64)
            assert (run(x) - model(x)).abs().max() <= tolerance(model)
        built = [kernel.spec for kernel in KERNELS.found.values()]
        for n in counts:
            run(torch.ones(1, n, 64))
    assert [kernel.spec for kernel in KERNELS.found.values()] == built
    kernels_of = {m: sum(spec.m == m for spec in built) for m in {spec.m for spec in built}}
    assert set(kernels_of) == wanted
    assert len(set(kernels_of.values())) == 1  # the same kernels for each bucket
    assert len(set(built)) == len(built)


def replaced(part, name, *shape):
    setattr(part, name, nn.Parameter(torch.randn(*shape)))


CHANGES = [
    torch.no_grad()(lambda model: model[0].weight.mul_(2)),
    lambda model: model[1].weight.data.add_(1),
    lambda model: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    lambda model: replaced(model[0], "weight", 2, 16),
    lambda model: replaced(model[1], "bias", 12),
    nn.Module.train,
    nn.Module.double,
    lambda model: model[0].weight.requires_grad_(False),
]


def test_every_change_is_seen_without_more_compiles_than_plain_inner():
    def graphs(**how):
        torch._dynamo.reset()
        model = FactorPair(nn.Linear(16, 12), 2).eval()
        run = torch.compile(model, **how)

        def check(change):
            change(model)
            x = torch.randn(7 if change is CHANGES[-1] else 4, 16, dtype=model[0].weight.dtype)
            for recorded in (True, False):
                with torch.set_grad_enabled(recorded):
                    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)

        return graphs_compiled(check, [nn.Module.eval, *CHANGES])[0]

    assert graphs(backend="nmm", options={**QUICK, "inner": "eager"}) == graphs(backend="eager")


def test_generate_with_a_static_cache_equals_eager():
    model = small_llama(layers=1)
    how = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    want = model.generate(tokens(5), disable_compile=True, **how)
    model.forward = with_nmm(model.forward, inner="eager")
    assert torch.equal(model.generate(tokens(5), disable_compile=True, **how), want)
    assert {r.chains for r in backend.reports()} == {CHAINS_PER_LAYER}
    assert len(backend.reports()) <= 3  # prefill, then one token


def test_training_runs_through_simulated_kernels():
    """Both passes in the simulator, fresh weights each step."""
    eager = nn.Sequential(
        FactorPair(nn.Linear(32, 24), 4), nn.SiLU(), FactorPair(nn.Linear(24, 8), 4)
    )
    ours = copy.deepcopy(eager)
    run = with_nmm(ours, executor="simulator", kernels="build")
    batches = [torch.randn(16, 32) for _ in range(5)]

    def losses_of(model, run):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for batch in batches:
            loss = (run(batch) - batch[:, :8]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return torch.tensor(found)

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="nmm:.*")  # no call fell back to PyTorch
        got = losses_of(ours, run)
    assert rewritten() == 2  # in one graph, for all steps
    report = backend.last_report()
    # no gradient of the batch: p, dv, q, du of the first pair, and dx too of the second
    assert sum(kernel.backward for kernel in report.kernels) == 9
    assert sum(kernel.calls for kernel in report.kernels) == 2 + 9
    # Losses of size ~1; five steps of 1e-2 each turn a rounding difference into at most two steps'.
    assert (got - losses_of(eager, eager)).abs().max() <= 5 * tolerance(eager)


def test_cache_mode_require_names_what_is_missing_and_how_to_build_it(tmp_path):
    model, x = FactorPair(nn.Linear(16, 12), 2).eval(), torch.randn(4, 16)
    cache = tmp_path / "cache"
    options = {"inner": "eager", "cache": str(cache)}
    required = torch.compile(model, backend="nmm", options={**options, "cache": f"require:{cache}"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="CacheMissError") as caught:
        required(x)
    assert "1 kernel is not in" in str(caught.value)
    torch.compile(model, backend="nmm", options=options)(x)
    assert [k.origin for k in backend.last_report().kernels] == ["built"]
    torch._dynamo.reset()
    required(x)
    assert [k.origin for k in backend.last_report().kernels] == ["cache"]


@pytest.mark.parametrize(
    ("checkpointed", "inner"),
    [
        (False, "aot_eager"),
        *(pytest.param(True, one, marks=pytest.mark.long) for one in ("aot_eager", "inductor")),
    ],
)
def test_gradients_are_those_of_eager(checkpointed, inner):
    """Of the factors alone, where the rest is frozen, and with activation checkpointing."""
    model = small_llama(layers=1 + checkpointed).train(checkpointed)
    model.requires_grad_(checkpointed)
    for module in model.modules():
        if isinstance(module, FactorPair):
            module.requires_grad_(True)
    plain = copy.deepcopy(model)
    batch = tokens(8)
    for one in (model, plain):
        if checkpointed:
            one.gradient_checkpointing_enable({"use_reentrant": False})
    with_nmm(model, inner=inner)(input_ids=batch, labels=batch).loss.backward()
    plain(input_ids=batch, labels=batch).loss.backward()
    assert rewritten() == CHAINS_PER_LAYER * (1 + checkpointed)
    for (name, p), (_, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_two_threads_share_a_compiled_model():
    model = small_llama(layers=1)
    run = with_nmm(model, inner="eager")
    wanted = {n: model(tokens(n)).logits for n in (3, 9)}

    def work(order):
        for n in order:
            torch.testing.assert_close(run(tokens(n)).logits, wanted[n], rtol=1e-4, atol=1e-5)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, ((3, 9), (9, 3))))  # raises what a thread raised


TWO_STARTS = """
import json, os, sys, torch
import torch._inductor.compile_fx  # of torch, what both starts would load
from torch._dynamo.utils import counters
if os.fork():
    assert os.wait()[1] == 0
assert "nmm" in torch._dynamo.list_backends()
assert "nmm_compiler" not in sys.modules
torch.manual_seed(0)
down, up = torch.nn.Linear(64, 8, bias=False), torch.nn.Linear(8, 48, bias=False)
model = torch.nn.Sequential(down, up)  # nothing for a C++ compiler to do
run = torch.compile(model, backend="nmm", options={"inner": "inductor"})
y = run(torch.ones(4, 64))
torch.testing.assert_close(y, model(torch.ones(4, 64)))
y.sum().backward()
import nmm_compiler.backend.compile_graph as backend
print(json.dumps({
    "aot": {k: v for k, v in counters["aot_autograd"].items()},
    "fx": {k: v for k, v in counters["inductor"].items()},
    "report": backend.last_report().to_dict(),
    "y": float(y.sum()),
}), flush=True)
"""


@pytest.mark.long
def test_the_inner_caches_hit_when_a_process_starts_again(tmp_path):
    """And the backend works by name, without importing the package."""
    place = str(tmp_path / "inductor")
    done = ran("-c", TWO_STARTS, cwd=Path(__file__).parent, TORCHINDUCTOR_CACHE_DIR=place)
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line[0] == "{")
    assert first["aot"].get("autograd_cache_miss") == 1
    assert "autograd_cache_bypass" not in first["aot"]
    assert second["aot"].get("autograd_cache_hit") == 1
    assert "autograd_cache_miss" not in second["aot"]
    assert second["y"] == first["y"]
    assert second["report"]["chains"] == 1
    origins = [[k["origin"] for k in run["report"]["kernels"]] for run in (first, second)]
    assert origins == [["built"], ["cache"]]


@torch.no_grad()
def test_inductor_emits_the_products_that_it_emits_without_us():
    """PyTorch computes these calls: layouts made for kernels must cost nothing here."""
    from torch._inductor.utils import run_and_get_code

    gate, up = (FactorPair(nn.Linear(16, 48, bias=False), 4) for _ in range(2))
    down = FactorPair(nn.Linear(48, 16, bias=False), 4)
    silu = nn.functional.silu
    model = Model(lambda m, x: m.down(silu(m.gate(x)) * m.up(x)), gate=gate, up=up, down=down)
    x = torch.randn(2, 8, 16)

    def products(**how):
        torch._dynamo.reset()
        out, code = run_and_get_code(torch.compile(model, **how), x)
        torch.testing.assert_close(out, model(x), rtol=1e-5, atol=1e-5)
        return [line.strip() for line in code[0].splitlines() if "extern_kernels." in line]

    plain = products(backend="inductor")
    ours = products(backend="nmm", options={**QUICK, "inner": "inductor"})
    assert rewritten() == 3
    assert len(ours) == 6
    assert ours == plain


@torch.no_grad()
def test_inductor_computes_with_the_factors_of_sums():
    """That of torch 2.13 drops the alpha of a sum with a product (pytorch issue 167313)."""
    linear = nn.functional.linear
    model = Model(
        lambda m, x: torch.addmm(
            linear(x, m.w) + 0.5 * linear(linear(x, m.a), m.b), x @ m.u, m.v, beta=0.3
        ),
        w=(48, 64), a=(8, 64), b=(48, 8), u=(64, 8), v=(8, 48),
    )  # fmt: skip
    x = torch.randn(4, 64)
    out = with_nmm(model, inner="inductor")(x)
    assert rewritten() == 2
    assert (out - model(x)).abs().max() <= 4 * torch.finfo(x.dtype).eps * (64 + 8)
