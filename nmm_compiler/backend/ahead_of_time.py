"""A graph compiled ahead of time: `aot_compile` saves it, and another process loads it.

    compiled = torch.compile(f, fullgraph=True, backend="nmm").aot_compile((args, kwargs))
    compiled.save_compiled_function(path)
    torch.compiler.load_compiled_function(file)       # elsewhere, without the model's code

The file holds the inner compiler's artifact, as that compiler writes it, behind a JSON header: the
options that calls look up when they run, the report, and each kernel with its source and, where
there is one, its tuning. Loading puts kernels and tunings into the cache that it lacks, if this
version of the package would have emitted the same source.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.aot_compile_types import (
    BundledAOTAutogradSerializableCallable,
    GraphModuleSerializableCallable,
    SerializableCallable,
)

from nmm_compiler.backend.report import CompileReport, publish
from nmm_compiler.cache.foreign import check_shape
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen.build import SOURCE_FILE, asked, check_foreign, kernel_key
from nmm_compiler.codegen.machine_target import machine_target
from nmm_compiler.codegen.tuned import choice_in, keep_tuning, tuning_files
from nmm_compiler.errors import ModelError
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.ops.call_options import executor_name
from nmm_compiler.options import Options

_INNER: dict[str, type[SerializableCallable]] = {
    "aot": BundledAOTAutogradSerializableCallable,
    "graph": GraphModuleSerializableCallable,
}
_LENGTH_BYTES = 8


def is_wanted() -> bool:
    """Return whether torch compiles ahead of time now, so that the result must be writable."""
    config: Any = torch._functorch.config
    return bool(config.bundled_autograd_cache and config.force_non_lazy_backward_lowering)


class AheadOfTime(SerializableCallable):
    """A compiled graph that can be written to a file; `header` is plain JSON data."""

    def __init__(self, kind: str, inner: SerializableCallable, header: dict[str, Any]) -> None:
        self.kind, self.inner, self.header = kind, inner, header

    @classmethod
    def of(
        cls, compiled: Callable[..., Any], graph: fx.GraphModule, options: Options, report: Any
    ) -> AheadOfTime:
        """Wrap what an inner backend made of a graph.

        Raises ModelError for a callable that has nothing to save.
        """
        inner: SerializableCallable
        if getattr(compiled, "serialize", None) is not None:
            kind, inner = "aot", BundledAOTAutogradSerializableCallable(compiled)
        elif report.inner == "eager":  # "eager" runs the graph itself
            kind, inner = "graph", GraphModuleSerializableCallable(graph)
        else:
            raise ModelError(
                f"inner backend {report.inner!r} returns a callable that cannot be saved; pass "
                "options={'inner': 'inductor'} or 'eager' to aot_compile"
            )
        header = {
            "target": options.target,
            "options": options.call_options(),
            "report": report.to_dict(),
            "kernels": [_saved(kernel, options) for kernel in report.built],
        }
        return cls(kind, inner, header)

    @classmethod
    def serialize_compile_artifacts(cls, fn: AheadOfTime) -> bytes:
        """Return the header and the inner compiler's artifact as bytes."""
        header = json.dumps({"kind": fn.kind, **fn.header}).encode()
        body = type(fn.inner).serialize_compile_artifacts(fn.inner)
        return len(header).to_bytes(_LENGTH_BYTES, "big") + header + body

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> AheadOfTime:
        """Return the callable; register its options, kernels and report in this process."""
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
        header = json.loads(data[_LENGTH_BYTES:start])
        kind = header.pop("kind")
        options = Options.make({"target": header["target"], **header["options"]})
        executor_name(options)
        for kernel in header["kernels"]:
            _restore(kernel, options)
        inner = _INNER[kind].deserialize_compile_artifacts(data[start:])
        publish(CompileReport.from_dict(header["report"]), options)
        return cls(kind, inner, header)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled graph."""
        return self.inner(*args, **kwargs)


def _saved(kernel: Any, options: Options) -> dict[str, Any]:
    ask = asked(kernel.spec, kernel.target, dialect=kernel.dialect, options=options)
    tuning = None
    if ask.schedule is not None:
        tuning = tuning_files(kernel.spec, ask.target, ask.budget, ask.store)
    return {
        **({} if tuning is None else {"tuning": tuning}),
        "family": kernel.spec.family,
        "spec": kernel.spec.to_dict(),
        "digest": ask.key.digest,
        "dialect": kernel.dialect,
        "source": kernel.source,
        "meta": dict(kernel.meta),
    }


def _restore(saved: dict[str, Any], options: Options) -> None:
    """Put a kernel into the cache, unless this version of the package would emit another one.

    The tuning of a kernel comes with it, so that a call here asks for the tuned kernel; a tuning
    that this cache has already stays. Raises CacheTrustError for a file that holds no kernel.
    """
    spec = FAMILIES[saved["family"]].spec_class.from_dict(saved["spec"])
    chip = machine_target(options.target, options)
    tuning, budget = saved.get("tuning"), options.instruction_budget
    schedule = None if tuning is None else choice_in(tuning, spec, chip).schedule
    key = kernel_key(spec, chip, schedule, budget, saved["dialect"])
    if key.digest != saved["digest"]:
        return
    check_shape(SOURCE_FILE, saved["source"])
    check_foreign(SOURCE_FILE, saved["source"])
    store = Store.for_kernels(options, check=check_foreign)
    if tuning is not None:
        keep_tuning(spec, chip, budget, store, tuning)
    store.get_or_build(key, lambda: {SOURCE_FILE: saved["source"]}, lambda: saved["meta"])
