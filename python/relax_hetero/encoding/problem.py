"""Problems: the task of a kernel as plain data: its operands, the layout of each, and the work on the result.

Equal problems share one kernel. Symbolic extents are names, numbered in order of appearance
("s0", "s1", ...), so that two dispatches that differ in the names of their symbols share a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from .block_formats import BlockFormat
from .block_panels import PanelPlan
from .encoding import IndexMap
from .expression import Expression
from .packed_layout import PackedLayout
from .row_program import RowProgram

Dim = int | str


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads or writes.

    Attributes
    ----------
    shape : tuple of int or str
        Logical shape; a symbolic extent is a name.
    dtype : str
        Element type.
    index_map : IndexMap
        The iteration dimension of each dimension ("1": size one, broadcast).
    layout : PackedLayout
        Storage layout; the kernel's buffer has ``layout.packed_shape(shape)``.
    """

    shape: tuple[Dim, ...]
    dtype: str
    index_map: IndexMap
    layout: PackedLayout

    def size(self, name: str) -> Dim:
        """Extent of iteration dimension `name`.

        Parameters
        ----------
        name : str
            Iteration dimension.
        """
        return self.shape[self.index_map.index(name)]

    def with_size(self, name: str, size: Dim) -> Operand:
        """Operand with another extent of iteration dimension `name`, if it has that dimension.

        Parameters
        ----------
        name : str
            Iteration dimension.
        size : int or str
            Its extent.
        """
        pairs = zip(self.index_map, self.shape, strict=True)
        return replace(self, shape=tuple(size if dim == name else extent for dim, extent in pairs))


@dataclass(frozen=True)
class Epilogue:
    """Function that is applied to the accumulators before they are stored.

    Attributes
    ----------
    expression : Expression
        ``x0`` is the accumulator, ``x1``, ``x2``, ... the operands.
    operands : tuple of Operand
        Index maps over batch dimensions, m and n; any may be missing or "1" (a bias has ("n",), a scalar ()).
    """

    expression: Expression
    operands: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class RowPhase:
    """Row program that the kernel of a product applies to its result, which it replaces."""

    program: RowProgram
    product: int  # index of the program's operand that is the product's result, after its epilogue
    operands: tuple[Operand, ...]  # the program's other operands in order; index maps over batch dimensions, m and n


@dataclass(frozen=True)
class SentSum:
    """Sum over the GPUs of a mesh of their products' results, which the kernels of the products send."""

    # Number of this GPU among the GPUs, and their number. If the result is long, each adds as many rows, in order, and
    # is sent tiles of these; else all are sent the whole result.
    rank: int
    ranks: int
    # Slot of their memory, and bytes of a slot for each GPU (`artifact.peer_layout`).
    slot: int
    slot_bytes: int

    @property
    def addresses(self) -> Operand:
        """Addresses of the GPUs' memory."""
        return Operand((self.ranks,), "int64", ("1",), PackedLayout.identity(1))


@dataclass(frozen=True)
class MatmulProblem:
    """A matrix product: ``result = rows(epilogue(init + sum over k of lhs * rhs))``.

    Parameters of its kernel, in order: lhs, rhs, second (if any), addresses (if it is sent), init (if any),
    operands of the epilogue and of the rows, result.

    Attributes
    ----------
    lhs, rhs : Operand
        Factors; their index maps name "m" and "n", the rows and columns of the result, "k", and batch dimensions.
    result : Operand
        Result; its index map has "m", "n" and the batch dimensions.
    acc_dtype : str
        Element type of the accumulator.
    init : Operand or None
        Tensor that the sums start from; None: zero.
    epilogue : Epilogue or None
        Elementwise function of each sum and further operands.
    rows : RowPhase or None
        Program over whole rows of the result, such as a softmax or a norm.
    tf32 : bool
        Operands of float32 may be rounded to 10 bits of fraction before they are multiplied.
    sent : SentSum or None
        Sum for which the result is sent, by kernels of GPUs.
    second : Operand or None
        Right operand of a second product of the same rows, stored as `rhs`, such as the gate of a gated feed-forward
        network. Its sum is ``x1`` of the epilogue, whose operands are ``x2``, ``x3``, ...
    """

    lhs: Operand
    rhs: Operand
    result: Operand
    acc_dtype: str
    init: Operand | None = None
    epilogue: Epilogue | None = None
    rows: RowPhase | None = None
    tf32: bool = False
    sent: SentSum | None = None
    second: Operand | None = None

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        init = [] if self.init is None else [self.init]
        init = init if self.sent is None else [self.sent.addresses, *init]
        epilogue = () if self.epilogue is None else self.epilogue.operands
        rows = () if self.rows is None else self.rows.operands
        weights = [self.rhs] if self.second is None else [self.rhs, self.second]
        return [self.lhs, *weights, *init, *epilogue, *rows, self.result]


