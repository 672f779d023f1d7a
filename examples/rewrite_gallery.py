"""Every spelling of a low-rank chain, at every graph level: found, or declined and why.

    python examples/rewrite_gallery.py            # the table
    python examples/rewrite_gallery.py lora       # the cases whose name contains a word, with diffs

Levels: D the graph Dynamo hands to a backend, A the same after AOTAutograd (plain ATen), E
torch.export, C the same decomposed to core ATen, S torch.fx.symbolic_trace (`call_module`).
A case passes when each level finds what is written beside it; the rewritten graph must compute
what the original computes. The cases stand in gallery/, one file for each kind; the whole table
is made by two processes.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from functools import partial

from gallery import around_chains, bottlenecks, groups, left_alone, norms, plain_chains
from gallery.case import CASES, Case, Holder, K, R
from gallery.running import LEVELS, capture, try_case

__all__ = ["CASES", "KINDS", "LEVELS", "Case", "Holder", "K", "R", "capture", "try_case"]
KINDS = (plain_chains, around_chains, bottlenecks, groups, norms, left_alone)


def row(number: int, shown: bool = False) -> tuple[str, int]:
    """Return a case's row of the table, with its diffs if `shown`, and how many levels are off."""
    warnings.simplefilter("ignore")  # torch's own, of spellings that it would drop
    one, cells, wrong, worst, more = CASES[number], list[str](), 0, 0.0, ""
    for level in LEVELS:
        expected = one.expected(level)
        try:
            found, error, result = try_case(one, level)
        except Exception as problem:
            if expected == "n/a":
                cells.append("n/a")
                continue
            if shown:
                raise
            found, error, result = type(problem).__name__, 0.0, None
        right = found == expected or expected == "n/a"
        wrong += not right
        worst = max(worst, error)
        cells.append(found + ("" if right else f" != {expected}"))
        more += f"\n--- {level}\n{result.diff()}\n{result}" if shown and result else ""
    return f"{one.name:24}" + "".join(f"{cell:22}" for cell in cells) + f"{worst:.1e}{more}", wrong


def main() -> int:
    """Print the table; exit 1 when a level does not find what is written."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    wanted = [number for number, one in enumerate(CASES) if word in one.name]
    print(f"{'spelling':24}" + "".join(f"{level:22}" for level in LEVELS) + "largest error")
    wrong = 0
    with multiprocessing.get_context("spawn").Pool(1 if word else 2) as pool:
        for text, off in pool.imap(partial(row, shown=bool(word)), wanted, chunksize=4):
            print(text, flush=True)
            wrong += off
        pool.close()
        pool.join()
    print(f"{wrong} unexpected")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
