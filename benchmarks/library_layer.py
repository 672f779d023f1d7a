"""A dense decoder layer of nki-library's kernels beside the layer that `predict` prices.

Products and attention of one core at the same shapes, in the same simulator: `qkv`,
`attention_cte` or `attention_tkg`, `output_projection` and `mlp` of a clone of
aws-neuron/nki-library. Norms, RoPE and the residual are left out on both sides. All simulated, on
one physical core.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from attention import KERNELS, LIBRARY, decode_us, library_us, prefill_us

from nmm_compiler.errors import SimulationError
from nmm_compiler.kernels.attention import AttentionSpec
from nmm_compiler.prediction.meta_models import public_models
from nmm_compiler.prediction.predict import predict
from nmm_compiler.simulator.loading.private_modules import PrivateModules

# (model, cores that share it). Whole on one core they are larger than the library's kernels take:
# qkv has at most 4,096 outputs, the output projection of a prefill at most 17 heads, and mlp_cte
# divides by zero where an MLP is as wide as 8,192. Cut over 4 cores they fit.
MODELS = (("llama-3.2-1b", 1), ("llama-3.2-1b", 4), ("llama-3.1-8b", 1), ("llama-3.1-8b", 4),
          ("llama-3.1-8b", 8))  # fmt: skip
PROMPT, CONTEXT = 512, 4096
PIECES = ("qkv", "attention", "output", "mlp")
# One stored version of mlp.py closes its docstring twice and does not parse.
_MENDS = {
    "mlp/mlp.py": (
        'Standard matrix multiplication layouts\n    """\n\n        TKG',
        "Standard matrix multiplication layouts\n\n        TKG",
    )
}


class Library(PrivateModules):
    """The modules of a clone, mended in memory where a file does not parse."""

    def __init__(self, checkout: Path) -> None:
        super().__init__([checkout / LIBRARY, KERNELS])

    def run_text(self, text: str, path: Path, name: str, module: ModuleType) -> ModuleType:
        """Execute source text as the body of `module`."""
        for end, (wrong, right) in _MENDS.items():
            if path.as_posix().endswith(end):
                text = text.replace(wrong, right, 1)
        return super().run_text(text, path, name, module)


@dataclass(frozen=True)
class Share:
    """What one core has of a layer: hidden size, heads, head size, width of the MLP, tokens."""

    hidden: int
    heads: int
    kv_heads: int
    d: int
    inner: int
    tokens: int

    @classmethod
    def of(cls, model: str, tp: int, tokens: int) -> Share:
        """Return the share of a public model."""
        config = public_models()[model]
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            hidden=hidden, heads=heads // tp, kv_heads=max(1, config["num_key_value_heads"] // tp),
            d=config.get("head_dim") or hidden // heads, inner=config["intermediate_size"] // tp,
            tokens=tokens,
        )  # fmt: skip

    @property
    def decodes(self) -> bool:
        """Whether this is one token after a context."""
        return self.tokens == 1

    def attention(self) -> AttentionSpec:
        """Return the attention of the share."""
        sizes: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "d": self.d}
        if self.decodes:
            return AttentionSpec(m=1, context=CONTEXT, k_layout="col", **sizes)
        return AttentionSpec(m=self.tokens, **sizes)


def theirs(library: Library, share: Share, target: str) -> dict[str, float | str]:
    """Return microseconds of each piece of the library's layer, or the rule that refuses it."""
    made: dict[str, float | str] = {}
    for piece, run in _runs(library, share, target).items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the library's log of its SBUF
                made[piece] = run()
        except SimulationError as error:
            made[piece] = " ".join(str(error).split())[:300]
    return made


