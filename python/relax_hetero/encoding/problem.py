"""Problems: all that a kernel is written from, its operands, how each is stored, what happens to the result.

A problem is plain data: equal problems are one kernel. Symbolic extents are names, numbered in order of appearance
("s0", "s1", ...), so that two dispatches that differ in the names of their symbols share a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .block_formats import BlockFormat
from .block_panels import RecordPlan
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
        How it is stored; the kernel's buffer has ``layout.packed_shape(shape)``.
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
    """Work on the rows of a product's result, which takes their place.

    Attributes
    ----------
    program : RowProgram
    product : int
        The operand of the program that is the product's result, after its epilogue.
    operands : tuple of Operand
        The program's other operands in order; index maps over batch dimensions, m and n.
    """

    program: RowProgram
    product: int
    operands: tuple[Operand, ...]


@dataclass(frozen=True)
class MatmulProblem:
    """A matrix product: ``result = rows(epilogue(init + sum over k of lhs * rhs))``.

    Parameters of its kernel, in order: lhs, rhs, init (if any), operands of the epilogue and of the rows, result.

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
    """

    lhs: Operand
    rhs: Operand
    result: Operand
    acc_dtype: str
    init: Operand | None = None
    epilogue: Epilogue | None = None
    rows: RowPhase | None = None
    tf32: bool = False

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        init = [] if self.init is None else [self.init]
        others = () if self.epilogue is None else self.epilogue.operands
        in_rows = () if self.rows is None else self.rows.operands
        return [self.lhs, self.rhs, *init, *others, *in_rows, self.result]


@dataclass(frozen=True)
class Window:
    """Window of a convolution or pooling along one spatial dimension.

    Attributes
    ----------
    size : int
        Places of the window (of the weight).
    stride, dilation : int
        Distance between neighbouring windows, and between neighbouring taps of one, in elements.
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
        """Elements from the first to the last that a window touches."""
        return (self.size - 1) * self.dilation + 1

    def places(self, extent: int) -> int:
        """How many windows fit along `extent` elements and the padding.

        Parameters
        ----------
        extent : int
            Number of elements without padding.
        """
        return (extent + self.before + self.after - self.dilated_extent) // self.stride + 1


@dataclass(frozen=True)
class ConvProblem:
    """A convolution: ``result = epilogue(sum over k, w0, w1, ... of data * weight)``.

    Parameters of its kernel, in order: data, weight, the epilogue's operands, result. Logical shapes are those of
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
        As of `MatmulProblem`.
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
        others = () if self.epilogue is None else self.epilogue.operands
        return [self.data, self.weight, *others, self.result]


@dataclass(frozen=True)
class AttentionProblem:
    """``result = softmax(scores(query * key^T)) * value``, every head for itself.

    Parameters of its kernel, in order: query, key, value, the operands of `scores`, result, and perhaps scratch: a
    float32 tensor whose shape the kernel says.

    Iteration dimensions: "b" batch, "h" heads, "g" heads of key and value, "m" queries, "n" keys, "d" the width of
    query and key, "e" that of the value. A dimension of an operand may run along several, outermost first: "h*d".

    Attributes
    ----------
    query, key, value, result : Operand
        Plain tensors; query over b, h, m, d; key over b, g, n, d; value over b, g, n, e; result over b, h, m, e. The
        same tensor may be several of them.
    starts : tuple of (tuple of int)
        Position where query, key and value begin in each dimension of the tensor (slices of one tensor).
    sizes : tuple of (str, Dim)
        Extents of every iteration dimension; h, g, d and e are ints, h is a multiple of g.
    scores : Epilogue
        Function that is applied to a product before softmax: ``x0`` is the product, ``x1``, ... operands over b, h, m
        and n ("1": broadcast); those of type bool are conditions of ``where``.
    causal : str
        "": every query sees every key; "top_left": query i sees keys up to i; "bottom_right": the last query sees all.
    nan_to_zero : bool
        A row whose softmax is NaN, because every score is -inf, gives zeros.
    tf32 : bool
        Whether products of float32 may round their operands to 10 bits of fraction.
    """

    query: Operand
    key: Operand
    value: Operand
    result: Operand
    starts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    sizes: tuple[tuple[str, Dim], ...]
    scores: Epilogue
    causal: str = ""
    nan_to_zero: bool = False
    tf32: bool = False

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order, less the scratch."""
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
    """``result = program(x0, x1, ...)`` of every row: what lies along the last dimension, "n".

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


@dataclass(frozen=True)
class QuantizedMatmulProblem:
    """A product with weights in blocks of few bits: ``epilogue(sum over k of lhs * weight)``.

    Parameters of its kernel, in order: lhs, weights, index if there is one, operands of the epilogue, result. Left
    operand (float32; of GPUs also of 16 bits) and result are row-major, over batch dimensions and m, then "k" and "n".

    Attributes
    ----------
    weights : tuple of Operand
        In panels: one operand of bytes, as `encoding.block_panels` packs it. In fragments: weight, scales and perhaps
        zero points (8 or 128 where there are none), or the minimums of a file's format, as `encoding.block_weights`
        packs them.
    block : int
        How many weights along k share a scale; a multiple of 8.
    bits : int
        Bits of a weight as it is stored.
    form : BlockFormat or None
        Format of weights in panels, and of a file's in fragments.
    experts : int
        How many matrices the weights are, below each other, each in whole panels; 0: one, for all rows.
    index : Operand or None
        Numbers of experts, ``(tokens, used)``: the matrix of each row of the result, whose batch dimensions these are.
        The left operand has one row for a token, or one for each of its experts.
    activation_bits : int
        Integers of so many bits, 8 or 16, with a scale for each block may stand for numbers of the left operand.
    rows : str
        Kind of the rows, "decode" or "chunk": all kernels of a kind add up a row in the same order, however many rows
        they have; "" for any order.
    """

    lhs: Operand
    weights: tuple[Operand, ...]
    result: Operand
    block: int
    epilogue: Epilogue | None = None
    bits: int = 4
    form: BlockFormat | None = None
    experts: int = 0
    index: Operand | None = None
    activation_bits: int = 16
    rows: str = ""

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        others = () if self.epilogue is None else self.epilogue.operands
        return [self.lhs, *self.weights, *(() if self.index is None else (self.index,)), *others, self.result]

    @property
    def is_row_by_expert(self) -> bool:
        """True if each expert of a token has a row of the left operand of its own."""
        return self.lhs.shape[1] != 1

    @cached_property
    def plan(self) -> RecordPlan:
        """Where everything lies in a panel."""
        assert self.form is not None, "weights in fragments have no panels"
        plan = RecordPlan(self.form, self.depth, 1)
        return RecordPlan(self.form, self.depth, _static(self.weights[0].shape[-1]) // plan.panel_bytes)

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
class BlockUnpackProblem:
    """Weights in blocks of few bits as numbers, in the layout that a product of many rows reads.

    Parameters of its kernel, in order: weights, result.

    Attributes
    ----------
    product : QuantizedMatmulProblem
        Whose weights they are; its left operand says the element type.
    result : Operand
        Over "k" and "n".
    """

    product: QuantizedMatmulProblem
    result: Operand

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        return [*self.product.weights, self.result]


APPEND = "append"
"""Rows of a `CachedAttentionProblem` that is the first half of a chunk's: keys and values go into their pages."""


