"""Small models for tests of every room: weights with a function of them, a pair, a Llama."""

import pytest
import torch
from torch import nn


class Model(nn.Module):
    """Weights by name (shapes, tensors or modules), and a forward that computes with them."""

    def __init__(self, function, **weights):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        for name, given in weights.items():
            if isinstance(given, tuple):
                given = torch.randn(given) / max([*given, 1]) ** 0.5
            module = isinstance(given, nn.Module)
            setattr(self, name, given if module else nn.Parameter(given.clone()))

    def forward(self, x):
        return self.function(self, x)


class ModelOfAnyInputs(Model):
    """The same with any inputs, which torch.fx.symbolic_trace cannot trace."""

    def forward(self, *inputs, **named):
        return self.function(self, *inputs, **named)


class Pair(nn.Module):
    """b(a(x)), of rank r; bias: of b."""

    def __init__(self, k, r, n, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(k, r, bias=False), nn.Linear(r, n, bias=bias)

    def forward(self, x):
        return self.b(self.a(x))


def llama(hidden=64, inner=128, layers=1, vocabulary=64, **more):
    """Return a Llama of random weights, in eval mode; `more`: fields of its config, and dtype."""
    transformers = pytest.importorskip("transformers")
    dtype = more.pop("dtype", torch.float32)
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, **more}
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        vocab_size=vocabulary, **sizes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


EXPERTS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "DeepseekV3": {
        "n_routed_experts": 4, "moe_intermediate_size": 96, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


def experts_model(kind, **sizes):
    """Return a mixture of four experts of random weights, of which two are chosen, in eval mode."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shared = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**(shared | EXPERTS[kind] | sizes))
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()
