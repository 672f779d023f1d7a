"""Layouts: what flows through pointwise operations, which transposes go, in graph and kernels."""

import functools

import models
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.ops.lower import lower, op_name, tokens
from nmm_compiler.options import Options
from nmm_compiler.passes.graph.metadata import collect_values
from nmm_compiler.passes.pipeline import run
from nmm_compiler.passes.result import graph_parts

K, R, N = 64, 8, 48


# Factors a [k, r] b [r, n] c [n, r] d [r, k], and a bias over n.
Model = functools.partial(
    models.Model,
    a=(K, R),
    b=(R, N),
    c=(N, R),
    d=(R, K),
    bias=(N,),
)


def up(p, x):
    return x @ p.a @ p.b


def down(p, y):
    return y @ p.c @ p.d


def check(function, x, options=None, bound=2.0**-24 * K * 16):
    """Rewrite, compare outputs (sums of K terms near 1 in fp32, at most 16 after each other)."""
    module = fx.symbolic_trace(Model(function).requires_grad_(False))
    result = run(module, (x.clone(),), options or Options())
    want, got = module(x.clone()), result.graph_module(x.clone())
    for one, two in zip(*((v if isinstance(v, tuple) else (v,)) for v in (want, got)), strict=True):
        assert one.shape == two.shape
        assert float((one - two).abs().max()) <= bound * max(1.0, float(one.abs().max()))
    return result


def layouts(result):
    return [f"{m.info['x_layout']}>{m.info['out_layout']}" for m in result.rewritten]


X3, X2 = torch.randn(3, 5, K), torch.randn(5, K)
THROUGH = {
    "one": lambda p, x: down(p, torch.tanh(up(p, x))),
    "vector": lambda p, x: down(p, torch.tanh(up(p, x)) * p.bias + p.bias),
    "token column": lambda p, x: down(p, torch.tanh(up(p, x)) * x.sum(-1, keepdim=True)),
    "one element": lambda p, x: down(p, torch.tanh(up(p, x)) * p.bias[:1]),
    "quick gelu": lambda p, x: (lambda y: down(p, y * torch.sigmoid(1.702 * y)))(up(p, x)),
    "squared relu": lambda p, x: down(p, torch.relu(up(p, x)) ** 2),
    "cast and back": lambda p, x: down(p, (torch.tanh(up(p, x)).double() * 2).float()),
    "flattened": lambda p, x: down(p, torch.tanh(up(p, x).view(15, N)).view(3, 5, N)),
    "two calls": lambda p, x: down(p, torch.tanh(up(p, x)) + torch.sigmoid(up(p, x * 2))),
}


@pytest.mark.parametrize("name", THROUGH)
def test_a_layout_flows_through_pointwise_operations(name):
    result = check(THROUGH[name], X3)
    first = ["row>col"] * (2 if name == "two calls" else 1)
    assert layouts(result) == [*first, "col>row"]
    assert result.transposes_after == 0
    assert result.layouts[0].through >= 1


def test_the_region_stays_as_it_is_where_others_read_it():
    result = check(lambda p, x: (lambda y: (down(p, y), y.sum(0)))(torch.tanh(up(p, x))), X3)
    assert layouts(result) == ["row>row", "row>row"]
    assert result.transposes_after == 0


def test_a_residual_stream_is_turned_when_enough_kernels_read_it():
    def stream(blocks):
        def forward(p, x):
            for _ in range(blocks):
                x = x + up(p, down(p, torch.tanh(x)))
            return x

        return forward

    x = torch.randn(5, N)
    few = check(stream(2), x)
    assert few.transposes_after == 0
    many = check(stream(8), x)
    # two transposes, of the first x and of the result, against one while loading in each block
    assert many.transposes_after == 2
    assert many.layouts[1].layout == "col"
    assert many.layouts[1].col_cost < many.layouts[1].row_cost


def test_a_value_that_is_written_in_place_keeps_the_layout_of_the_graph():
    def forward(p, x):
        y = up(p, x)
        y.add_(1.0)
        return tuple(down(p, torch.tanh(y * i)) for i in range(1, 6))

    result = check(forward, X3)
    assert result.layouts[0].col_cost < result.layouts[0].row_cost  # but for the write
    assert result.layouts[0].layout == "row"


@pytest.mark.parametrize(
    ("function", "before"),
    [
        # (a transposed view that is returned moves nothing, and is not counted)
        (lambda p, x: up(p, x.T).T, 1),
        (lambda p, x: up(p, x.T).T.contiguous(), 2),
        (lambda p, x: down(p, torch.tanh(up(p, x.T).T).T).T, 3),
        (lambda p, x: down(p, torch.tanh(up(p, x.T).T.contiguous()).T.contiguous()).T, 3),
        (lambda p, x: torch.tanh(up(p, x.mT).permute(1, 0)).contiguous(), 2),
    ],
)
def test_explicit_transposes_go(function, before):
    result = check(function, X2.T.contiguous())
    assert (result.transposes_before, result.transposes_after) == (before, 0)


