"""Few-bit weights with low-rank branches: quality over that of the same model in 16 bits.

Three models. SmolLM2-135M as `compress_lm.py` has it, from a 4-bit file, which flatters forms of
four bits. A byte-level decoder of 11 million parameters that is trained here, for a bounded CPU
time, and all-MiniLM-L6-v2, a sentence encoder: both born in 32 bits. Decoders are judged by
perplexity in the calibration's domain (Python's manual) and in another (plays), on the same windows
as the dense model; the encoder by the cosine of its embeddings to the dense model's, of held-out
sentences. Intervals are of the mean over windows, of differences, or over sentences. " in mxfp8" is
a branch in that format; ", mxfp8 x" rounds the inputs of linears as trn3's products do. A row that
was measured here is not measured again, but with --fresh; rows are kept in
prediction/form_quality.json, which `nmm plan` reads.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from compress_lm import LENGTH, smollm, windows
from compress_text import embed, encoder_batches, library, plays
from rich.console import Console
from rich.table import Table
from torch import nn

from nmm_compiler.cli import models
from nmm_compiler.cli.demo import manual_split
from nmm_compiler.kernels.packed_formats import FORMATS
from nmm_compiler.lowrank_models.apply import calibrate, compress
from nmm_compiler.lowrank_models.quantize import QuantizedLinear
from nmm_compiler.outputs import write_text
from nmm_compiler.prediction.forms import QUALITY, read_form

FORMS = (
    "bf16", "fp8", "mxfp4+64", "mxfp4+32", "mxfp4:0.67", "mxfp4+32fp8", "mxfp4+64fp8",
    "mxfp4+32 in mxfp8", "int4+16", "int4+32",
    "mxfp4", "int4", "fp8+32",
)  # fmt: skip
ROUNDED = ", mxfp8 x"
JUDGED, CALIBRATED, BESIDE = 8, 16, 8
"""Windows of a domain that are judged; of the manual, and of other texts, that calibrate."""
COUNTS = {"calibration": CALIBRATED, "manual": JUDGED, "plays": JUDGED}
TRAINED_SECONDS = 300.0
_BYTES = 256


def round_to_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """Return x as quantize_mx rounds it: blocks of 32, a scale of 2^(floor(log2 largest) - 7)."""
    blocks = x.float().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.frexp(largest).exponent - 8.0)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


def as_floats(model: nn.Module, rounded: bool) -> nn.Module:
    """Return the model with the numbers of its few-bit weights as bfloat16, which is faster.

    rounded: also round the inputs of these weights.
    """
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if not isinstance(module, QuantizedLinear):
                continue
            linear = nn.Linear(module.in_features, module.out_features, device="meta")
            linear.weight = nn.Parameter(module.dequantized(torch.bfloat16), False)
            linear.register_parameter("bias", module.bias)
            if rounded:
                linear.register_forward_pre_hook(lambda _, args: (round_to_mxfp8(args[0]),))
            setattr(parent, name, linear)
    return model


@torch.no_grad()
def losses(model: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of each window."""
    found = []
    for ids in rows:
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        found.append(nn.functional.cross_entropy(logits, ids[0, 1:]))
    return torch.stack(found)


