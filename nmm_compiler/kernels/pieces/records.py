"""Records that NKI helpers take. Emitted files have their fields instead, as arguments and
constants.

A strip is a left factor in SBUF: [128, tiles, tokens], its contraction index on the partitions.
"""

from dataclasses import dataclass

import nki.language as nl


@dataclass
class Operand(nl.NKIObject):
    """How an operand arrives: the fields of `Operand` in kernels/schedule.py."""

    load: str  # "none" for a strip that is in SBUF already
    block: int
    chunk: int
    group: int
    resident: bool
    stream: bool


@dataclass
class Part(nl.NKIObject):
    """A part of a matrix in HBM whose rows, or columns, are a contraction index."""

    src: object
    row: int
    rows: int
    column: int
    columns: int


@dataclass
class Block(nl.NKIObject):
    """A block of tokens."""

    m0: int
    tokens: int


@dataclass
class Tokens(nl.NKIObject):
    """All tokens of a kernel: its matrices in HBM that have them, m tokens, m_block in a block."""

    out: object
    residual: object
    x: object
    m: int
    m_block: int


@dataclass
class Strip(nl.NKIObject):
    """A left factor: its strip, and the matrix in HBM that is loaded into it on its first use."""

    strip: object
    source: object
    plan: Operand


@dataclass
class Weight(nl.NKIObject):
    """A right factor in HBM, the whole of it in SBUF if it is resident, and how it arrives.

    ahead: how many panels are loaded before the results of the current one are stored. loaded: the
    first panel, `first`, is there already; of `project` and `expand_few` its first load is.
    """

    weight: object
    whole: object
    plan: Operand
    ahead: int
    loaded: bool
    first: object


@dataclass
class Product(nl.NKIObject):
    """The sizes of a product, and how its contraction runs."""

    k: int  # contraction length
    n: int  # outputs
    order: str  # which rows of the contraction share a partition
    segment: int  # rows that are summed in PSUM at a time
    double_row: bool  # pairs of tiles of the contraction in one pass
    widen: bool  # the weight is widened to fp32 on its way in
    warm: int  # passes over zeros before the first one, while operands arrive


@dataclass
class Segment(nl.NKIObject):
    """Contraction rows first to stop of a product."""

    first: int
    stop: int
    several: bool
    parts: object  # fp32 sums of all segments, where there are several


@dataclass
class Rounding(nl.NKIObject):
    """The epilogue of a product that stays on chip.

    Without a bias and an activation: the sums times factor, or times scale; requantize: to fp8.
    Else activation(sums + bias), with factor 1 and no scale. With a norm the squares of what is
    kept are added up in `squares`, [128, tokens].
    """

    factor: float
    scale: object  # [128, 1], or a column per tile of outputs
    scales: str
    requantize: bool
    bias: object  # a column per tile of outputs
    has_bias: bool
    activation: str
    norm: bool
    squares: object


@dataclass
class Epilogue(nl.NKIObject):
    """activation(scale sum + bias), scale and bias in SBUF where there are any.

    scales: one scale, "tensor"; one an output, "channel"; one a token, "token".
    """

    scale: object
    bias: object
    scales: str
    has_bias: bool
    activation: str


@dataclass
class Chunks(nl.NKIObject):
    """An operand of a patch of a result: tiles in SBUF from `tile` on, one a contraction chunk.

    They hold `columns` columns of the operand from `column` on. The patch takes `width` of these
    from `first` on. new: they are loaded on this use, their first. aside: on the queue of results.
    begins: the first tile of the first chunk is a load of its own. short: the last chunk comes in
    short loads. parted: the columns of the patch are loaded, not all.
    """

    tiles: object
    tile: int
    source: object
    plan: Operand
    column: int
    columns: int
    first: int
    width: int
    new: bool
    aside: bool
    begins: bool
    short: bool
    parted: bool


@dataclass
class Contraction(nl.NKIObject):
    """A run of a contraction `total` long: `depth` of it from `first` on, `step` at a time."""

    first: int
    depth: int
    step: int
    total: int
    order: str  # which rows of the contraction share a partition
    double_row: bool


