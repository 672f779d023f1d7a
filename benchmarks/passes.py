"""Time of the passes on Llama graphs, beside the time Dynamo takes to trace them.

    make bench-passes        or        python benchmarks/passes.py [layers ...]

CPU seconds of this process, measured: medians of pairs of one trace and one run of the passes on
the graph it made. Exits 1 when a graph takes more than 8 % of its trace time or 0.5 ms a node, or
when 32 layers take more than 4.5 times as long as 8.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from typing import Any

import torch
from torch import fx, nn

from nmm_compiler.passes.pipeline import run

REPEATS = 5  # pairs
MOST_SHARE, MOST_MS_A_NODE = 0.08, 0.5
HIDDEN, INTERMEDIATE, RANK = 64, 176, 16


def factorize(model: nn.Module) -> None:
    """Replace every linear of the decoder layers by two factors."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "layers" in name:
            pair = nn.Sequential(
                nn.Linear(module.in_features, RANK, bias=False),
                nn.Linear(RANK, module.out_features, bias=False),
            )
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, pair)


def measure(layers: int) -> tuple[list[tuple[float, float]], int, int]:
    """Return pairs of seconds (tracing, passes), the number of nodes, and of calls emitted."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config._attn_implementation = "eager"
    model = transformers.LlamaModel(config).eval()
    factorize(model)
    pairs: list[tuple[float, float]] = []
    nodes = calls = 0
    for _ in range(REPEATS):
        module, inputs, traced = trace(model)
        gc.collect()
        start = time.process_time()
        result = run(module, inputs)
        pairs.append((traced, time.process_time() - start))
        nodes, calls = len(module.graph.nodes), len(result.rewritten)
    return pairs, nodes, calls


def trace(model: nn.Module) -> tuple[fx.GraphModule, Any, float]:
    """Return Dynamo's graph of the model, its inputs, and the seconds that tracing took."""
    graphs: list[tuple[fx.GraphModule, Any, float]] = []
    torch._dynamo.reset()
    gc.collect()
    start = time.process_time()

    def collect(module: fx.GraphModule, inputs: Any) -> Any:
        graphs.append((module, inputs, time.process_time() - start))
        return module.forward

    with torch.no_grad():
        torch.compile(model, backend=collect, dynamic=False)(
            torch.arange(16).view(1, 16), use_cache=False
        )
    (only,) = graphs
    return only


def main() -> int:
    """Print the table and check the two limits."""
    sizes = [int(a) for a in sys.argv[1:]] or [2, 8, 32]
    measure(1)  # first use of torch.compile and of the passes loads modules
    times: dict[int, float] = {}
    failed = False
    print("layers  nodes  calls  dynamo trace s  passes s  share  ms a node")
    for layers in sizes:
        pairs, nodes, calls = measure(layers)
        traced, spent = (statistics.median(times) for times in zip(*pairs, strict=True))
        times[layers] = spent
        share = statistics.median(passes / tracing for tracing, passes in pairs)
        each = 1e3 * spent / nodes
        failed |= share > MOST_SHARE or each > MOST_MS_A_NODE
        row = f"{layers:6}  {nodes:5}  {calls:5}  {traced:14.3f}  {spent:8.3f}  {share:5.1%}"
        print(f"{row}  {each:9.2f}")
    if 8 in times and 32 in times:
        growth = times[32] / times[8]
        failed |= growth > 4.5
        print(f"32 layers take {growth:.2f} times as long as 8 (limit 4.5)")
    print("over a limit" if failed else "within limits")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
