"""What a schedule says of a weight and kernels read: the weights of a plan are such records."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """The size of a weight, and how it arrives in SBUF: what the products of a kernel read of it.

    k: rows of the contraction, 0 for no weight. n: outputs. mx_bytes: of four elements of MX
    blocks, 0 for any other weight. A schedule sets the rest: parts, of the outputs of a panel,
    which lie on the partitions one behind another, so that more DMA engines load them; order, which
    rows of the contraction share a partition; load, how they get there; queue, of their loads, as
    `move` takes it; block, outputs in SBUF at a time; chunk, rows a load; group, tiles of outputs
    that are summed together; down, tiles of tokens that are, where the weight moves; ahead, a panel
    is loaded before the results of the one before it are stored; double_row, two tiles of an fp8
    contraction a pass; few_sums, its sums are several at once; pieces, loads of a chunk at the end
    of the last panel, behind which few products are left.
    """

    k: int = 0
    n: int = 0
    mx_bytes: int = field(default=0, init=False)
    parts: int = 1
    order: str = "strided_rows"
    load: str = "rows"
    queue: str = ""
    block: int = 128
    chunk: int = 128
    group: int = 1
    down: int = 1
    ahead: bool = False
    double_row: bool = False
    few_sums: bool = False
    pieces: int = 1