def _byte_rows(text: str, count: int) -> list[torch.Tensor]:
    ids = torch.tensor(list(text.encode()), dtype=torch.long)
    rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return list(rows[:: max(1, len(rows) // count)][:count].split(1))


@cache
def trained() -> tuple[nn.Module, dict[str, list[torch.Tensor]]]:
    """Return a decoder of bytes, trained here, and its windows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    learned, held_out = manual_split()
    other = plays()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_BYTES, hidden_size=384, intermediate_size=1024, num_hidden_layers=7,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    text = torch.tensor(list((learned + other[: len(other) // 2]).encode()), dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    started, step = time.process_time(), 0
    while time.process_time() - started < TRAINED_SECONDS:
        # few tokens a step: more steps in the time
        at = int(torch.randint(0, len(text) - LENGTH, (1,)))
        ids = text[None, at : at + LENGTH]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
    parameters = sum(p.numel() for p in model.parameters())
    print(f"decoder of {parameters:,} parameters: {step} steps, loss {loss.item():.2f}")
    rows = {
        "calibration": _byte_rows(learned, CALIBRATED),
        "manual": _byte_rows(held_out, JUDGED),
        "plays": _byte_rows(other[len(other) // 2 :], JUDGED),
    }
    return model.bfloat16().eval(), rows


@cache
def packaged() -> tuple[nn.Module, dict[str, list[torch.Tensor]]]:
    """Return SmolLM2-135M and its windows."""
    rows = {name: windows()[name][:: len(windows()[name]) // n][:n] for name, n in COUNTS.items()}
    ids = torch.tensor(smollm()[1](library())["input_ids"])[: BESIDE * LENGTH]
    rows["calibration"] += list(ids.reshape(-1, LENGTH).split(1))
    return copy.deepcopy(smollm()[0]).bfloat16().eval(), rows


@cache
def encoder() -> tuple[nn.Module, dict[str, Any]]:
    """Return all-MiniLM-L6-v2, and sentences that calibrate it and that judge."""
    model, tokenizer = models.with_weights(models.ENCODER)
    batches, judged = encoder_batches(tokenizer)
    return model.bfloat16().eval(), {"calibration": batches, "judged": judged}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "smollm2-135m": packaged,
    models.ENCODER: encoder,
    "decoder-11m": trained,
}
UNUSED = {models.ENCODER: "pooler"}
"""What the output that is judged does not depend on."""


def outputs(name: str, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the losses of windows by domain, or the embeddings of sentences."""
    rows = MODELS[name]()[1]
    if name == models.ENCODER:
        return {"judged": embed(model, rows["judged"]).float()}
    return {domain: losses(model, rows[domain]) for domain in ("manual", "plays")}


def compared(own: dict[str, torch.Tensor], dense: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return mean and interval of each quality over the dense model's outputs."""
    if "judged" in own:
        found = torch.cosine_similarity(own["judged"], dense["judged"])
        half = 1.96 * float(found.std()) / math.sqrt(len(found))
        mean = float(found.mean())
        return {"cosine": [round(mean + e, 4) for e in (0.0, -half, half)]}
    row: dict[str, Any] = {"tokens": JUDGED * (LENGTH - 1)}
    for key, domain in (("in", "manual"), ("out", "plays")):
        of = own[domain] - dense.get(domain, torch.zeros(()))
        half = 1.96 * float(of.std()) / math.sqrt(len(of))
        mean = float(of.mean())
        row[key] = [round(math.exp(mean + e), 4) for e in (0.0, -half, half)]
    return row


@cache
def statistics(name: str) -> Any:
    """Return one calibration for all forms of a model."""
    model, rows = MODELS[name]()
    data = rows["calibration"]
    batches = [{"input_ids": ids} if isinstance(ids, torch.Tensor) else ids for ids in data]
    skipped = UNUSED.get(name)
    return calibrate(model, batches, base="mxfp4", gradients=False, exclude=skipped)


def measured(
    name: str, form: str, dense: dict[str, torch.Tensor]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a form, with inputs in 16 bits and for MX weights also rounded: the share
    of bytes, and the quality over the dense model's outputs."""
    model, _ = MODELS[name]()
    kept = copy.deepcopy(model)
    plain, _, branch = form.partition(" in ")
    keywords = read_form(plain).keywords()
    if branch:
        keywords["factors"] = branch
    stored, error = 1.0, None
    started = time.process_time()
    if keywords:
        few = FORMATS[keywords["base"]].block is not None or keywords.get("rank")
        made = {"calibration": statistics(name), "method": "whitened"} if few else {}
        report = compress(kept, **keywords, **made, exclude=UNUSED.get(name))
        stored = 1.0 - report.achieved_ratio
        errors = [one.output_error for one in report.layers if one.output_error is not None]
        error = sum(errors) / len(errors) if errors else None
    spent = time.process_time() - started
    for key in keys(form):
        judged = as_floats(kept, key.endswith(ROUNDED))
        row = {"bytes": round(stored, 4)}
        absolute = form == "bf16" and name != models.ENCODER
        row |= compared(outputs(name, judged), {} if absolute else dense)
        row["cpu_seconds"] = round(spent)
        if error is not None:
            row["layer_error"] = round(error, 4)
        yield key, row


def keys(form: str) -> tuple[str, ...]:
    """Return the rows of a form: MX weights have one with rounded inputs, too."""
    return (form, form + ROUNDED) if form.startswith("mx") else (form,)


def run(names: list[str], forms: list[str], fresh: bool) -> bool:
    """Measure forms of models, and print all that are known."""
    console = Console(width=110)
    for name in names or list(MODELS):
        known = json.loads(QUALITY.read_text(encoding="utf-8"))
        done = {form for form, row in known.get(name, {}).items() if "cpu_seconds" in row}
        wanted = forms or FORMS
        missing = [form for form in wanted if fresh or not done.issuperset(keys(form))]
        dense = {}
        if missing:
            dense = outputs(name, MODELS[name]()[0])
        for form in missing:
            for key, row in measured(name, form, dense):
                known = json.loads(QUALITY.read_text(encoding="utf-8"))
                known.setdefault(name, {})[key] = row
                write_text(QUALITY, json.dumps(known, indent=1) + "\n")
                console.print(f"{name} {key}: {row}")
        shown = Table(title=name, title_justify="left")
        columns = ("cosine",) if name == models.ENCODER else ("in", "out", "tokens")
        heads = {"in": "perplexity over bf16, in domain", "out": "other domain"}
        for column in ("weights", "bytes", *columns):
            shown.add_column(heads.get(column, column), justify="right")
        for form, row in known.get(name, {}).items():
            cells = [
                "{:.3f} [{:.3f}, {:.3f}]".format(*row[key]) if key != "tokens" else str(row[key])
                for key in columns
            ]
            shown.add_row(form, f"{row['bytes']:.3f}", *cells)
        console.print(shown)
    return True
