"""A graph compiled ahead of time: `aot_compile` saves it, and another process loads it.

    compiled = torch.compile(f, fullgraph=True, backend="nmm").aot_compile((args, kwargs))
    compiled.save_compiled_function(path)
    torch.compiler.load_compiled_function(file)       # elsewhere, without the model's code

The file holds a JSON header (the options that calls look up when they run, and the report), then an
archive of the kernel cache with each kernel and, where there is one, its tuning, then the inner
compiler's artifact, as that compiler writes it. Loading puts the entries into the cache that it
lacks; a version of the package that would emit another source asks for another entry.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import fx
from torch._dynamo.aot_compile_types import (
    BundledAOTAutogradSerializableCallable,
    GraphModuleSerializableCallable,
    SerializableCallable,
)

from nmm_compiler.backend.report import CompileReport, publish
from nmm_compiler.cache.archive import pack, unpack
from nmm_compiler.cache.entry import Entry, make
from nmm_compiler.cache.foreign import check_sources
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen import tuned
from nmm_compiler.codegen.build import SOURCE_FILE, asked
from nmm_compiler.errors import ModelError
from nmm_compiler.ops.call_options import executor_name
from nmm_compiler.options import Options

_INNER: dict[str, Any] = {
    "aot": BundledAOTAutogradSerializableCallable,
    "graph": GraphModuleSerializableCallable,
}
_LENGTH_BYTES = 8


class AheadOfTime(SerializableCallable):
    """A compiled graph that can be written to a file.

    header: plain JSON data. kernels: an archive of the kernel cache.
    """

    def __init__(self, inner: SerializableCallable, header: dict[str, Any], kernels: bytes) -> None:
        self.inner, self.header, self.kernels = inner, header, kernels

    @classmethod
    def of(
        cls, compiled: Callable[..., Any], graph: fx.GraphModule, options: Options, report: Any
    ) -> AheadOfTime:
        """Wrap what an inner backend made of a graph.

        Raises ModelError for a callable that has nothing to save.
        """
        kind, inner = "aot", compiled
        if report.inner == "eager":  # it runs the graph itself
            kind, inner = "graph", graph
        elif getattr(compiled, "serialize", None) is None:
            raise ModelError(
                f"inner backend {report.inner!r} returns a callable that cannot be saved; pass "
                "options={'inner': 'inductor'} or 'eager' to aot_compile"
            )
        kernels = io.BytesIO()
        pack(kernels, _entries(report.built, options))
        header = {
            "kind": kind,
            "target": options.target,
            "options": options.call_options(),
            "report": report.to_dict(),
            "kernels_bytes": len(kernels.getvalue()),
        }
        return cls(_INNER[kind](inner), header, kernels.getvalue())

    @classmethod
    def serialize_compile_artifacts(cls, fn: AheadOfTime) -> bytes:
        """Return the header, the kernels and the inner compiler's artifact as bytes."""
        header = json.dumps(fn.header).encode()
        body = type(fn.inner).serialize_compile_artifacts(fn.inner)
        return len(header).to_bytes(_LENGTH_BYTES, "big") + header + fn.kernels + body

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> AheadOfTime:
        """Return the callable; register its options, kernels and report in this process."""
        file = io.BytesIO(data)
        header = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "big")))
        kernels = file.read(header["kernels_bytes"])
        options = Options.make({"target": header["target"], **header["options"]})
        executor_name(options)
        take(kernels, options)
        inner = _INNER[header["kind"]].deserialize_compile_artifacts(file.read())
        publish(CompileReport.from_dict(header["report"]), options)
        return cls(inner, header, kernels)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled graph."""
        return self.inner(*args, **kwargs)


def _entries(kernels: Iterable[Any], options: Options) -> Iterator[Entry]:
    """Yield kernels as entries of the kernel cache, each with its tuning if it has one."""
    for kernel in kernels:
        ask = asked(kernel.spec, kernel.target, dialect=kernel.dialect, options=options)
        yield make(ask.key, {SOURCE_FILE: kernel.source}, kernel.meta)
        tuning = ask.store.get(tuned.tuning_key(kernel.spec, ask.target, ask.budget))
        if tuning is not None:
            yield tuning


def take(kernels: bytes, options: Options) -> None:
    """Put the entries of an archive into the cache, where it lacks them.

    Raises DamagedEntryError, CacheTrustError for bytes that are no archive of kernels.
    """
    store = Store.for_kernels(options)
    place = "the kernels of a compiled file"
    for entry in list(unpack(io.BytesIO(kernels), place)):
        check_sources(entry, place)
        store.get_or_build(entry.key, functools.partial(dict, entry.files), entry.meta)
    tuned.forget()
