"""One Llama-3.2-1B-shaped decoder layer: compressed, compiled, every kernel proved.

Weights are random (bf16), from a transformers config, so this shows shapes, schedules and predicted
times, not quality. Prefill runs 512 tokens, decode 1. Latency and bytes are the simulator's.

    python examples/llama_mlp.py --ratio 0.2
"""

import argparse
import time

import torch
from rich.console import Console
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import nmm_compiler as nmm
from nmm_compiler.codegen.check_against_float64 import prove
from nmm_compiler.prices.ways import ways

CONFIG = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    num_hidden_layers=1,
)


def decoder_layer() -> tuple[torch.nn.Module, LlamaRotaryEmbedding]:
    """Return (one decoder layer in bf16, the rotary embedding that its caller computes)."""
    torch.manual_seed(0)
    config = CONFIG
    config._attn_implementation = "sdpa"
    return LlamaDecoderLayer(config, 0).to(torch.bfloat16).eval(), LlamaRotaryEmbedding(config)


def inputs(rotary: LlamaRotaryEmbedding, tokens: int, start: int = 0) -> dict:
    """Return keyword inputs of the layer for `tokens` random hidden states at `start`."""
    hidden = torch.randn(1, tokens, CONFIG.hidden_size, dtype=torch.bfloat16)
    positions = torch.arange(start, start + tokens)[None]
    return {"hidden_states": hidden, "position_embeddings": rotary(hidden, positions)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--target", default="trn2")
    parser.add_argument("--prefill", type=int, default=512)
    arguments = parser.parse_args()
    console = Console()
    started = time.monotonic()
    layer, rotary = decoder_layer()
    console.print(nmm.compress(layer, arguments.ratio).summary(), markup=False)
    failed = 0
    for phase, tokens in (("prefill", arguments.prefill), ("decode", 1)):
        batch = inputs(rotary, tokens, start=0 if tokens > 1 else arguments.prefill)
        with torch.no_grad():
            expected = layer(**batch)
        torch._dynamo.reset()
        reports: list = []
        options = {"target": arguments.target, "report": reports.append}
        compiled = torch.compile(layer, backend="nmm", dynamic=False, options=options)
        with torch.no_grad():
            got = compiled(**batch)
        kernels = [kernel for report in reports for kernel in report.built]
        proofs = [prove(kernel) for kernel in kernels]
        console.rule(f"{phase}: {tokens} token{'s' * (tokens > 1)} on {arguments.target}")
        for report in reports:
            console.print(str(report), markup=False, soft_wrap=True)
        for proof, kernel in zip(proofs, kernels, strict=True):
            us = ways(kernel.spec, arguments.target, source="simulated")
            console.print(f"{proof}\n    {kernel.spec.short()}: {us.fused:.1f} us simulated, in "
                          f"smaller calls {us.separate:.1f}, dense {us.dense:.1f}")  # fmt: skip
        # bf16 keeps 8 bits; seven products, each rounded at most twice, of values of order one.
        tolerance = 2**-8 * 2 * 7 * float(expected.float().abs().max())
        difference = float((got.float() - expected.float()).abs().max())
        console.print(
            f"compiled against eager: {difference:.3g} (tolerance {tolerance:.3g}), "
            f"proofs {sum(p.passed for p in proofs)} of {len(proofs)} passed"
        )
        failed += difference > tolerance or not all(p.passed for p in proofs)
    console.print(f"{time.monotonic() - started:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
