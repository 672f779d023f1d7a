"""A decoder layer of Llama as five kernel launches, dense and low-rank, against transformers' own.

    1  norm + q, k, v       lowrank_shared, or one matmul of the three weights side by side
    2  attention            RoPE on q and k inside
    3  output + residual    lowrank, or matmul
    4  norm + gate and up   gated_mlp_up
    5  down + residual      lowrank, or matmul

Each kernel runs in this package's simulator on a small layer, and the result is compared with
transformers' layer in float64. Then the five launches of a layer of Llama 3.2 1B are timed in the
simulator, at one token and in a prefill. Between launches 1, 2 and 3 the heads change places with
the tokens; for more than one token that is a copy, which is not a kernel of ours and not timed.

    python examples/decoder_layer.py [--tokens 1 128] [--rank 512] [--target trn2]
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nmm_compiler import targets
from nmm_compiler.ops.lower import lower, tokens
from nmm_compiler.prices.kernel import simulated_us
from nmm_compiler.runtime import executor as _executors  # noqa: F401  (registers "simulator")

OPS = torch.ops.nmm
NAMES = ("q", "k", "v", "o", "gate", "up", "down")
# Values that are rounded one after the other on the longest way through a low-rank layer: the norm,
# two products, RoPE, weights of the softmax, their sums, two products, the sum with the residual;
# the norm, two products, the gate, two products, the sum.
ROUNDINGS = 9 + 7


@dataclass
class Layer:
    """The weights of a layer, each [outputs, inputs] or the factors [rank, inputs], [outputs,
    rank], and the calls that it has made."""

    weights: dict[str, list[Tensor]]
    norms: tuple[Tensor, Tensor]
    heads: tuple[int, int]  # of queries, of keys and values
    eps: float
    rope: Tensor  # [2, tokens, head size / 2]: cos, then sin
    executor: str = "simulator"
    target: str = "trn2"
    calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def call(self, what: str, op: str, *args: Any, **keywords: Any) -> Any:
        """Launch a kernel, and note the call."""
        keywords = {**keywords, "target": self.target}
        self.calls.append((what, op, args, keywords))
        return getattr(OPS, op)(*args, **keywords, executor=self.executor)

    def norm(self, place: int) -> dict[str, Any]:
        """Return the keywords of a norm."""
        return {"norm": "rms", "norm_eps": self.eps, "norm_gain": self.norms[place]}

    def project(self, what: str, name: str, x: Tensor, residual: Tensor) -> Tensor:
        """Return a projection of x plus a residual."""
        weights = self.weights[name]
        if len(weights) == 1:
            return self.call(
                what, "matmul", x, *weights, w_layout="col", residual=residual
            )  # fmt: skip
        return self.call(
            what, "lowrank_matmul", x, *weights, u_layout="col", v_layout="col", residual=residual
        )

    def queries_keys_values(self, x: Tensor) -> list[Tensor]:
        """Return q, k and v of the norm of x."""
        each = [self.weights[name] for name in "qkv"]
        what = "norm + q, k, v"
        if len(each[0]) == 2:
            us, vs = zip(*each, strict=True)
            layouts = {"u_layout": "col", "v_layout": "col"}
            return self.call(
                what, "lowrank_matmul_shared_x", x, us, vs, [None] * 3, **layouts, **self.norm(0)
            )  # fmt: skip
        whole = torch.cat([w for (w,) in each])  # a model stores them side by side, once
        y = self.call(what, "matmul", x, whole, w_layout="col", **self.norm(0))
        return list(y.split([len(w) for (w,) in each], -1))

    def __call__(self, x: Tensor, cache: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return the layer's output for x [tokens, features].

        cache: keys, rotated already, and values of earlier tokens, [heads, context, head size].
        """
        heads, kv_heads = self.heads
        q, k, v = (
            t.reshape(1, len(x), count, -1).transpose(1, 2)
            for t, count in zip(
                self.queries_keys_values(x), (heads, kv_heads, kv_heads), strict=True
            )
        )
        rotates = "qk"
        if cache is not None:  # one token: its key is rotated and appended by who keeps the cache
            k, v, rotates = *(t.unsqueeze(0) for t in cache), "q"
        y = self.call("attention", "attention", q, k, v, self.rope, rotates=rotates)
        y = y.transpose(1, 2).reshape(len(x), -1)
        x = self.project("output + residual", "o", y, x)
        gate, up = self.weights["gate"], self.weights["up"]
        h = self.call(
            "norm + gate and up", "gated_mlp_up", x, gate, up, weight_layout="col", **self.norm(1)
        )
        return self.project("down + residual", "down", h, x)


def factors(w: Tensor, rank: int) -> list[Tensor]:
    """Return [rank, inputs] and [outputs, rank] whose product is nearest to w."""
    u, s, vt = torch.linalg.svd(w.double(), full_matrices=False)
    root = s[:rank].sqrt()
    return [(root[:, None] * vt[:rank]).to(w.dtype), (u[:, :rank] * root).to(w.dtype)]