@dataclass(frozen=True)
class Window:
    """Window of a convolution or pooling along one spatial dimension.

    Attributes
    ----------
    size : int
        Filter taps along the dimension.
    stride, dilation : int
        Elements between neighbouring windows, and between neighbouring taps of one window.
    before, after : int
        Padding, in elements; a convolution's padding is zeros.
    """

    size: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def dilated_extent(self) -> int:
        """Number of elements from the first to the last tap of a window."""
        return (self.size - 1) * self.dilation + 1

    def output_extent(self, extent: int) -> int:
        """Number of windows that fit along `extent` elements and the padding.

        Parameters
        ----------
        extent : int
            Number of elements without padding.
        """
        return (extent + self.before + self.after - self.dilated_extent) // self.stride + 1


@dataclass(frozen=True)
class ConvProblem:
    """A convolution: ``result = epilogue(sum over k, w0, w1, ... of data * weight)``.

    Parameters of its kernel, in order: data, weight, the epilogue's operands, result. Logical shapes follow
    NCHW, OIHW and NCHW, with any number of spatial dimensions; the layouts say how each is stored.

    Attributes
    ----------
    data : Operand
        Index map ("b", "c", "x0", "x1", ...): batch, all input channels, the image.
    weight : Operand
        Index map ("n", "k", "w0", "w1", ...): output channels, input channels of one group, the window.
    result : Operand
        Index map ("b", "n", "y0", "y1", ...).
    acc_dtype : str
        Element type of the accumulator.
    windows : tuple of Window
        One per spatial dimension.
    groups : int
        ``c = groups * k``; output channels of a group read only input channels of that group.
    epilogue : Epilogue, optional
        Index maps of its operands over "b", "n", "y0", ...
    tf32 : bool
        See `MatmulProblem`.
    """

    data: Operand
    weight: Operand
    result: Operand
    acc_dtype: str
    windows: tuple[Window, ...]
    groups: int = 1
    epilogue: Epilogue | None = None
    tf32: bool = False

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        epilogue = () if self.epilogue is None else self.epilogue.operands
        return [self.data, self.weight, *epilogue, self.result]


