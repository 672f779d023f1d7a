"""What backend "nmm" costs and gains on this CPU, where PyTorch computes the products.

    python benchmarks/cpu.py [--seconds 6] [--json FILE]

A Llama-3.2-1B-shaped MLP block (hidden 2048, intermediate 8192) at compression ratio 0.2: eager
dense, eager low-rank, inductor low-rank, and nmm with inner inductor. All run in one process, turn
by turn, so that the machine's mood hits all alike; the ratio is the median over turns of inductor's
time by nmm's time, measured next to each other, and once more as CPU time on one thread, which
says the same on a busy machine. Everything is measured here; nothing is simulated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, INTERMEDIATE, RATIO, TILE = 2048, 8192, 0.2, 128
WAYS = ("eager dense", "eager low-rank", "inductor low-rank", "nmm low-rank")


def rank(inputs: int, outputs: int) -> int:
    """Return the rank that keeps 1 - RATIO of the parameters, rounded to the tile."""
    return round(inputs * outputs * (1 - RATIO) / (inputs + outputs) / TILE) * TILE


def layer(inputs: int, outputs: int, low_rank: bool) -> nn.Module:
    if not low_rank:
        return nn.Linear(inputs, outputs, bias=False)
    r = rank(inputs, outputs)
    return nn.Sequential(nn.Linear(inputs, r, bias=False), nn.Linear(r, outputs, bias=False))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), as Llama has it."""

    def __init__(self, low_rank: bool) -> None:
        super().__init__()
        self.gate = layer(HIDDEN, INTERMEDIATE, low_rank)
        self.up = layer(HIDDEN, INTERMEDIATE, low_rank)
        self.down = layer(INTERMEDIATE, HIDDEN, low_rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


def seconds(
    call: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def measure(dtype: torch.dtype, m: int, budget_seconds: float) -> dict[str, Any]:
    """Return median seconds per call of each way, and the median paired ratio."""
    torch._dynamo.reset()
    dense, low = MLP(False).to(dtype).eval(), MLP(True).to(dtype).eval()
    x = torch.randn(1, m, HIDDEN, dtype=dtype)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "eager dense": dense,
        "eager low-rank": low,
        "inductor low-rank": torch.compile(low, backend="inductor"),
        "nmm low-rank": torch.compile(
            low, backend="nmm", options={"inner": "inductor", "kernels": "lazy"}
        ),
    }
    once = {}
    for name, call in calls.items():
        call(x)
        call(x)
        once[name] = seconds(lambda call=call: call(x), 1)
    difference = (calls["nmm low-rank"](x) - calls["inductor low-rank"](x)).abs().max().item()
    repeats = max(1, int(0.02 / max(once.values())))
    turns = max(5, int(budget_seconds / (repeats * sum(once.values()))))
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(turns):
        order = WAYS if turn % 2 == 0 else WAYS[::-1]
        for name in order:
            found[name].append(seconds(lambda name=name: calls[name](x), repeats))
    ratios = [a / b for a, b in zip(found["inductor low-rank"], found["nmm low-rank"], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    alone = one_thread_ratio(
        lambda: calls["inductor low-rank"](x), lambda: calls["nmm low-rank"](x), budget_seconds
    )
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "m": m,
        "turns": turns,
        "calls_per_turn": repeats,
        "ms": {name: 1e3 * statistics.median(times) for name, times in found.items()},
        "inductor_by_nmm": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "cpu_time_ratio": alone,
        "largest_difference": difference,
    }


def one_thread_ratio(
    plain: Callable[[], Any], ours: Callable[[], Any], budget_seconds: float
) -> float:
    """Return the median of plain's by ours' CPU time on one thread, which other processes spare."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    clock = time.thread_time
    once = seconds(plain, 1)
    repeats = max(1, int(0.02 / once))
    turns = max(5, min(41, int(budget_seconds / (2 * repeats * once))))
    ratios = []
    for turn in range(turns):
        if turn % 2:
            a, b = seconds(plain, repeats, clock), seconds(ours, repeats, clock)
        else:
            b, a = seconds(ours, repeats, clock), seconds(plain, repeats, clock)
        ratios.append(a / b)
    torch.set_num_threads(threads)
    return statistics.median(ratios)


def call_overhead_us() -> dict[str, float]:
    """Return what one eager op call costs beside the two `F.linear` calls it replaces."""
    import nmm_compiler.ops.registration  # noqa: F401

    x, u, v = torch.randn(1, 16), torch.randn(8, 16), torch.randn(16, 8)
    op, linear = torch.ops.nmm.lowrank_matmul.default, functional.linear
    layouts = {"u_layout": "col", "v_layout": "col", "executor": "auto"}
    best = {"two linears": 9.0, "op": 9.0}
    for _ in range(9):
        a = seconds(lambda: linear(linear(x, u), v), 3000, time.thread_time)
        b = seconds(lambda: op(x, u, v, **layouts), 3000, time.thread_time)
        best = {"two linears": min(best["two linears"], a), "op": min(best["op"], b)}
    found = {name: 1e6 * value for name, value in best.items()}
    return {**found, "overhead": found["op"] - found["two linears"]}


def compiled_overhead_us() -> float:
    """Return the median difference, nmm less inductor, of one compiled call on a tiny pair."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)).eval()
    x = torch.randn(1, 16)
    plain = torch.compile(model, backend="inductor")
    ours = torch.compile(model, backend="nmm", options={"inner": "inductor", "kernels": "lazy"})
    for call in (plain, ours):
        call(x)
        call(x)
    clock = time.thread_time
    pairs = [
        (seconds(lambda: ours(x), 300, clock), seconds(lambda: plain(x), 300, clock))
        for _ in range(41)
    ]
    return 1e6 * statistics.median(a - b for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="time for each shape")
    parser.add_argument("--m", type=int, nargs="*", default=[1, 128, 512], help="token counts")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    torch.manual_seed(0)
    console = Console(width=120)
    table = Table(
        "dtype", "m", *(f"{w}\nms" for w in WAYS), "nmm against\ninductor", "quartiles",
        "CPU time,\n1 thread",
        title=f"MLP {HIDDEN} x {INTERMEDIATE}, rank {rank(HIDDEN, INTERMEDIATE)}, measured on "
        f"{torch.get_num_threads()} CPU threads",
    )  # fmt: skip
    rows = []
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            for m in options.m:
                row = measure(dtype, m, options.seconds)
                rows.append(row)
                low, high = row["quartiles"]
                table.add_row(
                    row["dtype"], str(m), *(f"{row['ms'][w]:.2f}" for w in WAYS),
                    f"{row['inductor_by_nmm']:.3f}x", f"{low:.2f}-{high:.2f}",
                    f"{row['cpu_time_ratio']:.3f}x",
                )  # fmt: skip
        overhead = call_overhead_us()
        compiled = compiled_overhead_us()
    console.print(table)
    console.print(
        f"one eager op call: {overhead['op']:.1f} us, the two linears it replaces "
        f"{overhead['two linears']:.1f} us, overhead {overhead['overhead']:.1f} us"
    )
    console.print(
        f"one compiled call: nmm less inductor {compiled:+.2f} us (median of 41 pairs, CPU time)"
    )
    if options.json is not None:
        figures = {"rows": rows, "op_us": overhead, "compiled_overhead_us": compiled}
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