# -- a SwiGLU MLP on x^T that makes y^T -------------------------------------------------------


# The six factors, each as nn.Linear stores it, [outputs, inputs].
SwiGLU = functools.partial(
    models.Model,
    gate_a=(R, K),
    gate_b=(N, R),
    up_a=(R, K),
    up_b=(N, R),
    down_a=(R, N),
    down_b=(K, R),
)


def mlp(p, x):
    """[tokens, k] -> [tokens, k]."""
    h = F.silu(F.linear(F.linear(x, p.gate_a), p.gate_b)) * F.linear(F.linear(x, p.up_a), p.up_b)
    return F.linear(F.linear(h, p.down_a), p.down_b)


def feature_major(p, x):
    h = F.silu(p.gate_b @ (p.gate_a @ x)) * (p.up_b @ (p.up_a @ x))
    return p.down_b @ (p.down_a @ h)


def transposed_h(p, x):
    x = x.T
    gate, up = F.linear(F.linear(x, p.gate_a), p.gate_b), F.linear(F.linear(x, p.up_a), p.up_b)
    h = (F.silu(gate.T.contiguous()) * up.transpose(0, 1)).mT
    return F.linear(F.linear(h, p.down_a), p.down_b).permute(1, 0).contiguous()


def einsums(p, x):
    gate = torch.einsum("mr,nr->mn", torch.einsum("km,rk->mr", x, p.gate_a), p.gate_b)
    up = torch.einsum("mr,nr->mn", torch.einsum("km,rk->mr", x, p.up_a), p.up_b)
    low = torch.einsum("mn,rn->mr", F.silu(gate) * up, p.down_a)
    return torch.einsum("mr,kr->km", low, p.down_b)


SPELLED = {
    "T": lambda p, x: mlp(p, x.T).T,
    "mT": lambda p, x: mlp(p, x.mT).mT,
    "permute": lambda p, x: mlp(p, x.permute(1, 0)).permute(1, 0),
    "transpose": lambda p, x: mlp(p, x.transpose(0, 1)).transpose(-1, -2),
    "contiguous": lambda p, x: mlp(p, x.t().contiguous()).t().contiguous(),
    "feature major": feature_major,
    "transposed h": transposed_h,
    "einsum": einsums,
}


def kernels(module, x):
    """Return the kernels that the graph's calls launch, weights packed once as the runtime does."""
    built, values = [], collect_values(module, (x,))
    for node in module.graph.nodes:
        name = op_name(node.target)
        if name is not None:
            args = fx.node.map_arg(node.args, lambda n: values[n])
            m = tokens(args[0], node.kwargs)
            launches = lower(name, args, dict(node.kwargs), m, torch.Tensor.t).launches
            built += [build_kernel(launch.spec, "trn2") for launch in launches]
    return built


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", SPELLED)
def test_a_swiglu_mlp_ends_with_no_transpose_in_graph_or_kernels(name, whole):
    model = SwiGLU(SPELLED[name]).requires_grad_(False)
    x = torch.randn(K, 64)
    options = Options(rules=() if whole else ("-gated_mlp",))
    result = run(fx.symbolic_trace(model), (x,), options)
    kinds = [m.kind for m in result.rewritten]
    assert kinds == (["gated_mlp"] if whole else ["gated_mlp_up", "lowrank"])
    assert result.transposes_after == 0
    made = kernels(result.graph_module, x)
    assert len(made) >= len(kinds)
    for kernel in made:
        profile = kernel.profile()
        assert profile.transposes == {"dma": 0, "tensor": 0, "vector": 0}, kernel.spec.short()
        assert "dma_transpose" not in kernel.source
        assert "nc_transpose" not in kernel.source
    # six fp32 sums of at most 64 terms, values of order one
    difference = float((result.graph_module(x) - model(x)).abs().max())
    assert difference <= 2.0**-24 * 64 * 6


def test_a_row_input_is_transposed_by_the_kernel_that_loads_it():
    x = torch.randn(64, K)
    result = run(fx.symbolic_trace(SwiGLU(mlp).requires_grad_(False)), (x,))
    (kernel,) = kernels(result.graph_module, x)
    assert sum(kernel.profile().transposes.values()) > 0


def test_pictures_show_the_call_whose_result_is_only_read_transposed():
    """Nothing takes the place of such a result's node, so the call is found by what was added."""
    shapes = ((64, 8), (8, 96), (96, 8), (8, 64))
    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))
    result = run(fx.symbolic_trace(model), (torch.randn(4, 64),))
    unread = [match for match in result.rewritten if not match.emitted]
    assert unread, "the layout assignment turns the tensor between the two calls"
    pictures = graph_parts(result.original, result.graph_module, unread)
    texts = [part.text for section in pictures for part in section.parts]
    assert texts[1].startswith("after: ")
    assert "0 nodes" not in " ".join(texts)
