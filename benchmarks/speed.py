"""`make bench-speed`: how long our own code takes on this machine.

    OMP_NUM_THREADS=1 python benchmarks/speed.py [--only build,cache,passes,cpu,simulator]

Everything is measured here, in CPU time where another program would disturb the clock; nothing is
simulated. A row with a bar that is missed says so, and the exit code is then 1.

build     `build_kernel` cold (search, specialization, lint, publishing), from disk and from memory;
          the kernels of a whole model of 12 layers
cache     hits, misses and publications, into a cache that is full to the last byte too; waits for
          the disk are not counted
passes    the passes on Llama graphs, beside the time that Dynamo takes to trace them
simulator instructions per second of timing mode, functional mode over NumPy (simulator.py)
cpu       a low-rank MLP block under inductor alone and under nmm with inductor, and one small call
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import simulator
import torch
import transformers
import typer
from torch import nn

from nmm_compiler.backend import compile_graph
from nmm_compiler.cache.explain import explain
from nmm_compiler.cache.key import Key
from nmm_compiler.cache.store import Store
from nmm_compiler.codegen import build, choose
from nmm_compiler.kernels.linear.specs import GatedMLPSpec, LowRankSpec, MatmulSpec
from nmm_compiler.passes.pipeline import run
from nmm_compiler.simulator.run import ArraySpec, simulate

SPECS = [
    LowRankSpec(m=512, k=2048, r=1280, n=8192, x_layout="col"),
    LowRankSpec(m=4096, k=2048, r=1280, n=8192, x_layout="col"),
    LowRankSpec(m=2048, k=4096, r=2560, n=14336, x_layout="col"),
    LowRankSpec(m=1, k=4096, r=2560, n=14336),
    MatmulSpec(m=512, k=2048, n=8192),
    GatedMLPSpec(m=512, k=2048, r=1280, n=8192),
]
SOURCE = "    nisa.nc_matmul(dst=psum, stationary=u_tile, moving=x_tile)\n" * 500
FULL = 2_000  # entries of the full cache
MLP_RANK = 1280  # at ratio 0.2


@dataclass(frozen=True)
class Row:
    """One figure; `most`: it may not be larger."""

    what: str
    value: float
    unit: str
    most: float | None = None

    def __str__(self) -> str:
        missed = "  MISSED" if self.most is not None and self.value > self.most else ""
        bar = "" if self.most is None else f"at most {self.most:g}"
        return f"{self.what:58}{self.value:12.3f} {self.unit:5}{bar:>14}{missed}"


def times(
    call: Callable[[], object],
    repeat: int,
    clock: Callable[[], float] = time.process_time,
    before: Callable[[], object] = bool,
) -> list[float]:
    """Return the seconds of each of several calls; `before` each, what is not counted."""
    found = []
    for _ in range(repeat):
        before()
        start = clock()
        call()
        found.append(clock() - start)
    return found


def low_rank_llama(layers: int, hidden: int, intermediate: int, rank: int) -> Any:
    """Return a Llama whose linears are pairs of factors, without data."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaModel(config).eval()
        factorize(model, lambda k, n: min(rank, k * n // (2 * (k + n))))
    return model.to_empty(device="cpu")


def factorize(model: nn.Module, rank: Callable[[int, int], int]) -> None:
    """Replace the linears of a model by pairs of factors, whose rank a function gives."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            k, n = module.in_features, module.out_features
            r = rank(k, n)
            pair = nn.Linear(k, r, bias=False), nn.Linear(r, n, bias=False)
            model.set_submodule(name, nn.Sequential(*pair))


def build_rows() -> Iterator[Row]:
    def forget() -> None:
        build._KERNELS.clear()
        build.kernel_key.cache_clear()
        Store.open()._held.clear()

    build.build_kernel(LowRankSpec(m=8, k=8, r=8, n=8))  # imports, stamps and templates
    for spec in SPECS:
        choose._choose.cache_clear()
        (cold,) = times(lambda spec=spec: build.build_kernel(spec), 1)
        yield Row(f"{spec.short()}: cold", cold, "s", 3.0)
        disk = min(times(lambda spec=spec: build.build_kernel(spec), 20, before=forget))
        yield Row("  from disk, verified", 1e3 * disk, "ms", 2.0)
        memory = min(times(lambda spec=spec: build.build_kernel(spec), 2000, time.perf_counter))
        yield Row("  from memory", 1e6 * memory, "us", 20.0)
    spent, build_all = [], compile_graph._build_kernels

    def timed(*arguments: Any) -> None:  # processes included
        spent.extend(times(lambda: build_all(*arguments), 1, lambda: sum(os.times()[:4])))

    model = low_rank_llama(12, 768, 2048, 256).to(torch.bfloat16)
    options = {"inner": "eager", "executor": "reference"}
    with torch.no_grad(), mock.patch.object(compile_graph, "_build_kernels", timed):
        compiled = torch.compile(model, backend="nmm", options=options, dynamic=False)
        compiled(torch.zeros(1, 128, dtype=torch.long), use_cache=False)
    yield Row("kernels of a model of 12 layers: cold", sum(spent), "s", 4.0)


def cache_rows() -> Iterator[Row]:
    def key(number: int) -> Key:
        spec = {"m": number, "k": 2048, "r": 1280, "n": 8192, "dtype": "bfloat16"}
        return Key.make({"family": "lowrank", "spec": spec, "target": "trn2", "nki": "0.6"})

    def publish(store: Store, number: int, source: str) -> None:
        store.get_or_build(key(number), lambda: {"kernel.py": source})

    def median_us(call: Callable[[int], object], repeat: int) -> float:
        numbers = iter(range(repeat))
        found = times(lambda: call(next(numbers)), repeat)
        return 1e6 * statistics.median(found)

    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "cache")
        yield Row("publish", median_us(lambda i: publish(store, i, SOURCE), 200), "us")
        warm = Store(Path(folder) / "cache")

        def from_disk(number: int) -> None:
            warm._held.clear()
            assert warm.get(key(number % 200)) is not None

        yield Row("hit on disk, sha256 verified", median_us(from_disk, 300), "us", 2000.0)
        yield Row("hit in memory", median_us(lambda i: warm.get(key(0)), 10_000), "us", 20.0)
        yield Row("miss", median_us(lambda i: warm.get(key(-1 - i)), 300), "us")
        yield Row("list 200 entries", median_us(lambda i: list(warm.entries()), 5), "us")
        yield Row(
            "explain among 200", median_us(lambda i: explain(key(-1), warm.entries()), 5), "us"
        )
    with tempfile.TemporaryDirectory() as folder:
        filler = Store(Path(folder) / "cache")
        for number in range(FULL):
            publish(filler, number, SOURCE[:500])
        size = sum(info.size_bytes for info in filler.entries())
        full = Store(Path(folder) / "cache", max_bytes=size)
        each = median_us(lambda i: publish(full, FULL + i, SOURCE[:500]), 200)
        yield Row(f"publish into a full cache of {FULL}", each, "us", 20_000.0)
        fresh = [Store(Path(folder) / "cache", max_bytes=size) for _ in range(20)]
        first = median_us(lambda i: publish(fresh[i], 2 * FULL + i, SOURCE[:500]), 20)
        yield Row("  the first of a process", first, "us", 20_000.0)


def passes_rows() -> Iterator[Row]:
    graphs: list[tuple[Any, Any]] = []

    def collect(module: Any, inputs: Any) -> Any:
        graphs.append((module, inputs))
        return module.forward

    def measure(layers: int) -> tuple[list[float], list[float]]:
        """Return the seconds of tracing and, right after it, of the passes on the graph."""
        compiled = torch.compile(
            low_rank_llama(layers, 64, 176, 16), backend=collect, dynamic=False
        )
        tokens = torch.arange(16).view(1, 16)
        traced, spent = [], []
        for _ in range(5):
            torch._dynamo.reset()
            graphs.clear()
            with torch.no_grad():
                traced += times(lambda: compiled(tokens, use_cache=False), 1)
            gc.collect()
            spent += times(lambda: run(*graphs[0]), 1)
        return traced, spent

    measure(1)  # the first use loads modules
    medians = {}
    for layers in (2, 8, 32):
        traced, spent = measure(layers)
        medians[layers] = statistics.median(spent)
        share = 100 * statistics.median(a / b for a, b in zip(spent, traced, strict=True))
        yield Row(f"{layers} layers: passes over Dynamo's tracing", share, "%", 6.0)
        each = 1e3 * medians[layers] / len(graphs[0][0].graph.nodes)
        yield Row("  a node", each, "ms", 0.5)
    yield Row("32 layers over 8 layers", medians[32] / medians[8], "x", 4.5)


def cpu_rows() -> Iterator[Row]:
    from transformers.models.llama.modeling_llama import LlamaMLP

    def medians(model: nn.Module, x: torch.Tensor, repeat: int) -> tuple[float, float]:
        """Return the median seconds under nmm and under inductor, called turn by turn."""
        torch._dynamo.reset()
        ours = torch.compile(model, backend="nmm", options={"inner": "inductor", "kernels": "lazy"})
        plain = torch.compile(model, backend="inductor")
        ways = [lambda: ours(x), lambda: plain(x)]
        for way in ways * 2:
            way()
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeat):
            for way, spent in zip(ways, found, strict=True):
                spent += times(way, 1, time.thread_time)
        return statistics.median(found[0]), statistics.median(found[1])

    torch.set_num_threads(1)
    config = transformers.LlamaConfig(hidden_size=2048, intermediate_size=8192)
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            model = LlamaMLP(config).to(dtype).eval()
            factorize(model, lambda k, n: MLP_RANK)
            for m in (1, 128, 512):
                ours, plain = medians(model, torch.randn(1, m, 2048, dtype=dtype), 21)
                yield Row(f"{dtype} MLP of {m} tokens under nmm", 1e3 * ours, "ms")
                yield Row("  over inductor alone", ours / plain, "x")
        small = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)).eval()
        ours, plain = medians(small, torch.randn(1, 16), 10_000)
        yield Row("a compiled call of nmm more than one of inductor", 1e6 * (ours - plain), "us")


def simulator_rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for name, text, reference, small, large in simulator.KERNELS:
            path = Path(folder) / f"{name.replace(' ', '_')}.py"
            path.write_text(text)
            specs, runs = [ArraySpec(shape, "bfloat16") for shape in large], []
            seconds = min(times(lambda: runs.append(simulate(path, *specs, mode="timing")), 3))  # noqa: B023
            yield Row(f"{name}: timing mode", len(runs[0].trace.instructions) / seconds, "i/s")
            draw = np.random.default_rng(0).standard_normal
            wide = [draw(shape, dtype=np.float32) for shape in small]
            arrays = [array.astype(ml_dtypes.bfloat16) for array in wide]
            ours = min(times(lambda: simulate(path, *arrays, mode="functional"), 3))  # noqa: B023
            plain = min(times(lambda: reference(*wide), 3))  # noqa: B023
            yield Row("  functional mode over NumPy's products", ours / plain, "x")


PARTS = {
    "build": build_rows, "cache": cache_rows, "passes": passes_rows, "cpu": cpu_rows,
    "simulator": simulator_rows,
}  # fmt: skip


def main(only: str = ",".join(PARTS)) -> None:
    """Time our own code; ONLY: parts, comma separated."""
    missed = 0
    with tempfile.TemporaryDirectory() as directory:
        os.environ["NMM_CACHE_DIR"] = directory
        for part in only.split(","):
            for row in PARTS[part]():
                print(row, flush=True)
                missed += str(row).endswith("MISSED")
    sys.exit(missed > 0)


if __name__ == "__main__":
    typer.run(main)
