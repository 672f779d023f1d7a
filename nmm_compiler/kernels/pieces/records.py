"""Records that NKI helpers take. Emitted files have their fields instead, as arguments and
constants.

A strip is a left factor in SBUF: [128, tiles, tokens], its contraction index on the partitions.
"""

from dataclasses import dataclass

import nki.language as nl

from .weight_plan import WeightPlan


@dataclass
class Part(nl.NKIObject):
    """A part of a matrix in HBM whose rows, or columns, are a contraction index.

    parts: of the contraction, which lie one behind another on the partitions on their way through
    TensorE: so more DMA engines, which belong to partitions, load few rows.
    """

    src: object
    row: int
    rows: int
    column: int
    columns: int
    parts: int


@dataclass
class Block(nl.NKIObject):
    """A block of tokens, and which of two cores computes it."""

    m0: int
    tokens: int
    core: int


@dataclass
class Left(nl.NKIObject):
    """A left factor: a strip, and how the first sums load it from its source, "none" if it is
    there; left_scales where it is of MX blocks. p_sb: the strip of all its products with u; v_sb:
    the second factor, where tokens gather it."""

    strip: object
    source: object
    how: str
    left_scales: object = None
    p_sb: object = None
    v_sb: object = None


@dataclass
class Term(nl.NKIObject):
    """A product that goes into sums: a strip times a weight in HBM; plan.k is 0 for none.

    weight_scales, element: in HBM too, and the dtype of four elements, of a weight of MX blocks.
    """

    left: Left
    weight: object
    plan: WeightPlan
    weight_scales: object = None
    element: object = None


@dataclass
class Panel(nl.NKIObject):
    """The outputs n0 to n0 + columns of products; group tiles of them, and down tiles of tokens
    where they lie on the partitions, are summed together.

    apart: from an output of a tile to the next, so that a partition has as many neighbours. loaded,
    before: the columns of a chunk of an MX weight, and those before the panel's: where others were
    loaded with them.
    """

    n0: int
    columns: int
    group: int
    down: int
    apart: int
    loaded: int
    before: int


@dataclass
class Step(nl.NKIObject):
    """A step of a contraction: tile kt of a chunk, `tile` of the strip, of so many rows; with deep
    2 that and the next one. scales: of the chunk, where it is of MX blocks."""

    kt: int
    deep: int
    rows: int
    tile: int
    scales: object = None


@dataclass
class Patch(nl.NKIObject):
    """A patch of a panel: `height` tiles of tokens from `top` on, `width` outputs from `left`."""

    top: int
    height: int
    left: int
    width: int


@dataclass
class Epilogue(nl.NKIObject):
    """activation(scale sum + bias), scale and bias in SBUF where there are any.

    scales: "" for none, one number in the program, "factor", one in SBUF, "tensor", one an output,
    "channel", one a token, "token", or one an element, "group", and then nothing else. op: NKI's
    activation. gate: a strip that multiplies what comes out, where it is gated. squares: sums of
    squares of what comes out, where it is normed.
    """

    scale: object
    scales: str
    bias: object
    has_bias: bool
    activation: str
    op: object
    gate: object
    gated: bool
    squares: object
    normed: bool


@dataclass
class Result(nl.NKIObject):
    """Where sums with tokens on the partitions go: to HBM, or to a strip that is kept.

    residual: a matrix in HBM, laid out as the result, that is added to it.
    """

    out: object
    residual: object
    has_residual: bool
    own_queue: bool
    strip: object
    kept: bool


@dataclass
class Ends(nl.NKIObject):
    """What meets the sums, in SBUF: lists with an element for each linear, or each pair of factors.

    squares: sums of squares of the p of each pair. norm_gain, norm_bias: of the norm of x, fp32
    [128, tiles] as its features lie in the strip.
    """

    scale: object
    bias: object
    p_scale: object
    p_bias: object
    squares: object
    norm_gain: object
    norm_bias: object
