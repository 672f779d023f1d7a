"""Models for tests: weights with a function of them, and small random transformers models.

In those of transformers every large enough linear is replaced by two factors.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from toy_models import Model as Model
from toy_models import Pair as Pair

from nmm_compiler.lowrank_models.modules import LowRankLinear
from nmm_compiler.passes.pipeline import explain, run
from nmm_compiler.passes.rules import Match, Rule


class LlamaNorm(nn.Module):
    """RMSNorm as transformers spell it."""

    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size) + 0.5), eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Three(nn.Module):
    """Two chains of x, added up behind an abs, and a third that reads it [features, tokens]."""

    def __init__(self):
        super().__init__()
        self.p, self.q, self.s = Pair(32, 3, 24), Pair(32, 3, 24), Pair(24, 3, 32)

    def forward(self, x):
        h = torch.tanh(self.p(x) + self.q(x).abs())
        return self.s(h), h.t().cumsum(0)


class Backend:
    """A backend of torch.compile that rewrites each graph; the results are its items."""

    def __init__(self, options=None):
        torch._dynamo.reset()
        self.options, self.results = options, []

    def __call__(self, module, inputs):
        self.results.append(run(module, inputs, self.options))
        return self[-1].graph_module.forward

    def __getitem__(self, index):
        return self.results[index]

    def __len__(self):
        return len(self.results)


def match_of(rule, node):
    """Return the match of a rule, by name, that takes over one node."""
    return Match(rule=rule, node=node, nodes=frozenset({node}))


class OwnRule(Rule):
    """A rule of functions; it matches each node of which `ends` is true unless `checks` differs."""

    def __init__(self, name, ends, rewrites=None, checks=None, combines=None):
        self.name, self.ends, self.rewrites = name, ends, rewrites
        self.checks, self.combines = checks, combines

    def pattern(self, graph, node):
        if self.ends(node):
            yield node

    def check(self, graph, candidate):
        return self.checks(candidate) if self.checks else match_of(self.name, candidate)

    def combine(self, graph, matches):
        return self.combines(graph, matches) if self.combines else matches

    def rewrite(self, graph, match, editor):
        return self.rewrites(match, editor)


def factorize(model: nn.Module, rank: int, exclude: tuple[str, ...] = ("lm_head",)) -> int:
    """Replace linears (and GPT-2's Conv1D) for which the rank saves work; return how many."""
    count = 0
    for name, module in list(model.named_modules()):
        if any(word in name for word in exclude):
            continue
        if isinstance(module, nn.Linear):
            k, n, bias = module.in_features, module.out_features, module.bias is not None
        elif type(module).__name__ == "Conv1D":
            k, n, bias = module.weight.shape[0], module.weight.shape[1], True
        else:
            continue
        if rank * (k + n) >= k * n:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], LowRankLinear(k, rank, n, bias))
        count += 1
    return count


# The rewrite compares both graphs itself, and a fault of ours is no refusal.
VERIFIED = {"verify": True, "strict": True}