@dataclass
class Patch(nl.NKIObject):
    """A patch of a result among the fp32 sums in SBUF: height by width, from a tile and column."""

    tile: int
    column: int
    height: int
    width: int


@dataclass
class EarlierPatch(nl.NKIObject):
    """A patch of the fp32 sums of earlier runs in SBUF, from a tile and a column.

    adds: they are not added yet.
    """

    adds: bool
    totals: object
    tile: int
    column: int


@dataclass
class Branch(nl.NKIObject):
    """A product of a strip in SBUF, and its epilogue."""

    strip: object
    weight: object
    product: Product
    epilogue: Epilogue


@dataclass
class Base(nl.NKIObject):
    """A second product into the same sums, of a strip in SBUF; length is 0 for none."""

    x_sb: object
    w: object
    length: int  # of the contraction
    load: str
    chunk: int
    order: str


@dataclass
class Group(nl.NKIObject):
    """Tiles of a panel that are summed together: the panel, and the group's place in it."""

    n0: int
    columns: int
    first: int
    count: int


@dataclass
class Panels(nl.NKIObject):
    """The outputs first to stop of a product; ahead: as in Weight."""

    first: int
    stop: int
    ahead: int


@dataclass
class Result(nl.NKIObject):
    """A result in HBM.

    as_rows: tokens first, though the outputs are on the partitions. own_queue: stores have a queue
    of their own. moving: so many first tokens move past stationary weights.
    residual: a matrix in HBM, laid out as the result, that is added to it. ends: the kernel ends
    with it, so that its last tiles leave PSUM by two engines, and SBUF by two queues. begins: so do
    its first ones.
    """

    out: object
    as_rows: bool
    own_queue: bool
    moving: int
    residual: object
    has_residual: bool
    ends: bool
    begins: bool


@dataclass
class Norm(nl.NKIObject):
    """The norm of x before the first products; gain and bias: fp32 [128, tiles], as the strip.

    order: the order of the features in the strip.
    """

    kind: str  # "none", "rms", "layer"
    eps: float
    gain: object
    bias: object
    has_gain: bool
    has_bias: bool
    order: str


@dataclass
class Dense(nl.NKIObject):
    """A dense product: its weight, the norm before it, and what its sums leave PSUM through."""

    weight: Weight
    norm: Norm
    epilogue: Epilogue


@dataclass
class Tile(nl.NKIObject):
    """A tile of the contraction, of some columns of a u in SBUF."""

    u_sb: object
    u_tile: int
    first: int  # column, in u_sb
    columns: int
    p_tile: int  # of the first column, in the strip of the result
    k_tile: int
    rows: int
    last: bool
    warmed: bool  # whether the first sum began with passes over zeros


@dataclass
class Kept(nl.NKIObject):
    """The strip that keeps a result in SBUF, `keep` False for none."""

    strip: object
    inverse: object  # one over its scale, where it is fp8
    keep: bool
    requantize: bool


@dataclass
class Held(nl.NKIObject):
    """The weights of a low-rank product in HBM, and its operands in SBUF for all tokens.

    x_first, u_first: x, and the first panel of u, if their first loads are under way. core: which
    of the physical cores computes it.
    """

    x_first: object
    u: object
    u_first: object
    v: object
    w: object
    u_all: object
    v_all: object
    inner_bias_sb: object
    bias_sb: object
    p_scale_sb: object
    y_scale_sb: object
    norm: Norm
    core: int


@dataclass
class Projection(nl.NKIObject):
    """A projection of a gated MLP: two factors or one dense weight; the rest is in SBUF."""

    u: object
    v: object
    w: object
    bias: object
    p_scale: object
    scale: object


@dataclass
class MLP(nl.NKIObject):
    """The projections of a gated MLP; h_inverse is one over the scale of h, where it is fp8.

    core: which of the physical cores computes it.
    """

    gate: Projection
    up: Projection
    down: Projection
    h_inverse: object
    norm: Norm
    core: int