@dataclass(frozen=True)
class AttentionProblem:
    """Attention: ``result = softmax(scores(query * key^T)) * value``, for each head separately.

    Parameters of its kernel, in order: query, key, value, the operands of `scores`, result, and perhaps scratch: a
    float32 tensor whose shape the kernel chooses.

    Iteration dimensions: "b" batch, "h" heads, "g" heads of key and value, "m" queries, "n" keys, "d" the width of
    query and key, "e" that of the value. A dimension of an operand may run along several, outermost first: "h*d".
    """

    # Plain tensors; query over b, h, m, d; key over b, g, n, d; value over b, g, n, e; result over b, h, m, e. The same
    # tensor may be several of them.
    query: Operand
    key: Operand
    value: Operand
    result: Operand
    # Offset of query, key and value in each dimension of the tensor (slices of one tensor).
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    # Extents of every iteration dimension; h, g, d and e are ints, h is a multiple of g.
    sizes: tuple[tuple[str, Dim], ...]
    # Function that is applied to a product before softmax: ``x0`` is the product, ``x1``, ... operands over b, h, m and
    # n ("1": broadcast); those of type bool are conditions of ``where``.
    scores: Epilogue
    # "": every query sees every key; "top_left": query i sees keys up to i; "bottom_right": the last query sees all.
    causal: str = ""
    nan_to_zero: bool = False  # whether a row gives zeros where its softmax is NaN, because every score is -inf
    tf32: bool = False  # whether products of float32 may round their operands to 10 bits of fraction

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order, without the scratch."""
        return [self.query, self.key, self.value, *self.scores.operands, self.result]


@dataclass(frozen=True)
class ElementwiseProblem:
    """``result = expression(x0, x1, ...)`` with broadcast; x0 has the result's shape and layout.

    Parameters of its kernel, in order: operands, result. Index maps name the result's dimensions "d0", "d1", ...

    Attributes
    ----------
    expression : Expression
        Function of one element of each operand.
    operands : tuple of Operand
        Tensors ``x0``, ``x1``, ... of the expression.
    result : Operand
        Tensor that the kernel writes.
    """

    expression: Expression
    operands: tuple[Operand, ...]
    result: Operand

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        return [*self.operands, self.result]


@dataclass(frozen=True)
class RowsProblem:
    """Row program: ``result = program(x0, x1, ...)`` for every row along the last dimension, "n".

    Parameters of its kernel, in order: operands, result. All are row-major; index maps name the dimensions before the
    last "d0", "d1", ...; an operand may lack any of them. The result's last dimension is "1" where its expression does
    not vary along a row.
    """

    program: RowProgram
    operands: tuple[Operand, ...]
    result: Operand

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        return [*self.operands, self.result]


EXPERT_SUM = "expert_sum"
"""Op of a `QuantizedMatmulProblem` with shares, in reports."""


@dataclass(frozen=True)
class QuantizedMatmulProblem:
    """A product with block-quantized weights: ``epilogue(sum over k of lhs * weight)``.

    Parameters of its kernel, in order: lhs, weights, second weights, index, shares, biases, addresses (if it is sent),
    operands of the epilogue, where there are any, result. The left operand (float32; on GPUs also 16-bit floats) and
    the result are row-major over batch dimensions, m, and "k" or "n".
    """

    lhs: Operand
    # In panels: one operand of bytes, as `encoding.block_panels` packs it. In fragments: weight, scales and perhaps
    # zero points (without them 8 or 128), or the minimums of a file's format, as `encoding.block_weights` packs them.
    weights: tuple[Operand, ...]
    result: Operand
    block: int  # number of weights along k that share a scale; a multiple of 8
    epilogue: Epilogue | None = None
    bits: int = 4  # bits of a stored weight
    form: BlockFormat | None = None  # format of weights in panels, and of a file's weights in fragments
    # Number of matrices, one after another, each in panels or fragments of its own; 0: one matrix for all rows.
    experts: int = 0
    # Numbers of experts, ``(tokens, used)``: the matrix of each row of the result, whose batch dimensions these are.
    # Rows of negative numbers are not written. The left operand has one row for a token, or one for each of its
    # experts.
    index: Operand | None = None
    # 8 or 16: the left operand may be rounded to integers of so many bits, with a scale for each block.
    activation_bits: int = 16
    # Kind of the rows, "decode" or "chunk": all kernels of a kind add up a row in the same order, for any number of
    # rows; "" for any order.
    rows: str = ""
    # Weights, as `weights`, of a second product of the same rows: its sum is ``x1`` of the epilogue, ``x0`` that of the
    # first.
    second: tuple[Operand, ...] = ()
    # Factors like `index`: the result, ``(tokens, n)``, is the sum over the experts of a token, each times its share;
    # those of negative indices add nothing.
    shares: Operand | None = None
    # Numbers over ``(experts, n)`` that are added to the sum of each product, if there are any.
    biases: tuple[Operand, ...] = ()
    rounded: str = ""  # 16-bit float that a left operand of float32 is rounded to; empty for its own type
    order: ExpertOrderProblem | None = None  # problem whose result the kernel reads instead of the index
    sent: SentSum | None = None  # short sum for which the result is sent, by kernels of GPUs

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        epilogue = () if self.epilogue is None else self.epilogue.operands
        sent = () if self.sent is None else (self.sent.addresses,)
        routes = [self.index if self.order is None else self.order.result, self.shares]
        present = [operand for operand in routes if operand is not None]
        return [self.lhs, *self.weights, *self.second, *present, *self.biases, *sent, *epilogue, self.result]

    @property
    def lhs_type(self) -> str:
        """Element type of the left operand in products."""
        return self.rounded or self.lhs.dtype

    @property
    def products(self) -> int:
        """Number of products of a row."""
        return 2 if self.second else 1

    @property
    def has_row_per_expert(self) -> bool:
        """True if the left operand has a row for each expert of a token."""
        return self.lhs.shape[1] != 1

    @cached_property
    def plan(self) -> PanelPlan:
        """Layout of a panel."""
        assert self.form is not None, "weights in fragments are not in panels"
        return _panel_plan(self.form, self.depth, self.weights[0])

    @property
    def depth(self) -> int:
        """The extent of k."""
        return _static(self.lhs.shape[-1])

    @property
    def columns(self) -> int:
        """The extent of n."""
        return _static(self.result.shape[-1])

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return self.plan.columns


@dataclass(frozen=True)
class ExpertOrderProblem:
    """Pairs of a token and one of its experts, sorted by expert and cut into tiles of one expert each.

    Parameters of its kernel, in order: index, result. The result is int32: the number of tiles and three unused words;
    from `TILES_AT` on, for each tile its expert, its first pair in the sorted order, its number of pairs, and an unused
    word; from `pairs_at` on the pairs, ``token * used + number``, in sorted order. Pairs of an expert are in any order,
    and so are tiles.
    """

    # Numbers of experts, ``(tokens, used)``. Pairs of negative numbers are left out; numbers above are the last.
    index: Operand
    experts: int
    tile: int  # maximum pairs of a tile

    TILES_AT = TILE_WORDS = 4

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return prod(map(_static, self.index.shape))

    @property
    def max_tiles(self) -> int:
        """Upper bound of the number of tiles, as those of an expert may not be full."""
        return self.pairs // self.tile + min(self.pairs, self.experts)

    @property
    def pairs_at(self) -> int:
        """Index of the first pair in the result."""
        return self.TILES_AT + self.TILE_WORDS * self.max_tiles

    @property
    def result(self) -> Operand:
        """Tensor that the kernel writes."""
        return Operand((self.pairs_at + self.pairs,), "int32", ("word",), PackedLayout.identity(1))

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        return [self.index, self.result]


@dataclass(frozen=True)
class BlockUnpackProblem:
    """Dequantization of block-quantized weights, to the layout that a product of many rows reads.

    Parameters of its kernel, in order: weights, result.
    """

    product: QuantizedMatmulProblem  # product that reads the weights; the element type is that of its left operand
    result: Operand  # weights over "k" and "n"

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        return [*self.product.weights, self.result]


APPEND = "append"
"""Rows of a `CachedAttentionProblem` that only writes the keys and values of rows into their pages."""


@dataclass(frozen=True)
class CachedAttentionProblem:
    """Attention with a paged cache; see `relax_hetero.op.cached_attention`.

    Parameters of its kernel, in order: the operands (`pages` is also written), out, and perhaps scratch: a float32
    tensor whose shape the kernel chooses. Index maps name "m" rows, "p" pages, "s" slots, "t" pages of a slot.
    """

    # qkv, pages, table, sequences, positions; then rotation, factors of norms and sinks, where present.
    operands: tuple[Operand, ...]
    out: Operand
    heads: int
    kv_heads: int
    size: int
    scale: float
    window: int  # 0: none
    softcap: float  # 0: none
    rotary: str
    norms: str
    eps: float
    rows: str  # "decode", "verify" or "chunk"; "append": only write keys and values of rows, without an out
    order: str  # order of keys in a page, see `encoding.pages`
    sinks: bool = False
    shared_values: int = 0  # number of last elements of a key that are the value, too; 0: values are of their own

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order, without the scratch."""
        return [*self.operands, *([] if self.rows == APPEND else [self.out])]

    @property
    def is_decode(self) -> bool:
        """True if each row has a sequence and a position of its own, rather than those of a chunk."""
        return self.rows in ("decode", "verify")

    def with_rows(self, rows: Dim) -> CachedAttentionProblem:
        """The problem for another number of rows."""
        *operands, out = (operand.with_size("m", rows) for operand in (*self.operands, self.out))
        return replace(self, operands=tuple(operands), out=out)

    @property
    def group(self) -> int:
        """Heads of queries that read the same keys."""
        return self.heads // self.kv_heads

    @property
    def value_size(self) -> int:
        """Elements of a value."""
        return self.shared_values or self.size

    @property
    def page_type(self) -> str:
        """Element type of the pages."""
        return self.operands[1].dtype

    @property
    def rotary_size(self) -> int:
        """Number of elements of a head that are rotated."""
        return _static(self.operands[5].shape[1]) if self.rotary else 0

    @property
    def optional_operands(self) -> list[str]:
        """Those of "rotation", "q_norm", "k_norm" and "sinks" that are operands, in order."""
        norms = [f"{letter}_norm" for letter in self.norms]
        return ["rotation"] * bool(self.rotary) + norms + ["sinks"] * self.sinks

    def operand_index(self, name: str) -> int | None:
        """The index of an optional operand; None where the problem lacks it."""
        names = self.optional_operands
        return 5 + names.index(name) if name in names else None


