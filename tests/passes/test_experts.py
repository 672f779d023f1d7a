"""Experts as transformers spells them become one call that equals the eager model."""

import pytest
import torch

import nmm_compiler as nmm

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 100, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "Qwen3Moe": {"head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4},
    "GptOss": {"head_dim": 16, "intermediate_size": 48, "num_local_experts": 4},
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 4},
    "DeepseekV3": {
        "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 0, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "intermediate_size": 48, "num_key_value_heads": 4,
    },
}  # fmt: skip
IDS = torch.tensor([[1, 7, 3, 9, 2]])


def tiny(name, way, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | MODELS[name] | changes))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.config._experts_implementation = way
    return model


@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", MODELS)
def test_experts_become_one_call(name, way):
    model = tiny(name, way)
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = model(IDS, use_cache=False).logits
        found = nmm.explain(model, {"input_ids": IDS, "use_cache": False})
        assert [m.rule for r in found.results for m in r.matches].count("experts") == 1
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="nmm", options={"inner": "eager"})
        torch.testing.assert_close(compiled(IDS, use_cache=False).logits, wanted)


def test_a_compiled_decode_step_runs_the_kernel_in_the_simulator():
    model = tiny("GptOss", "grouped_mm")
    torch._dynamo.reset()
    options = {"inner": "eager", "executor": "simulator"}
    with torch.no_grad():
        wanted = model(IDS[:, :2], use_cache=False).logits
        compiled = torch.compile(model, backend="nmm", options=options)
        made = compiled(IDS[:, :2], use_cache=False).logits
    torch.testing.assert_close(made, wanted, rtol=1e-3, atol=1e-4)


class Experts(torch.nn.Module):
    """One mixture in the batched form, with a function between the products."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.up = torch.nn.Parameter(torch.randn(4, 32, 48) / 6)
        self.down = torch.nn.Parameter(torch.randn(4, 24, 32) / 6)

    def forward(self, x, index, gates):
        picks = index.reshape(-1)
        rows = x.repeat_interleave(2, dim=0)
        h = torch.bmm(rows.unsqueeze(1), self.up[picks]).squeeze(1)
        y = torch.bmm(self.function(h).unsqueeze(1), self.down[picks]).squeeze(1)
        return (y * gates.reshape(-1).unsqueeze(-1)).view(3, 2, 32).sum(1)


def picks():
    return torch.randn(3, 32), torch.tensor([[0, 1], [3, 2], [1, 3]]), torch.rand(3, 2)


def silu_of_first(h):
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def explained(model):
    torch._dynamo.reset()
    (result,) = nmm.explain(model, picks()).results
    return [m.rule for m in result.matches], [str(d) for d in result.declined]


def test_a_function_that_is_no_gated_product_is_refused():
    assert explained(Experts(silu_of_first))[0] == ["experts"]
    for function in (lambda h: torch.sin(h[:, :24]) * h[:, 24:], lambda h: h[:, :24] + h[:, 24:]):
        matches, declined = explained(Experts(function))
        assert matches == []
        assert "no gated product" in declined[0]


def test_an_index_of_other_picks_is_no_match():
    class Crossed(Experts):
        def forward(self, x, index, gates):
            picks, others = index.reshape(-1), index.flip(0).reshape(-1)
            rows = x.repeat_interleave(2, dim=0)
            h = torch.bmm(rows.unsqueeze(1), self.up[picks]).squeeze(1)
            y = torch.bmm(self.function(h).unsqueeze(1), self.down[others]).squeeze(1)
            return (y * gates.reshape(-1).unsqueeze(-1)).view(3, 2, 32).sum(1)

    assert explained(Crossed(silu_of_first))[0] == []


def test_gradients_reach_the_experts():
    model, args = Experts(silu_of_first), picks()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="nmm", options={"inner": "eager"})
    grads = []
    for call in (compiled, model):
        model.zero_grad()
        call(*args).square().sum().backward()
        grads.append((model.up.grad.clone(), model.down.grad.clone()))
    torch.testing.assert_close(grads[0], grads[1])


def halves(h):
    return h.chunk(2, -1)


def written_product(h):
    gate, up = halves(h)
    act = torch.nn.functional.silu(gate)
    act.mul_(2)
    return act * up


def written_rows(h):
    gate, up = halves(h)
    act = torch.nn.functional.silu(gate)
    act[:, 3] = 7
    return act * up


def written_input(h):
    h.mul_(3)
    return silu_of_first(h)


def written_result(h):
    y = silu_of_first(h)
    y.add_(1)
    return y


def clamped_up(h):
    gate, up = halves(h)
    return torch.nn.functional.silu(gate) * up.clamp(-20.0, 20.0)


def clamped_product(h):
    return silu_of_first(h).clamp(-300, 300)


def zero_above(h):
    gate, up = halves(h)
    return torch.where(gate > 15, torch.zeros_like(gate), torch.nn.functional.silu(gate)) * up


def nearly(h):
    return silu_of_first(h) * 1.0001


def without_nan(h):
    return torch.nan_to_num(silu_of_first(h))


def quick_gelu(h):
    gate, up = halves(h)
    return gate * torch.sigmoid(1.702 * gate) * up


@pytest.mark.parametrize(
    "function",
    [written_product, written_rows, written_input, written_result, clamped_up, clamped_product,
     zero_above, nearly, without_nan, quick_gelu],
)  # fmt: skip
def test_a_function_that_only_looks_like_a_gated_product_stays(function):
    """Values far from zero and writes in place tell them apart."""
    model, args = Experts(function), picks()
    args = (60 * args[0], *args[1:])
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="nmm", options={"inner": "eager"})
        torch.testing.assert_close(compiled(*args), model(*args), rtol=0.0, atol=0.0)


def test_a_clamp_of_large_numbers_is_kept():
    def clamped(h):
        gate, up = halves(h)
        return torch.nn.functional.silu(gate.clamp(max=20.0)) * up.clamp(-20.0, 20.0)

    model, args = Experts(clamped), picks()
    args = (60 * args[0], *args[1:])
    assert explained(model)[0] == ["experts"]
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="nmm", options={"inner": "eager"})
        torch.testing.assert_close(compiled(*args), model(*args))


@pytest.mark.parametrize("bias", [lambda b, picks: b[0], lambda b, picks: b[picks]])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("alpha", [1, 2])
def test_biases_and_sums_are_read_whole(bias, keepdim, alpha):
    class Biased(Experts):
        def forward(self, x, index, gates):
            picks = index.reshape(-1)
            rows = x.repeat_interleave(2, dim=0)
            h = torch.bmm(rows.unsqueeze(1), self.up[picks]).squeeze(1)
            h = torch.add(h, bias(self.bias, picks), alpha=alpha)
            y = torch.bmm(self.function(h).unsqueeze(1), self.down[picks]).squeeze(1)
            return (y * gates.reshape(-1).unsqueeze(-1)).view(3, 2, 32).sum(1, keepdim=keepdim)

    model = Biased(silu_of_first)
    model.bias = torch.nn.Parameter(torch.randn(4, 48))
    x, index, gates = picks()
    for numbers in (index, index - 4):  # negative numbers count from the end
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="nmm", options={"inner": "eager"})
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, numbers, gates), model(x, numbers, gates))
