"""What an export holds: MLIR text, the kernels that it calls with their NKI sources, and files.

A `KernelCall` is a `torch.ops.nmm.*` node with its arguments by name. Calls with the same
`signature` are served by one `ExportedKernel`. Its specs come from the function that serves a
compiled model (`ops.lower.lower`), so that an exported call and a compiled one mean the same
kernels. A call is one launch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from nmm_compiler import outputs
from nmm_compiler.codegen.build import build_kernel
from nmm_compiler.errors import ModelError, NmmError
from nmm_compiler.ops import lower as lowering
from nmm_compiler.ops.registration import DEFINITIONS
from nmm_compiler.options import Options
from nmm_compiler.records import Record


def open_shape(tensor: Tensor) -> tuple[int | None, ...]:
    """Return the shape of a (fake) tensor; None for a size that is known at run time only."""
    return tuple(int(size) if isinstance(size, int) else None for size in tensor.shape)


def dtype_of(tensor: Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class CustomCall:
    """One call of a fused kernel.

    op: the op's name in namespace nmm. given: its arguments by name in schema order, with the FX
    node of each tensor, defaults filled in.
    """

    node: fx.Node
    op: str
    given: dict[str, Any]

    @property
    def tensors(self) -> list[fx.Node]:
        """The nodes of the tensors, in schema order."""
        return [one for one in pytree.tree_leaves(self.given) if isinstance(one, fx.Node)]

    @property
    def values(self) -> dict[str, Any]:
        """The arguments with a tensor without data for each operand, of its own."""
        return dict(fx.map_arg(self.given, lambda node: node.meta["val"].detach()))

    @property
    def dynamic(self) -> bool:
        """Whether a size of an operand is known at run time only."""
        return any(None in open_shape(node.meta["val"]) for node in self.tensors)

    def signature(self) -> str:
        """Return canonical JSON of everything that identifies the kernel, without the node."""
        parts = pytree.tree_map_only(
            Tensor, lambda tensor: f"{open_shape(tensor)} {dtype_of(tensor)}", self.values
        )
        return json.dumps({"op": self.op} | parts, sort_keys=True)


def calls_of(graph: fx.Graph) -> list[CustomCall]:
    """Return the kernel calls of a graph in order."""
    named = ((node, lowering.op_name(node.target)) for node in graph.nodes)
    return [  # of any executor: an exported module has none
        CustomCall(
            node, op, DEFINITIONS[op].bound(node.args, node.kwargs) | {"executor": "reference"}
        )
        for node, op in named
        if op is not None
    ]


@dataclass(frozen=True)
class KernelSource(Record):
    """The NKI source of a kernel for one token count: text, sha256 and file name."""

    tokens: int
    file: str
    sha256: str
    text: str = field(repr=False, compare=False)


@dataclass(frozen=True)
class ExportedKernel(Record):
    """One distinct kernel of a module: a function, or the target of custom_calls.

    name: the function's name. op: the torch op. calls: the FX nodes that it serves. family, spec:
    what its NKI kernel computes, as KernelSpec's JSON; "m" is null when the token count is known at
    run time only. operands: for each positional argument of the NKI function, the number of the
    call's operand. sources: NKI files, one per token count; empty when none were written.
    """

    name: str
    op: str
    x_layout: str
    out_layout: str
    target: str
    calls: tuple[str, ...]
    family: str
    spec: dict[str, Any]
    operands: tuple[int, ...]
    sources: tuple[KernelSource, ...]

    @classmethod
    def of(cls, calls: Sequence[CustomCall], options: Options, sources: bool) -> ExportedKernel:
        """Return the kernel that serves these calls, which have one signature.

        sources: build the NKI source, for the calls' token count or, when that is known at run time
        only, for each of options.buckets. Raises ModelError when no kernel family computes the
        calls, or there are no buckets.
        """
        call, values = calls[0], calls[0].values
        counts = options.buckets
        if not call.dynamic:
            counts = (int(lowering.tokens(next(iter(values.values())), values)),)
        elif sources and counts is None:
            raise ModelError(
                f"{call.node} has a token count known at run time only, and an NKI kernel has a "
                "fixed one; pass options={'buckets': (1, 128, ...)} to write a source per count, "
                "or kernels='inline', or sources=False"
            )
        launches = {count: _launch(call, count) for count in counts or (1,)}
        spec, operands = next(iter(launches.values()))
        digest = hashlib.sha256(call.signature().encode()).hexdigest()[:8]
        return cls(
            name=f"nmm_{call.op}_{digest}",
            op=call.op,
            x_layout=values.get("x_layout", "row"),
            out_layout=",".join(values.get("out_layouts") or [values.get("out_layout", "row")]),
            target=values["target"],
            calls=tuple(one.node.name for one in calls),
            family=spec.family,
            spec=spec.to_dict() | ({"m": None} if call.dynamic else {}),
            operands=operands,
            sources=tuple(
                _source(one, count, values["target"], options)
                for count, (one, _) in launches.items()
                if sources
            ),
        )

    def attributes(self) -> dict[str, Any]:
        """Return the module's attributes of the kernel."""
        names = ("op", "family", "operands", "target", "x_layout", "out_layout")
        given = {name: getattr(self, name) for name in names}
        given["spec"] = json.dumps(self.spec, sort_keys=True)
        if self.sources:
            given["source"] = _one_or_all([source.file for source in self.sources])
            given["source_sha256"] = _one_or_all([source.sha256 for source in self.sources])
            given["source_tokens"] = _one_or_all([source.tokens for source in self.sources])
        return given