@dataclass(frozen=True)
class BlockRowsProblem:
    """Gather of rows of block-quantized weights: ``result[i] = dequantized[index[i]]``.

    Parameters of its kernel, in order: weights, index, result. An index out of range is clamped.
    """

    weights: tuple[Operand, ...]  # as in `QuantizedMatmulProblem`
    index: Operand  # one dimension, int32 or int64
    result: Operand  # (indices, depth) of float32
    form: BlockFormat
    rows: int  # number of rows of the weights

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        return [*self.weights, self.index, self.result]

    @cached_property
    def plan(self) -> PanelPlan:
        """Layout of a panel."""
        return _panel_plan(self.form, _static(self.result.shape[-1]), self.weights[0])


@dataclass(frozen=True)
class PanelFragmentsProblem:
    """Part of the fragments of experts whose weights are in panels; no number changes.

    Parameters of its kernel, in order: panels, result.
    """

    panels: Operand  # bytes, as `encoding.block_panels` packs them
    result: Operand  # the part, as `encoding.block_weights` packs it
    form: BlockFormat
    # Weights of a column, and columns of an expert.
    depth: int
    columns: int
    part: int  # 0 for the weights; 1 and 2 for scales and minimums or factors

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        return [self.panels, self.result]

    @cached_property
    def plan(self) -> PanelPlan:
        """Layout of a panel."""
        return _panel_plan(self.form, self.depth, self.panels)


def _panel_plan(form: BlockFormat, depth: int, weight: Operand) -> PanelPlan:
    return PanelPlan(form, depth, _static(weight.shape[-1]) // PanelPlan(form, depth, 1).panel_bytes)


def _static(dim: Dim) -> int:
    assert isinstance(dim, int), "weights are constants"
    return dim


Problem = (
    MatmulProblem
    | ConvProblem
    | ElementwiseProblem
    | RowsProblem
    | AttentionProblem
    | QuantizedMatmulProblem
    | BlockRowsProblem
    | BlockUnpackProblem
    | ExpertOrderProblem
    | PanelFragmentsProblem
    | CachedAttentionProblem
)
"""Tasks that kernels are written for."""
