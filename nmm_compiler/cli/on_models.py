"""What a model becomes: `nmm explain` its graphs, `nmm plan` its time, `nmm export` its MLIR, `nmm
compress` a low-rank model, which `nmm eval` judges by lm-eval.

The page of explain compiles the model: it has the graphs, each kernel with its timeline and source,
and the whole model's prediction. All that it says of a call is simulated, so that a call has one
price on it; without a page the closed form answers at once. A plan is made before a device is
rented. An export writes each fused kernel as one call, with its source beside it. A low-rank model
is written with its report as JSON; lm-eval loads such directories itself.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from nmm_compiler.cli import models, values
from nmm_compiler.errors import MissingPackageError, ModelError, NmmError, OptionTypeError
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.outputs import read_json, write_text
from nmm_compiler.report.parts import Grid, Line, Part, Section

_STACKS = "nmm_compiler.prediction.stacks:stack_named"
_LENGTH, _BATCH = 256, 8
"""Tokens of a calibration sequence, and sequences of a batch."""


def explain(
    model: values.Model,
    tokens: values.Tokens = 64,
    target: values.Target = "trn2",
    rules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:NAME", help="a rule or a list of rules of your own; may repeat"
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        values.option(values.share, "SHARE", "factorize first, this share of parameters removed"),
    ] = None,
    html: values.Html = None,
    repro: Annotated[
        Path | None,
        values.option(
            values.output_file, "FILE", "write a script that rewrites the first match and checks it"
        ),
    ] = None,
    as_json: values.Json = False,
) -> values.Answer:
    """Dry run of the passes over every graph of a model; nothing is compiled.

    With --html the model is compiled too, for a page: graphs, kernels, timelines, sources,
    refusals, predictions. Nothing runs on a device; all latencies are the simulator's predictions.

    Example: nmm explain all-MiniLM-L6-v2

    Example: nmm explain llama-3.2-1b --ratio 0.2 --html report.html
    """
    own = [rule for name in rules or () for rule in models.rules_of(name)]
    from nmm_compiler.passes.pipeline import explain as run

    page: list[Part] = []
    with steps(f"loading {model}") as step, models.foreign(model, "running it raised"):
        loaded, inputs = models.load(model, tokens)
        before = None
        if ratio is not None:
            from nmm_compiler.lowrank_models.apply import compress
            from nmm_compiler.lowrank_models.meta_copies import without_data

            step("factorizing")
            before = without_data(loaded)
            compressed = compress(loaded, ratio, target=target, workload=tokens)
            page = [Section("compression", tuple(compressed.page_parts()), folded=True)]
        if html is not None:
            step("predicting the whole model")
            page = [_predicted(model, loaded, before, inputs, target), *page]
        step("tracing and matching")
        options: Any = {"target": target, "rules": [*own, *(["+simulated"] if html else [])]}
        result = run(loaded, dict(inputs), options=options)
        if html is not None:
            import torch

            from nmm_compiler.backend.report import compile_parts

            step("compiling, building kernels")
            reports: list[Any] = []
            torch._dynamo.reset()
            given = {**options, "report": reports.append, "inner": "eager"}
            with torch.no_grad():
                torch.compile(loaded, backend="nmm", options=given)(**inputs)
            top, *rest = compile_parts(reports)
            matched = Section("what is fused and what is not", tuple(result.parts()))
            page = [top, *page, matched, *rest]
    if repro is not None:
        write_text(repro, result.reproducer(target=target))
    return values.Answer(result.to_dict(), result.parts(), page=(f"{model} on {target}", page))


def _predicted(name: str, model: Any, before: Any, inputs: dict[str, Any], target: str) -> Part:
    """Return the section with the whole model's prediction, or a line that says why it is not.

    A directory is predicted by its configuration, which knows the dense model that a low-rank one
    was; the others for the inputs that they run. before: the model that was factorized, if it was;
    what is predicted is then the very model that the page compiles.
    """
    from nmm_compiler.prediction.predict import predict

    setting: dict[str, Any] = {"dense": before, "norms": False}  # as the page compiles it
    tensors = [value for value in inputs.values() if hasattr(value, "shape")]
    sizes = [one.shape[:-1] if one.is_floating_point() else one.shape for one in tensors[:1]]
    if sizes and 1 <= len(sizes[0]) <= 2:  # [tokens] or [sequences, tokens]
        setting |= dict(zip(("prompt", "batch"), reversed(sizes[0]), strict=False))
    generates, given = getattr(model, "can_generate", bool)(), model
    if before is None and generates and (Path(name) / "config.json").is_file():
        given = name
        setting |= {"dtype": str(model.dtype).removeprefix("torch.")}
    elif not generates:
        setting |= {"inputs": inputs}
    try:
        parts = predict(given, target, **setting).parts()
    except NmmError as error:  # a page without it is still a page, and says so
        return Line(f"the whole model is not predicted: {error}", "note")
    return Section("the whole model, predicted", tuple(parts))


def plan(
    model: values.Model,
    target: values.Targets = ("trn2",),
    forms: Annotated[
        Sequence[str] | None,
        values.listed(str, "FORMS", "of the weights: bf16, fp8, lowrank:0.2, mxfp4+32fp8, ..."),
    ] = None,
    ratio: Annotated[
        Sequence[float] | None,
        values.listed(values.share, "SHARES", "low rank alone, instead of --forms"),
    ] = None,
    batch: Annotated[Sequence[int], values.listed(values.size, "SIZES", "sequences at once")] = (
        1,
    ),
    prompt: Annotated[
        Sequence[int], values.listed(values.size, "SIZES", "tokens of the prompt")
    ] = (512,),
    context: Annotated[
        Sequence[int], values.listed(values.size, "SIZES", "tokens in the cache")
    ] = (2048,),
    tp: values.Cores = (1,),
    lnc: Annotated[int, typer.Option(min=1, max=2, help="physical cores of a core, 1 or 2")] = 1,
    include: values.Include = None,
    exclude: values.Exclude = None,
    price: Annotated[
        str,
        values.choice_option(
            "price",
            "nmm_compiler.prices.kernel:PRICES",
            "of a kernel: simulated, tuned (nmm build --search), closed_form",
        ),
    ] = "simulated",
    stack: Annotated[
        str,
        values.option(
            lambda name: pkgutil.resolve_name(_STACKS)(name).name,
            "NAME",
            "what runs the programs: launch gaps, host time",
        ),
    ] = "own",
    measured: Annotated[
        Path | None,
        values.input_option("your time a token: milliseconds, or a profiler's JSON"),
    ] = None,
    routing: Annotated[
        Path | None,
        values.input_option("how often each expert was chosen: a JSON list of counts"),
    ] = None,
    html: values.Html = None,
    as_json: values.Json = False,
) -> values.Answer:
    """Predict a model's latency in each form of its weights, without weights or a device.

    Example: nmm plan llama-3.1-8b --target trn2,trn3 --forms bf16,fp8,lowrank:0.2,mxfp4+32fp8
    """
    from nmm_compiler.prediction import plan as planning
    from nmm_compiler.prediction.prices import check_routing

    if forms and ratio:
        raise OptionTypeError("ratio", ratio, "it as a form, e.g. --forms bf16,lowrank:0.2")
    own = None
    if measured is not None:
        own = planning.read_measured(measured.read_text(errors="replace"), str(measured))
    low_rank = [f"lowrank:{one:g}" for one in ratio or ()]
    chosen = forms or (["bf16", *low_rank] if low_rank else planning.DEFAULT)
    with steps(f"reading {model}") as step:
        planned = planning.plan(
            models.described(model),
            targets=target,
            forms=chosen,
            batches=batch,
            prompts=prompt,
            contexts=context,
            tps=tp,
            lnc=lnc,
            include=include,
            exclude=exclude,
            price=price,
            stack=stack,
            measured=own,
            routing=None if routing is None else check_routing(read_json(routing, list), routing),
            progress=step,
        )
    page = f"plan of {planned.name}", planned.parts()
    return values.Answer(planned.to_dict(), planned.parts(), page=page)


def export(
    model: values.Model,
    output: Annotated[
        Path, values.option(values.output_file, "FILE", "the .mlir file to write", "--output", "-o")
    ],
    dialect: Annotated[
        str,
        values.choice_option("dialect", "nmm_compiler.mlir:DIALECTS", "torch, linalg or stablehlo"),
    ] = "stablehlo",
    kernels: Annotated[
        str,
        values.choice_option(
            "way", "nmm_compiler.mlir:MODES", "call, or inline (reference bodies)"
        ),
    ] = "call",
    weights: Annotated[
        str,
        values.choice_option(
            "way", "nmm_compiler.mlir:WEIGHTS", "args, or resources (in the module)"
        ),
    ] = "args",
    tokens: values.Tokens = 64,
    target: values.Target = "trn2",
    as_json: values.Json = False,
) -> values.Answer:
    """Rewrite a model and write it as MLIR, with a manifest and the NKI source of each kernel.

    Example: nmm export all-MiniLM-L6-v2 --dialect stablehlo -o encoder.mlir
    """
    from nmm_compiler.mlir.export import export_mlir

    with steps(f"loading {model}"):
        loaded, inputs = models.load(model, tokens)
    if any(p.is_meta for p in loaded.parameters()):  # a public name: shapes are all that args need
        if weights != "args":
            raise OptionTypeError("weights", weights, f"args: {model} is known by its shapes")
        loaded = loaded.to_empty(device="cpu")
        inputs = models.example_inputs(model, loaded, tokens)
    with steps("tracing, rewriting, lowering"), models.foreign(model, "running it raised"):
        module = export_mlir(
            loaded,
            inputs,
            dialect=dialect,
            kernels=kernels,
            weights=weights,
            options={"target": target},
        )
    written = module.save(output)
    rows = [
        (kernel.name, len(kernel.calls), len(kernel.sources), kernel.family)
        for kernel in module.kernels
    ]
    table = Grid.of(("kernel", "calls", "sources", "family"), rows, right=("calls", "sources"))
    files = [Line(f"wrote {path}") for path in written]
    return values.Answer(module.manifest(), [table, *files])


def compress(
    model: Annotated[str, values.model_argument(weights=True)],
    out_dir: Annotated[
        Path,
        typer.Argument(help="directory for the low-rank model", file_okay=False),
    ],
    ratio: Annotated[
        float | None, values.option(values.share, "SHARE", "share of parameters to remove")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", min=0, help="one rank for all, instead of --ratio; 0: the base alone"
        ),
    ] = None,
    base: Annotated[
        str | None,
        values.choice_option(
            "format",
            "nmm_compiler.kernels.packed_formats:FORMATS",
            "round the weights to mxfp4, fp8, int4, ...; factors mend what that loses",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        values.input_option("calibration text, one passage a line"),
    ] = None,
    include: values.Include = None,
    exclude: values.Exclude = None,
    factors: Annotated[
        str | None,
        values.choice_option(
            "format",
            "nmm_compiler.options:FACTORS",
            "round the factors: fp8, int8, or mxfp8 beside an MX base",
        ),
    ] = None,
    recover_steps: Annotated[
        int,
        typer.Option("--recover", min=0, help="steps of fine-tuning against the original"),
    ] = 0,
    target: values.Target = "trn2",
    as_json: values.Json = False,
) -> values.Answer:
    """Factorize a model's linear layers and save it for from_pretrained.

    OUT_DIR/compression.json has all figures. `nmm explain OUT_DIR --html FILE` makes a page of it.

    Example: nmm compress ./llama ./llama-lowrank --ratio 0.2 --text calibration.txt
    """
    from nmm_compiler.lowrank_models import hf
    from nmm_compiler.lowrank_models.config import CompressionConfig
    from nmm_compiler.prediction.headlines import compress as run

    settings: dict[str, Any] = {
        "ratio": ratio, "rank": rank, "include": include or None, "exclude": exclude or None,
        "target": target, "factors": factors, "base": base,
    }  # fmt: skip
    CompressionConfig(**settings, calibration=text)
    if recover_steps and (factors or base):
        wanted = "0 with --base or --factors: what is rounded is not trained"
        raise OptionTypeError("recover", recover_steps, wanted)
    if recover_steps and text is None:
        raise ModelError("--recover needs text to train on; pass --text FILE")
    with steps(f"loading {model}"):
        loaded, tokenizer = models.with_weights(model)
    batches = None if text is None else read_batches(text, tokenizer, loaded)
    original = copy.deepcopy(loaded) if recover_steps else None
    report = run(loaded, **settings, calibration=batches)
    said = [*report.parts()]
    figures: dict[str, Any] = {"compression": report.to_dict()}
    figures["compression"]["achieved_ratio"] = report.achieved_ratio
    if original is not None:
        from nmm_compiler.lowrank_models.recover import recover

        recovery = recover(loaded, batches, teacher=original, steps=recover_steps)
        said.append(Line(recovery.summary()))
        figures["recovery"] = recovery.to_dict()
    files = {"compression.json": json.dumps(figures, indent=2)}
    hf.save(loaded, out_dir, tokenizer=tokenizer, files=files)
    return values.Answer(figures, [*said, Line(f"saved     {out_dir}")])


def read_batches(path: Path, tokenizer: Any, model: Any) -> list[dict[str, Any]]:
    """Return calibration batches of a text file.

    For a causal language model the text is one stream, cut into sequences; for others each line is
    a sequence. Raises ModelError without a tokenizer or text.
    """
    if tokenizer is None:
        raise ModelError(
            "--text needs a tokenizer, and the model's directory has none; save one there with "
            "tokenizer.save_pretrained"
        )
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"--text {path} cannot be read as UTF-8 text: {error}") from error
    if not lines:
        raise ModelError(f"--text {path} has no text; pass a file with some hundred lines")
    if type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        ids = tokenizer("\n".join(lines), truncation=False, return_tensors="pt")["input_ids"]
        rows = ids[:, : ids.shape[1] // _LENGTH * _LENGTH].reshape(-1, _LENGTH)
        return [{"input_ids": few} for few in (rows if len(rows) else ids).split(_BATCH)]
    given = {"truncation": True, "max_length": _LENGTH, "return_tensors": "pt"}
    return [dict(tokenizer(line, **given)) for line in lines]


def evaluate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="DIRECTORY of the model", metavar="DIRECTORY")],
) -> values.Answer:
    """Evaluate a causal language model with EleutherAI's lm-eval; what follows is lm-eval's.

    Example: nmm eval ./llama-lowrank --tasks arc_easy,wikitext --limit 200 --batch_size 8
    """
    models.check(model, directory=True)
    if importlib.util.find_spec("lm_eval") is None:
        raise MissingPackageError("lm_eval", "nmm eval", "eval")
    given = f"pretrained={model},trust_remote_code=True"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", given]
    code = subprocess.run([*command, *context.args], check=False).returncode
    if code:
        raise NmmError(f"lm-eval ended with exit code {code}; what it said is above")
    return values.Answer(None)  # it has printed its own
