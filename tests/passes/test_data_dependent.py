"""Token counts that depend on data (x[mask]): chains fuse and no size is ever guarded on."""

import pytest
import torch
import torch.nn.functional as F
from models import Model, kinds_of
from torch import nn

from nmm_compiler import backend
from nmm_compiler.options import Options
from nmm_compiler.passes.pipeline import rewrite, run

MASKS = [torch.tensor(m, dtype=torch.bool) for m in ([1, 0, 1, 1, 0, 1], [0] * 6, [1] + [0] * 5)]


class Masked(Model):
    """A model of x[mask]."""

    def forward(self, x, mask):
        return self.function(self, x[mask])


def masked(name):
    layers = {"a": nn.Linear(64, 8, bias=False), "b": nn.Linear(8, 48)}
    layers |= {"c": nn.Linear(48, 8, bias=False), "d": nn.Linear(8, 64)}
    return Masked(FUNCTIONS[name], **layers, w=(48,)).eval()


FUNCTIONS = {
    "chain": lambda p, x: p.b(p.a(x)),
    "activation": lambda p, x: F.silu(p.b(p.a(x))),
    "turned": lambda p, x: F.silu(p.b(p.a(x))).t().cumsum(0),
    "two chains": lambda p, x: p.d(p.c((p.b(p.a(x)) * p.w).sigmoid())),
    "column": lambda p, x: p.b(p.a(x.view(-1, 1, 64).transpose(0, 1))),
    "cast": lambda p, x: p.b(p.a(x)).to(x.dtype).type_as(p.w),
    "transposed": lambda p, x: (p.b.weight @ (p.a.weight @ x.t())).t().contiguous(),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_data_dependent_token_counts_fuse(name, dynamic):
    model, found = masked(name), []

    def compiler(module, inputs):
        values = [n.meta.get("example_value") for n in module.graph.nodes]
        environment = next(v.fake_mode.shape_env for v in values if isinstance(v, torch.Tensor))
        guards = len(environment.guards)
        found.append(run(module, inputs, {"strict": True}))
        assert len(environment.guards) == guards
        return found[-1].graph_module

    x = torch.randn(6, 64)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        compiled = torch.compile(model, backend=compiler, dynamic=dynamic, fullgraph=True)
        for mask in MASKS:
            torch.testing.assert_close(compiled(x, mask), model(x, mask), rtol=1e-5, atol=1e-5)
    assert len(found) == 1
    assert len(found[0].matches) == (2 if name == "two chains" else 1)
    assert "u0" in str(found[0].matches[0].info["m"])


def test_data_dependent_counts_of_exported_and_of_symbolically_traced_graphs():
    model, x = masked("chain"), torch.randn(6, 64)
    for graph in (model, torch.fx.symbolic_trace(model)):
        result = rewrite(graph, (x, MASKS[0]), options={"strict": True})
        assert kinds_of(result) == ["lowrank"]
        for mask in MASKS:
            got = result.graph_module(x, mask)
            torch.testing.assert_close(got, model(x, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["lazy", "build"])
def test_data_dependent_counts_through_the_backend(kernels):
    model, x = masked("activation"), torch.randn(6, 64)
    options = Options(inner="aot_eager", kernels=kernels, strict=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        compiled = torch.compile(model, backend="nmm", options=options)
        for mask in MASKS:
            torch.testing.assert_close(compiled(x, mask), model(x, mask), rtol=1e-5, atol=1e-5)
    report = backend.last_report()
    assert report.chains == 1
    assert ("a token count depends on data" in str(report)) == (kernels == "build")