def _runs(library: Library, share: Share, target: str) -> dict[str, Callable[[], float]]:
    hidden, inner, tokens = share.hidden, share.inner, share.tokens
    width = share.heads * share.d
    common: Any = library.load("nkilib.core.utils.common_types")

    def of(path: str, shapes: dict[str, tuple[int, ...]], **more: Any) -> float:
        module, _, name = path.rpartition(".")
        kernel = getattr(library.load(f"nkilib.core.{module}"), name)
        return library_us(kernel, target, shapes, strict=True, **more)

    def qkv() -> float:
        shapes = {
            "input": (1, tokens, hidden),
            "fused_qkv_weights": (hidden, width + 2 * share.kv_heads * share.d),
        }
        return of("qkv.qkv.qkv", shapes, fused_norm_type=common.NormType.NO_NORM)

    def attention() -> float:
        time = decode_us if share.decodes else prefill_us
        return time(library, share.attention(), target)

    def output() -> float:
        weight = {"weight": (width, hidden)}
        if share.decodes:
            shapes = {"attention": (share.d, 1, share.heads, 1), **weight}
            return of("output_projection.output_projection_tkg.output_projection_tkg", shapes)
        shapes = {"attention": (1, share.heads, share.d, tokens), **weight}
        folder = "output_projection.output_projection_cte"
        return of(f"{folder}.output_projection_cte.output_projection_cte", shapes)

    def mlp() -> float:
        shapes = {
            "hidden_tensor": (1, tokens, hidden),
            "gate_proj_weights_tensor": (hidden, inner),
            "up_proj_weights_tensor": (hidden, inner),
            "down_proj_weights_tensor": (inner, hidden),
        }
        return of("mlp.mlp.mlp", shapes, activation_fn=common.ActFnType.SiLU)

    return {"qkv": qkv, "attention": attention, "output": output, "mlp": mlp}


def ours(model: str, tp: int, share: Share, target: str) -> dict[str, float]:
    """Return microseconds of each piece of the dense layer as `predict` prices it."""
    made = predict(model, target, prompt=PROMPT, context=CONTEXT, tp=tp, lnc=1)
    phase = made.phase("decode" if share.decodes else "prefill")
    assert phase is not None
    found = dict.fromkeys(PIECES, 0.0)
    for line in phase.lines:
        inside = line.module.rpartition("*.")[2]
        if line.kind == "attention":
            found["attention"] += line.each_us
        elif line.kind == "kernel" and inside.startswith("mlp"):
            found["mlp"] += line.each_us
        elif line.kind == "kernel" and inside.startswith("self_attn"):
            found["output" if "o_proj" in inside else "qkv"] += line.each_us
    return found


def compare(checkout: Path, targets: tuple[str, ...] = ("trn2",)) -> list[dict[str, Any]]:
    """Print a dense layer's time from the library's kernels beside ours; return the rows."""
    library = Library(checkout)
    rows = []
    print(f"\na dense layer, us a core (simulated): nki-library's kernels / ours, prompt {PROMPT}, "
          f"context {CONTEXT}, batch 1")  # fmt: skip
    head = " ".join(f"{piece:>17}" for piece in (*PIECES, "layer"))
    print(f"{'on':5} {'model':13} {'tp':>2} {'phase':8} {head}")
    for target in targets:
        for model, tp in MODELS:
            for phase, tokens in (("decode", 1), ("prefill", PROMPT)):
                share = Share.of(model, tp, tokens)
                rows.append(row := {
                    "target": target, "model": model, "tp": tp, "phase": phase,
                    "library": theirs(library, share, target),
                    "ours": ours(model, tp, share, target),
                })  # fmt: skip
                _print(row)
    return rows


def _print(row: dict[str, Any]) -> None:
    cells, sums = [], [0.0, 0.0]
    for piece in PIECES:
        us, own = row["library"][piece], row["ours"][piece]
        told = "refused" if isinstance(us, str) else f"{us:.1f}"
        cells.append(f"{told} / {own:.1f}")
        if not isinstance(us, str):
            sums = [sums[0] + us, sums[1] + own]
    refused = {p: us for p, us in row["library"].items() if isinstance(us, str)}
    note = " of the rest" if refused else ""
    cells.append(f"{sums[0]:.1f} / {sums[1]:.1f}{note}")
    where = f"{row['target']:5} {row['model']:13} {row['tp']:2} {row['phase']:8}"
    print(f"{where} {' '.join(f'{cell:>17}' for cell in cells)}", flush=True)
    for piece, why in refused.items():
        print(f"      {piece} refused: {why}")
