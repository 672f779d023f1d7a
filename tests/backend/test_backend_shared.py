"""q, k and v of a factored attention: one launch of one kernel, and the model's outputs."""

import pytest
import torch
from backend.small_models import small_llama
from runtime.simulator_launches import noted_launches

from nmm_compiler.backend import compile_graph as backend


@pytest.fixture
def launched(monkeypatch):
    """Return the kernels that the simulator runs, in order."""
    return noted_launches(monkeypatch)


def test_q_k_and_v_are_one_launch(launched):
    attention = small_llama(layers=1).model.layers[0].self_attn
    rotary = small_llama(layers=1).model.rotary_emb
    x = torch.randn(1, 12, 64)
    places = rotary(x, torch.arange(12)[None])
    options = {"executor": "simulator", "inner": "eager", "strict": True}
    run = torch.compile(attention, backend="nmm", options=options)
    with torch.no_grad():
        want, _ = attention(x, position_embeddings=places, attention_mask=None)
        got, _ = run(x, position_embeddings=places, attention_mask=None)
    assert [kernel.spec.family for kernel in launched] == ["lowrank_shared", "lowrank"]
    assert launched[0].spec.pairs == ((8, (64,)), (8, (32,)), (8, (32,)))
    assert launched[0].spec.m == 12
    # fp32: three products in a row of at most 64 terms, values of size ~1: 64 * 3 * 2^-24 < 2e-5
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    report = backend.last_report()
    assert report.chains == 4
    assert [(line.spec, line.calls) for line in report.kernels] == [
        ("lowrank_shared m12 k64 8x64 8x32 8x32 float32", 1),
        ("lowrank m12 k64 r8 n64 float32", 1),
    ]
    torch._dynamo.reset()
