"""`nmm export`: writes a model as MLIR, each fused kernel as one call with its source beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from nmm_compiler.cli import models, values
from nmm_compiler.errors import OptionTypeError
from nmm_compiler.lowrank_models.progress import steps
from nmm_compiler.report.parts import Grid


def export(
    model: values.Model,
    output: Annotated[
        Path, values.output_option("--output", "-o", help_="the .mlir file to write")
    ],
    dialect: Annotated[
        str,
        values.choice_option(
            "dialect", "nmm_compiler.mlir.lower:DIALECTS", "torch, linalg or stablehlo"
        ),
    ] = "stablehlo",
    kernels: Annotated[
        str,
        values.choice_option(
            "way", "nmm_compiler.mlir.lower:MODES", "call, or inline (reference bodies)"
        ),
    ] = "call",
    weights: Annotated[
        str,
        values.choice_option(
            "way", "nmm_compiler.mlir.lower:WEIGHTS", "args, or resources (in the module)"
        ),
    ] = "args",
    tokens: values.Tokens = 64,
    target: values.Target = "trn2",
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
        (kernel.name, len(kernel.calls), len(kernel.sources),
         ", ".join(dict.fromkeys(launch.family for launch in kernel.launches)))
        for kernel in module.kernels
    ]  # fmt: skip
    table = Grid.of(("kernel", "calls", "sources", "family"), rows, right=("calls", "sources"))
    nothing = f"nothing was fused; `nmm explain {model}` says why"
    files = [f"wrote {path}" for path in written]
    return values.Answer(module.manifest(), [[table] if rows else nothing, *files])