def _one_or_all(entries: list[Any]) -> Any:
    return entries[0] if len(entries) == 1 else entries


def _launch(call: CustomCall, tokens: int) -> tuple[Any, tuple[int, ...]]:
    """Return the spec of a call's kernel and, for its operands in order, their numbers in the
    call."""
    values = call.values
    try:
        launch = lowering.lower(call.op, [*values.values()], values, tokens)
    except NmmError as error:
        raise ModelError(f"no kernel computes {call.node}: {error}") from error
    tensors = (one for one in pytree.tree_leaves(values) if isinstance(one, Tensor))
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    for name, operand in lowering.reshaped(call.op, launch).items():
        numbers[id(operand)] = numbers[id(values[name])]
    if not numbers.keys() >= {id(tensor) for tensor in launch.operands}:
        raise ModelError(f"the kernel of {call.node} takes other tensors than nmm.{call.op} has")
    return launch.spec, tuple(numbers[id(tensor)] for tensor in launch.operands)


def _source(spec: Any, tokens: int, target: str, options: Options) -> KernelSource:
    kernel = build_kernel(spec, target, options=options)
    digest = hashlib.sha256(kernel.source.encode()).hexdigest()
    return KernelSource(tokens, f"{kernel.name}.py", digest, kernel.source)


@dataclass(frozen=True)
class Argument(Record):
    """One argument of the exported function, in order.

    kind "weight": the parameter or buffer `name` of the model; kind "input": a tensor that the
    caller passes. shape has None for a size known at run time only.
    """

    name: str
    kind: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True)
class MLIRModule:
    """An exported module.

    text: the MLIR. dialect: torch, linalg or stablehlo. mode: "call" or "inline". kernels: the
    distinct kernels in the order of first use. arguments: those of @main, weights named as in the
    model's state_dict. outputs: how many tensors @main returns.
    """

    text: str
    dialect: str
    mode: str
    kernels: tuple[ExportedKernel, ...]
    arguments: tuple[Argument, ...]
    outputs: int

    def __str__(self) -> str:
        return self.text

    def manifest(self, directory: str = ".") -> dict[str, Any]:
        """Return the map of names to files, as plain JSON data; `directory` holds the sources."""
        kernels = []
        for kernel in self.kernels:
            entry = kernel.to_dict()
            launch = {name: entry.pop(name) for name in ("family", "spec", "operands", "sources")}
            for source in launch["sources"]:
                source["file"] = f"{directory}/{source['file']}"
            kernels.append({**entry, "launches": [launch]})
        return {
            "version": 1,
            "entry": "main",
            "dialect": self.dialect,
            "kernels_mode": self.mode,
            "arguments": [argument.to_dict() for argument in self.arguments],
            "outputs": self.outputs,
            "kernels": kernels,
        }

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Write the module, its manifest and its NKI sources; return the files, the module last.

        `model.mlir` comes with `model.manifest.json` and the directory `model.kernels`. Every file
        is written beside its place and moved there; when one cannot be written, OutputError says
        which, and no new file is left.
        """
        path = Path(path)
        stem = path.name.removesuffix(".mlir")
        sources = path.parent / f"{stem}.kernels"
        wanted = {
            sources / source.file: source.text
            for kernel in self.kernels
            for source in kernel.sources
        }
        if wanted:
            sources.mkdir(exist_ok=True)
        manifest = json.dumps(self.manifest(sources.name), indent=2) + "\n"
        wanted[path.parent / f"{stem}.manifest.json"] = manifest
        wanted[path] = self.text
        outputs.write_all({place: outputs.utf8(text) for place, text in wanted.items()})
        return tuple(wanted)
