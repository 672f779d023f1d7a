"""A compiled model whose backward pass runs through emitted kernels, which the report counts."""

import copy

import pytest
import torch
from backend.small_models import FactorPair
from runtime.simulator_launches import noted_launches
from torch import nn
from toy_models import Model

from nmm_compiler.backend import compile_graph as backend
from nmm_compiler.kernels.error_bounds import FP32_ROUNDOFF
from nmm_compiler.runtime.kernels import KERNELS

SIZE, RANK = 64, 8


@pytest.fixture
def launched(monkeypatch):
    """Return the specs that the simulator runs, in order."""
    return noted_launches(monkeypatch)


def compiled(model, **more):
    options = {"executor": "simulator", "inner": "aot_eager", **more}
    return torch.compile(model, backend="nmm", options=options)


@torch.no_grad()
def test_a_graph_without_gradients_builds_no_backward_kernels(launched):
    model = FactorPair(nn.Linear(32, 24), 4)
    compiled(model)(torch.randn(16, 32))
    report = backend.last_report()
    assert [kernel.calls for kernel in report.kernels] == [1]
    assert not any("backward pass" in note for note in report.notes)


def test_a_symbolic_token_count_builds_backward_kernels_per_bucket(launched):
    model = FactorPair(nn.Linear(32, 24, bias=False), 4)
    x = torch.randn(12, 32)
    torch._dynamo.mark_dynamic(x, 0)
    y = compiled(model)(x)
    built = len(KERNELS.found)
    y.sum().backward()
    assert len(KERNELS.found) == built
    assert len(launched) == 1 + 4  # p, dv, q, du; x needs no gradient
    assert {spec.k for spec in launched if spec.m in (4, 24, 32)} == {16}  # sums over tokens


@pytest.mark.parametrize(
    ("executor", "strict", "dynamic"),  # each pair of two of them
    [("reference", False, True), ("reference", True, False), ("simulator", False, False),
     ("simulator", True, True)],
)  # fmt: skip
def test_gradients_that_eager_does_not_have(executor, strict, dynamic):
    """A parameter that no loss reaches has no gradient, and no tokens give zeros."""
    read, unread = (FactorPair(nn.Linear(32, 24), 4) for _ in range(2))
    model = Model(lambda m, x: m.read(x) + m.unread(x).detach(), read=read, unread=unread)
    call = torch.compile(
        model,
        backend="nmm",
        dynamic=dynamic,
        options={"executor": executor, "strict": strict, "inner": "eager"},
    )
    for tokens in (12, 7, 0):
        plain = copy.deepcopy(model)
        x = torch.randn(tokens, 32)
        plain(x).sum().backward()
        model.zero_grad()
        call(x).sum().backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == name.startswith("unread"), name
            if q.grad is not None:
                # two products of at most 32 terms, summed in another order
                bound = 2 * 32 * FP32_ROUNDOFF * float(q.grad.norm())
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=bound)


def test_the_report_says_which_backward_products_are_kernels(launched):
    compiled(FactorPair(nn.Linear(32, 24, bias=False), 4))(torch.randn(16, 32)).sum().backward()
    report = backend.last_report()
    assert {kernel.calls - kernel.backward for kernel in report.kernels} == {0, 1}
    assert sum(kernel.backward for kernel in report.kernels) == len(launched) - 1
    heads = [line.split()[:3] for line in str(report).splitlines()]
    assert ["kernel", "calls", "backward"] in heads
    assert report.to_dict()["kernels"][0]["backward"] == report.kernels[0].backward
    assert "PyTorch, no kernel" not in str(report)


def test_the_report_says_which_backward_products_are_no_kernels(launched):
    model = FactorPair(nn.Linear(32, 24, bias=False), 4)
    compiled(model, executor="auto")(torch.randn(16, 32))
    assert "computes backward products: 1 x all of lowrank_matmul" in str(backend.last_report())

    def attention(q, k):
        return nn.functional.scaled_dot_product_attention(q, k, k)

    q, k = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(2))
    compiled(attention, rules=["+attention"])(q, k).sum().backward()
    said = " ".join(str(backend.last_report()).split())
    assert "PyTorch, no kernel, computes backward products: " in said
    assert "[2, 16, 16] x [2, 16, 8]" in said