@dataclass(frozen=True)
class CachedAttentionProblem:
    """Attention with a paged cache, as `relax_hetero.op.cached_attention` says.

    Parameters of its kernel, in order: the operands, of which `pages` is written, too; out, and perhaps scratch: a
    float32 tensor whose shape the kernel says. Index maps name "m" rows, "p" pages, "s" slots, "t" pages of a slot.

    Attributes
    ----------
    operands : tuple of Operand
        qkv, pages, table, sequences, positions; then rotation, and factors of norms, those that there are.
    out : Operand
    heads, kv_heads, size : int
    scale : float
    window : int
        0: none.
    softcap : float
        0: none.
    rotary, norms : str
    eps : float
    rows : str
        "decode" or "chunk"; "append" where keys and values of a chunk are written and nothing else is done: there is
        no out then.
    order : str
        How keys lie in a page, see `encoding.pages`.
    """

    operands: tuple[Operand, ...]
    out: Operand
    heads: int
    kv_heads: int
    size: int
    scale: float
    window: int
    softcap: float
    rotary: str
    norms: str
    eps: float
    rows: str
    order: str

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order, less the scratch."""
        return [*self.operands, *([] if self.rows == APPEND else [self.out])]

    @property
    def group(self) -> int:
        """Heads of queries that read the same keys."""
        return self.heads // self.kv_heads

    @property
    def page_type(self) -> str:
        """Element type of the pages."""
        return self.operands[1].dtype

    @property
    def turned(self) -> int:
        """How many numbers of a head are rotated."""
        return _static(self.operands[5].shape[1]) if self.rotary else 0

    def other(self, name: str) -> int | None:
        """The number of an operand: "rotation", "q_norm" or "k_norm"; None where there is none."""
        names = ["rotation"] * bool(self.rotary) + [f"{letter}_norm" for letter in self.norms]
        return 5 + names.index(name) if name in names else None


@dataclass(frozen=True)
class BlockRowsProblem:
    """Rows of weights in panels as numbers: ``result[i] = numbers[index[i]]``.

    Parameters of its kernel, in order: weight, index, result. An index that is no row is the nearest one.

    Attributes
    ----------
    weight : Operand
        Bytes, as `encoding.block_panels` packs them.
    index : Operand
        One dimension, int32 or int64.
    result : Operand
        (indices, depth) of float32.
    form : BlockFormat
    rows : int
        Number of rows of the weights.
    """

    weight: Operand
    index: Operand
    result: Operand
    form: BlockFormat
    rows: int

    @property
    def parameters(self) -> list[Operand]:
        """Operands of the kernel, in order."""
        return [self.weight, self.index, self.result]

    @cached_property
    def plan(self) -> RecordPlan:
        """Where everything lies in a panel."""
        depth = _static(self.result.shape[-1])
        plan = RecordPlan(self.form, depth, 1)
        return RecordPlan(self.form, depth, _static(self.weight.shape[-1]) // plan.panel_bytes)


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
    | CachedAttentionProblem
)
"""Whatever kernels are written for."""