V, H, I = 50, 32, 64  # noqa: E741
IDS = {"input_ids": torch.arange(12).view(2, 6) % V}
TOKENS = {**IDS, "use_cache": False}
SIZES = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": I, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
TEXT = {**SIZES, "num_key_value_heads": 2}
PICTURES = {**SIZES, "image_size": 16, "patch_size": 8}
GPT = {"vocab_size": V, "n_embd": H, "n_layer": 2, "n_head": 4}
T5 = {"vocab_size": V, "d_model": H, "d_kv": 8, "d_ff": I, "num_layers": 2, "num_heads": 4}
WHISPER = {
    "vocab_size": V, "d_model": H, "encoder_layers": 2, "decoder_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": I,
    "decoder_ffn_dim": I, "num_mel_bins": 8, "max_source_positions": 6,
    "max_target_positions": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
LINEAR_ATTENTION = {
    "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
# Of each model of transformers: its class, its inputs, and the fields of its configuration.
ZOO = {
    "llama": ("LlamaModel", TOKENS, TEXT),
    "qwen3": ("Qwen3Model", TOKENS, {**TEXT, "head_dim": 8}),
    "mistral": ("MistralModel", TOKENS, {**TEXT, "head_dim": 8}),
    "gemma": ("GemmaModel", TOKENS, {**TEXT, "head_dim": 8}),
    "phi": ("PhiModel", TOKENS, {**TEXT, "num_key_value_heads": 4}),
    "gpt2": ("GPT2Model", TOKENS, {**GPT, "n_positions": 64}),
    "opt": ("OPTModel", TOKENS, {
        "vocab_size": V, "hidden_size": H, "ffn_dim": I, "num_hidden_layers": 2,
        "num_attention_heads": 4, "word_embed_proj_dim": H, "max_position_embeddings": 64}),
    "bert": ("BertModel", IDS, {**SIZES, "max_position_embeddings": 64}),
    "vit": ("ViTModel", {"pixel_values": (2, 3, 16, 16)}, PICTURES),
    "t5": ("T5EncoderModel", IDS, {**T5, "dropout_rate": 0.0}),
    "whisper_encoder": ("WhisperModel", {"input_features": (2, 8, 12)}, WHISPER),
    "deepseek_v3": ("DeepseekV3Model", TOKENS, {
        **TEXT, "num_key_value_heads": 4, "kv_lora_rank": 6, "q_lora_rank": 6,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "moe_intermediate_size": 16, "n_shared_experts": 1}),
    "mixtral": ("MixtralModel", TOKENS,
                {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "t5_gated": ("T5EncoderModel", IDS,
                 {**T5, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}),
    "mamba": ("MambaModel", TOKENS, {
        "vocab_size": V, "hidden_size": H, "state_size": 4, "num_hidden_layers": 2,
        "use_cache": False}),
    "phi3": ("Phi3Model", TOKENS, {**TEXT, "pad_token_id": 0}),
    "qwen2_moe": ("Qwen2MoeModel", TOKENS, {
        **TEXT, "moe_intermediate_size": 16, "num_experts": 4,
        "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2}),
    "bloom": ("BloomModel", TOKENS,
              {"vocab_size": V, "hidden_size": H, "n_layer": 2, "n_head": 4}),
    "clip_vision": ("CLIPVisionModel", {"pixel_values": (2, 3, 16, 16)}, PICTURES),
    "modernbert": ("ModernBertModel", TOKENS, {**TEXT, "pad_token_id": 0}),
    "jamba": ("JambaModel", TOKENS, {
        **TEXT, "num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2,
        "use_mamba_kernels": False, "mamba_d_state": 4, "pad_token_id": 0}),
    "llama4": ("Llama4TextModel", TOKENS, {
        **TEXT, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
        "intermediate_size_mlp": I, "interleave_moe_layer_step": 2, "pad_token_id": 0,
        "attention_chunk_size": 8}),
    "qwen3_next": ("Qwen3NextModel", TOKENS, {
        **TEXT, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 32, **LINEAR_ATTENTION}),
    "qwen3_5": ("Qwen3_5TextModel", TOKENS, {**TEXT, **LINEAR_ATTENTION}),
}  # fmt: skip


def model_of(name):
    """Return a small random model of the zoo, and its inputs by name."""
    import transformers

    kind, inputs, fields = ZOO[name]
    config = getattr(transformers, kind).config_class(**fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, kind)(config)
    drawn = {n: torch.randn(v) if isinstance(v, tuple) else v for n, v in inputs.items()}
    return model.get_encoder() if kind == "WhisperModel" else model, drawn


MODELS = {name: functools.partial(model_of, name) for name in ZOO}


def trace_and_run(model, *inputs, **options):
    """Return the result of the passes on the symbolic trace of a model."""
    return run(torch.fx.symbolic_trace(model), inputs, options)


def kinds_of(result):
    """Return the kinds of the matches of a result, in order; each word of "lowrank norm"."""
    return [kind for match in result.matches for kind in match.kind.split()]


def codes_of(result):
    """Return the codes of the refusals of a result, in order."""
    return [declined.code for declined in result.declined]


def compiled(model, **options):
    """Return a model compiled by the backend; no code that was compiled before is used."""
    torch._dynamo.reset()
    return torch.compile(model, backend="nmm", options={"inner": "eager", **options})


def explained(model, inputs, **options):
    """Return the rules that match in a model, and the refusals as text."""
    torch._dynamo.reset()
    found = explain(model, inputs, options=options)
    return [match.rule for match in found.matches], [str(one) for one in found.declined]


def calls_of(result):
    """Return the nodes that call our ops in the graph of a result."""
    nodes = result.graph_module.graph.nodes
    return [node for node in nodes if str(node.target).startswith("nmm.")]


def kernel_calls(module, packed=None):
    """Return (node, the spec that it launches) for each kernel call of a graph.

    packed: turns a weight that the runtime packs once, as its kernel reads it.
    """
    from nmm_compiler.ops.lower import lower, op_name, tokens

    found = []
    for node in module.graph.nodes:
        name = op_name(node.target)
        if name is not None:
            args = torch.fx.node.map_arg(
                node.args, lambda n: n.meta.get("example_value", n.meta.get("val"))
            )
            count = tokens(args[0], node.kwargs)
            lowered = lower(name, args, dict(node.kwargs), count, packed)
            found += [(node, launch.spec) for launch in lowered.launches]
    return found
