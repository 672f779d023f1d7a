"""`make bench-cores`: kernels of two physical cores (lnc=2) against one core.

Every figure is predicted by the simulator's timing model; nothing here is measured. Per family and
token count: the chosen way of sharing (half of the tokens, of the outputs, of every weight, or of
the heads), the latency on one core and on two, and their ratio. The bars: at least 1.85 for prefill
(1,024 tokens and more), at least 1.8 for decode (16 tokens and fewer), for kernels that take at
least LEAST_US on one core. Token counts between, and shorter kernels, are shown only: about 7.5 us
of a kernel (its first load, the exchange, its last store) do not shrink, and with these 1.8 needs
67 us.

Two cores share an HBM stack: AWS's trn2 pages give 2.9 TB/s for 8 cores, and the simulator gives
each core its eighth. The exchange of sums (nisa.sendrecv) costs what the simulator says of a DMA
between two SBUFs; `--exchange-us` adds a fixed time to it, to see what a slower one would cost.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from nmm_compiler.codegen.choose import choose
from nmm_compiler.kernels import FAMILIES
from nmm_compiler.simulator.timing.dma import DmaCosts

PREFILL_BAR, DECODE_BAR = 1.85, 1.8
PREFILL_TOKENS, DECODE_TOKENS = 1024, 16
LEAST_US = 67.0

# Llama-3.2-1B at ratio 0.2: hidden 2048, intermediate 8192, ranks 1280; q, k and v share x. Of
# Llama-3.1-8B, hidden 4096, q, k and v too.
KERNELS: dict[str, dict[str, Any]] = {
    "lowrank up": {"family": "lowrank", "k": 2048, "r": 1280, "n": 8192},
    "lowrank down": {"family": "lowrank", "k": 8192, "r": 1280, "n": 2048},
    "lowrank_shared": {
        "family": "lowrank_shared", "k": 2048,
        "pairs": ((768, (2048,)), (256, (512,)), (256, (512,))),
    },
    "lowrank_shared 8B": {
        "family": "lowrank_shared", "k": 4096,
        "pairs": ((1664, (4096,)), (640, (1024,)), (640, (1024,))),
    },
    "gated_mlp": {"family": "gated_mlp", "k": 2048, "r": 1280, "n": 8192},
    "gated_mlp_up": {"family": "gated_mlp_up", "k": 2048, "r": 1280, "n": 8192},
    "matmul": {"family": "matmul", "k": 2048, "n": 8192},
    "attention 8192 keys": {
        "family": "attention", "context": 8192, "heads": 32, "kv_heads": 8, "d": 64,
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pair:
    """One kernel on one core and on two."""

    name: str
    m: int
    one_us: float
    two_us: float
    split: str

    @property
    def ratio(self) -> float:
        """How many times as fast two cores are."""
        return self.one_us / self.two_us

    @property
    def bar(self) -> float | None:
        """What the ratio must be at least; None where the kernel is shown only."""
        if self.one_us < LEAST_US:
            return None
        if self.m >= PREFILL_TOKENS:
            return PREFILL_BAR
        return DECODE_BAR if self.m <= DECODE_TOKENS else None


def pair_of(name: str, m: int, target: str) -> Pair:
    """Return the figures of a kernel, of the schedule that each number of cores chooses."""
    fields = dict(KERNELS[name])
    family = fields.pop("family")
    if family != "attention":
        fields["x_layout"] = "col"
    spec = FAMILIES[family].spec_class(m=m, **fields)
    one = choose(spec, target)[0]
    two = choose(dataclasses.replace(spec, lnc=2), target)[0]
    assert one.simulated_us is not None
    assert two.simulated_us is not None
    return Pair(name, m, one.simulated_us, two.simulated_us, two.schedule.split)


@contextlib.contextmanager
def slower_exchange(more_us: float) -> Iterator[None]:
    """Let each exchange between two cores take so many microseconds more, for the block."""
    plain = DmaCosts._cost

    def cost(self: DmaCosts, instruction: Any) -> Any:
        found = plain(self, instruction)
        if instruction.op != "sendrecv":
            return found
        return dataclasses.replace(found, tail_us=found.tail_us + more_us)

    with mock.patch.object(DmaCosts, "_cost", cost) if more_us else contextlib.nullcontext():
        yield


def main() -> int:
    """Print the table and the bars; return 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="trn2")
    parser.add_argument("--m", default="1,16,128,512,1024,2048")
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--exchange-us", type=float, default=0.0)
    given = parser.parse_args()
    console = Console(width=100)
    table = Table(
        title=f"one core and two on {given.target}, bf16, x passed as k x m; predicted by the "
        "simulator" + (f"; exchanges {given.exchange_us} us longer" if given.exchange_us else "")
    )
    for name in ("kernel", "m", "one core, us", "two, us", "shared by", "ratio", "bar", ""):
        table.add_column(name, justify="right" if "us" in name or name in "m ratio bar" else "left")
    missed = 0
    with slower_exchange(given.exchange_us):
        for name in given.kernels.split(","):
            for m in map(int, given.m.split(",")):
                pair = pair_of(name, m, given.target)
                bad = pair.bar is not None and pair.ratio < pair.bar
                missed += bad
                table.add_row(
                    name, str(m), f"{pair.one_us:.1f}", f"{pair.two_us:.1f}", pair.split,
                    f"{pair.ratio:.3f}", "" if pair.bar is None else f"{pair.bar}",
                    "MISS" if bad else "",
                )  # fmt: skip
    console.print(table)
    console.print(f"{missed} of the bars are missed" if missed else "every bar is kept")
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