def check(dtype: torch.dtype, rank: int) -> None:
    """Compare a small layer with transformers' in float64; raise AssertionError where it is off."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    theirs = LlamaDecoderLayer(config, 0).eval()
    for norm in (theirs.input_layernorm, theirs.post_attention_layernorm):
        torch.nn.init.normal_(norm.weight, 1.0, 0.2)
    modules = {name.partition("_proj")[0]: m for name, m in theirs.named_modules() for name in
               [name.rpartition(".")[2]] if name.endswith("_proj")}  # fmt: skip
    weights = {}
    for name in NAMES:
        w = modules[name].weight.detach()
        # of the size that keeps values about one
        w = torch.randn_like(w) / math.sqrt(w.shape[1])
        weights[name] = [f.to(dtype) for f in (factors(w, rank) if rank else [w])]
        whole = weights[name][0].double()
        whole = weights[name][1].double() @ whole if rank else whole
        modules[name].weight.data = whole
    theirs = theirs.double()
    x = torch.randn(40, config.hidden_size).to(dtype)
    positions = torch.arange(len(x))[None]
    cos, sin = LlamaRotaryEmbedding(config)(x.double(), positions)
    half = cos.shape[-1] // 2
    rope = torch.stack([cos[0, :, :half], sin[0, :, :half]]).to(dtype)
    angles = tuple(torch.cat([t.double()] * 2, -1)[None] for t in rope)  # as both sides read them
    mask = torch.full((len(x), len(x)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        norms = [
            n.weight.to(dtype) for n in (theirs.input_layernorm, theirs.post_attention_layernorm)
        ]
        for norm, own in zip(
            (theirs.input_layernorm, theirs.post_attention_layernorm), norms, strict=True
        ):
            norm.weight.copy_(own)
        want = theirs(x.double()[None], attention_mask=mask, position_embeddings=angles)
        want = (want[0] if isinstance(want, tuple) else want).reshape(x.shape)
        layer = Layer(weights, tuple(norms), (4, 2), config.rms_norm_eps, rope)
        got = layer(x).double()
    error = float((got - want).norm() / want.norm())
    # Independent roundings of half an ulp add up in squares; sums are in fp32, the longest one
    # over the intermediate size. Transformers' own norm computes in float32. Twice that is allowed.
    ulp = torch.finfo(dtype).eps / 2
    steps = ROUNDINGS * ulp**2 + ROUNDINGS * config.intermediate_size * 2.0**-48
    limit = 2.0 * math.sqrt(steps)
    kind = f"rank {rank}" if rank else "dense"
    print(
        f"{kind:9s} {str(dtype).removeprefix('torch.'):9s} {len(layer.calls)} launches, relative "
        f"error {error:.2e} in norm, allowed {limit:.2e}"
    )
    assert len(layer.calls) == 5
    assert error <= limit


def timeline(count: int, rank: int, target: str, context: int) -> None:
    """Print the simulated time of each launch of a layer of Llama 3.2 1B."""
    hidden, wide, heads, kv_heads, d = 2048, 8192, 32, 8, 64
    sizes = {
        "q": (heads * d, hidden), "k": (kv_heads * d, hidden), "v": (kv_heads * d, hidden),
        "o": (hidden, heads * d), "gate": (wide, hidden), "up": (wide, hidden),
        "down": (hidden, wide),
    }  # fmt: skip

    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    shown: dict[str, list[tuple[str, float, str]]] = {}
    for kind in ("dense", f"rank {rank}"):
        weights = {
            name: [meta(n, k)] if kind == "dense" else [meta(min(rank, n // 2), k),
                                                        meta(n, min(rank, n // 2))]
            for name, (n, k) in sizes.items()
        }  # fmt: skip
        cache = None if count > 1 else (meta(kv_heads, context, d), meta(kv_heads, context, d))
        layer = Layer(
            weights, (meta(hidden), meta(hidden)), (heads, kv_heads), 1e-5,
            meta(2, count, d // 2), executor="reference", target=target,
        )  # fmt: skip
        layer(meta(count, hidden), cache)
        rows = []
        for what, op, args, keywords in layer.calls:
            spec = lower(op, args, keywords, int(tokens(args[0], keywords))).spec
            rows.append((what, simulated_us(spec, targets.get(target)), spec.short()))
        shown[kind] = rows
    whole = f"{count} token{'s' * (count > 1)}" + (f", {context} keys" if count == 1 else "")
    print(f"\nA layer of Llama 3.2 1B, {whole}, bfloat16 on {target}, one core; simulated us:")
    for kind, rows in shown.items():
        print(f"  {kind}")
        start = 0.0
        for what, us, spec in rows:
            print(f"    {start:9.1f}  {us:9.1f}  {what:20s} {spec}")
            start += us
        print(f"    {start:9.1f}  the whole layer, without gaps between launches")


def main() -> None:
    """Check both kinds of layers, then print their timelines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 128])
    parser.add_argument("--rank", type=int, default=512, help="at most; half of narrow outputs")
    parser.add_argument("--context", type=int, default=1024, help="keys of a decode step")
    parser.add_argument("--target", default="trn2")
    given = parser.parse_args()
    print("Five kernels in the simulator against transformers' LlamaDecoderLayer in float64:")
    for dtype in (torch.float32, torch.bfloat16):
        for rank in (0, 64):
            check(dtype, rank)
    for count in given.tokens:
        timeline(count, given.rank, given.target, given.context)


if __name__ == "__main__":
    main()
