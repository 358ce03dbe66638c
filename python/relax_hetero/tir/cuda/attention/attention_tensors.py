"""Parameters of an attention kernel, the tiles of rows of its blocks, and its launch.

A row is a query of one head. `DenseTensors` are keys and values with strides, `PagedTensors` those of a paged cache.

Pages (`encoding.pages`) have the order "chunks": keys are ``(size / 8, 64, 8)``, and so are values. Eight neighbouring
elements of a head, 16 bytes, are a row of an 8x8 matrix, and the rows of 64 tokens are contiguous: `ptx.load_matrices`
has no bank conflicts, transposed or not, and one bulk copy loads the keys and values of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression, Term
from ....encoding.packed_layout import PackedLayout
from ....encoding.pages import PAGE
from ....encoding.problem import APPEND, AttentionProblem, CachedAttentionProblem, Operand
from ....errors import EncodingError
from ....target.element_types import HALF_TYPES, TF32
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ...core.view import Coordinates, View
from ..core import ptx
from ..core.launch import Place, SharedMemory, at_least_one, enable_pdl, launch, to_int32
from .attention_plan import WARP_ROWS, AttentionPlan, paged_extents
from .heads import GpuHeads, Rows

MAX_HEAD_SIZE = 256
"""Maximum head size on tensor cores: accumulators of values stay in registers."""
MAX_HEAD_SIZE_TF32 = 128
"""Maximum head size of float32, limited by shared memory."""
MAX_SHARED_VALUES_SIZE = 640
"""Maximum size of keys that are the values: two pages fit shared memory."""
CHUNK = 8
"""Contiguous elements of a head in a page: 16 bytes."""
READ_EARLY = (1, 2, 3, 4)
"""Operands that decoding reads before previous launches have ended: pages, table, sequences and positions.

Earlier steps have written all keys and values but the token's."""


def unsupported_reason(
    problem: AttentionProblem | CachedAttentionProblem, gpu: GpuTarget, with_tf32: bool = False
) -> str:
    """Reason why no tensor core kernel supports a problem; empty if one does, by tf32 if `with_tf32`."""
    if isinstance(problem, CachedAttentionProblem):
        return _paged_unsupported_reason(problem, gpu)
    types = {operand.dtype for operand in (problem.query, problem.key, problem.value, problem.result)}
    supported = gpu.mma_types & set(HALF_TYPES)
    if with_tf32 and problem.tf32 and TF32 in gpu.mma_types:
        supported = supported | {"float32"}
    if len(types) > 1 or not types <= supported:
        return f"element types {sorted(types)}, expected one of {sorted(supported)}"
    sizes, max_size = dict(problem.sizes), MAX_HEAD_SIZE_TF32 if "float32" in types else MAX_HEAD_SIZE
    if int(sizes["d"]) > max_size or int(sizes["e"]) > max_size:
        return f"heads of {sizes['d']} and {sizes['e']}, expected at most {max_size}"
    return "an extent is 0" if 0 in sizes.values() else ""


def require_supported(problem: AttentionProblem | CachedAttentionProblem, gpu: GpuTarget, reason: str) -> None:
    """Raise EncodingError if there is a reason why a kernel does not support a problem."""
    if reason:
        op = "attention" if isinstance(problem, AttentionProblem) else "cached_attention"
        raise EncodingError(f"{op} on {gpu.arch}: {reason}")


def _paged_unsupported_reason(problem: CachedAttentionProblem, gpu: GpuTarget) -> str:
    dtype = problem.operands[0].dtype
    if not gpu.bulk_copies:
        return f"{gpu.arch} lacks bulk copies"
    if problem.page_type not in HALF_TYPES or dtype not in (*HALF_TYPES, "float32"):
        return f"pages of {problem.page_type} and rows of {dtype}, expected pages of 16-bit floats"
    if problem.shared_values % 64:
        return f"{problem.shared_values} elements of keys that are values, expected a multiple of 64"
    unit, max_size = (32, MAX_SHARED_VALUES_SIZE) if problem.shared_values else (16, MAX_HEAD_SIZE)
    if problem.size % unit or problem.size > max_size:
        return f"heads of {problem.size}, expected a multiple of {unit}, at most {max_size}"
    if problem.is_decode and problem.group > WARP_ROWS and not problem.shared_values:
        return f"{problem.group} query heads per key head, expected at most {WARP_ROWS}"
    return "an extent is 0" if 0 in (*paged_extents(problem), problem.operands[1].shape[0]) else ""


class AttentionTensors:
    """Parameters and tiles of a kernel.

    Attributes
    ----------
    sizes : dict of str to PrimExpr or int
        Extents of iteration dimensions; see `AttentionProblem`.
    dtype : str
        Element type of the operands of products.
    scores : Expression
        Function of a product (``x0``) and elements of the masks (``x1``, ...), before softmax.
    sinks : Buffer or None
        Scores without a value, one for each head, float32.
    is_causal : bool
        Whether late rows see more keys.
    nan_to_zero : bool
        Whether rows without keys are zeros, not NaN.
    row : PrimExpr
        First row of the block's tile, int32; like `at` and `rank`, known within `launch`.
    at : Coordinates
        Batch and group of queries.
    at_keys : Coordinates
        Batch and head of keys.
    rank : PrimExpr
        Rank of the block in the cluster that splits the keys.
    """

    dtype: str
    scores: Expression
    masks: tuple[GpuHeads, ...]
    result: GpuHeads
    sinks: Any = None
    is_causal: bool
    nan_to_zero: bool

    def __init__(self, sizes: dict[str, Expr], plan: AttentionPlan, gpu: GpuTarget) -> None:
        self.sizes, self.plan, self.uses_pdl = sizes, plan, gpu.overlaps_launches
        self.rows = Rows(sizes, plan.heads_per_tile)

    @property
    def groups(self) -> int:
        """Groups of heads per batch."""
        return int(self.sizes["h"]) // self.rows.heads_per_tile

    def open(self, raw: bool = True) -> None:
        """Declare the elements, those of queries, keys and values as bits if `raw`."""
        for view in (*self.masks, self.result):
            view.open_for_gpu()

    @contextmanager
    def launch(
        self,
        threads: int,
        shared: SharedMemory,
        set_up: Callable[[Expr], None] | None = None,
        min_blocks_per_sm: int = 0,
        waits: bool = True,
    ) -> Iterator[Place]:
        """Context of a launch with a cluster of `split_keys` blocks per tile of `rows`.

        Parameters
        ----------
        set_up : callable, optional
            Function that initializes barriers, given the thread, before the wait for previous launches.
        min_blocks_per_sm : int
            Launch bound, see `launch`.
        waits : bool
            Whether to wait for previous launches; else the kernel waits.
        """
        height, split = self.plan.rows, self.plan.split_keys
        row_tiles = to_int32(ceil_div(self.rows.count, height))
        tiles = row_tiles * self.groups * to_int32(self.sizes["b"])
        is_static = isinstance(tiles, int)
        blocks = tiles if is_static else ceil_div(int64(self.rows.count), height) * int64(self.sizes["b"]) * self.groups
        with launch(at_least_one(blocks) * split, threads, split, min_blocks_per_sm=min_blocks_per_sm) as place:
            shared.open()
            if set_up is not None:
                set_up(place.thread)
            block, self.rank = T.bind(T.Cast("int32", place.block)), place.rank
            if is_static:
                self._locate(block, row_tiles)
            if waits and self.uses_pdl:
                ptx.griddepcontrol_wait()
                ptx.launch_dependents()
            with when(True if is_static else block < tiles * split):
                if not is_static:
                    self._locate(block, row_tiles)
                yield place

    def _locate(self, block: Expr, row_tiles: Expr) -> None:
        """Compute the rows and heads of a block."""
        split, heads_per_group = self.plan.split_keys, self.plan.heads_per_group
        tile = block if split == 1 else T.bind(T.truncdiv(block, split))
        num_groups = self.groups * to_int32(self.sizes["b"])
        if heads_per_group and isinstance(num_groups, int) and heads_per_group >= num_groups:
            number, outer = T.truncdiv(tile, num_groups), T.bind(T.truncmod(tile, num_groups))
        elif heads_per_group:
            first = T.bind(T.truncdiv(tile, heads_per_group * row_tiles) * heads_per_group)
            heads = T.min(heads_per_group, num_groups - first)
            index_in_group = T.bind(T.truncmod(tile, heads_per_group * row_tiles))
            number, outer = T.truncdiv(index_in_group, heads), T.bind(first + T.truncmod(index_in_group, heads))
        else:
            number, outer = T.truncmod(tile, row_tiles), T.bind(T.truncdiv(tile, row_tiles))
        if self.is_causal:  # long rows first
            number = row_tiles - 1 - number
        self.row = T.bind(number * self.plan.rows)
        group = T.bind(T.Cast("int64", tirx.floormod(outer, self.groups)))
        batch = T.bind(T.Cast("int64", tirx.floordiv(outer, self.groups)))
        self.at: Coordinates = {"b": batch, "group": group}
        self.at_keys: Coordinates = {"b": batch, "g": T.bind(self.rows.key_head(group))}


class DenseTensors(AttentionTensors):
    """Parameters of `AttentionProblem`; attributes are those of `AttentionTensors`."""

    def __init__(self, function: Function, problem: AttentionProblem, plan: AttentionPlan, gpu: GpuTarget) -> None:
        sizes = {name: size if isinstance(size, int) else function.symbol(size) for name, size in problem.sizes}
        super().__init__(sizes, plan, gpu)
        self.causal, self.is_causal, self.nan_to_zero = problem.causal, bool(problem.causal), problem.nan_to_zero
        self.dtype, self.scores = problem.query.dtype, problem.scores.expression

        def view(name: str, operand: Operand, starts: Sequence[int] = (), depth: str = "d") -> GpuHeads:
            starts = starts or (0,) * len(operand.shape)
            return GpuHeads(function, name, operand, starts, sizes, depth, self.rows)

        self.query = view("query", problem.query, problem.starts[0])
        self.key = view("key", problem.key, problem.starts[1])
        self.value = view("value", problem.value, problem.starts[2], "e")
        self.masks = tuple(view(f"x{i + 1}", operand) for i, operand in enumerate(problem.scores.operands))
        self.result = view("result", problem.result, depth="e")

    def open(self, raw: bool = True) -> None:
        """Declare the elements, those of queries, keys and values as bits if `raw`."""
        for view in (self.query, self.key, self.value):
            view.open(raw=True) if raw else view.open_for_gpu()
        super().open()

    @property
    def _last_key_of_first_query(self) -> Expr:
        """Index of the last key visible to query 0 in causal attention."""
        n, m = self.sizes["n"], self.sizes["m"]
        return to_int32(n - m) if self.causal == "bottom_right" else 0

    def visible(self) -> Expr:
        """Number of keys visible to any row of the block, int32."""
        n = to_int32(self.sizes["n"])
        if not self.causal:
            return n
        is_one = self.rows.heads_per_tile == 1
        last_row = T.min(self.row + self.plan.rows, to_int32(self.rows.count)) - 1
        last = last_row if is_one else to_int32(self.sizes["m"]) - 1
        return T.max(T.min(last + (1 + self._last_key_of_first_query), n), 0)

    def visible_to(self, row: Expr, end: Expr) -> Expr:
        """Number of keys below `end` that are visible to a row, int32."""
        if not self.causal:
            return end
        return T.min(end, self.rows.query(row) + (1 + self._last_key_of_first_query))


class PagedTensors(AttentionTensors):
    """Parameters of `CachedAttentionProblem`; attributes are those of `AttentionTensors`.

    The batch of decoding is the tokens; rows are the heads of a token that share keys. A chunk has a batch of one, and
    its rows are tokens.

    Attributes
    ----------
    qkv, table, sequences, positions, rotation, q_norm, k_norm : Buffer or None
        Flat views.
    pages : Buffer
        Flat view of bits.
    kinds : tuple of str
        Kinds of heads in the projection and in a page, in order: "key" and "value", or "key" where values are keys.
    """

    qkv: Any
    pages: Any
    table: Any
    sequences: Any
    positions: Any
    rotation: Any = None
    q_norm: Any = None
    k_norm: Any = None

    def __init__(
        self, function: Function, problem: CachedAttentionProblem, plan: AttentionPlan, gpu: GpuTarget
    ) -> None:
        self.problem, size = problem, problem.size
        self.kinds = ("key",) if problem.shared_values else ("key", "value")
        self.num_rows, _, self.max_pages = paged_extents(problem)
        batch, queries = (self.num_rows, 1) if problem.is_decode else (1, self.num_rows)
        sizes = {
            "b": batch,
            "h": problem.heads,
            "g": problem.kv_heads,
            "m": queries,
            "d": size,
            "e": problem.value_size,
        }
        super().__init__(sizes, plan, gpu)
        self.dtype, self.is_causal, self.nan_to_zero = problem.page_type, True, True
        self.scores, self.masks = _scores(problem), ()
        names = ["qkv", "pages", "table", "sequences", "positions", *problem.optional_operands]
        self._views = {
            name: View(function, name, [function.extent(dim) for dim in operand.shape], operand.dtype)
            for name, operand in zip(names, problem.operands, strict=True)
        }
        self.has_result = problem.rows != APPEND
        if self.has_result:
            shape = problem.out.shape
            index_map = ("b" if problem.is_decode else "m", "h*e")
            out = Operand(shape, problem.out.dtype, index_map, PackedLayout.identity(len(shape)))
            self.result = GpuHeads(function, "out", out, (0, 0), sizes, "e", self.rows)

    def open(self, raw: bool = True) -> None:
        """Declare the elements, those of pages as bits."""
        for name, view in self._views.items():
            view.open(raw=name == "pages")
            setattr(self, name, view.data)
        if self.has_result:
            super().open()

    @property
    def tile_bytes(self) -> int:
        """Bytes of the keys of a head in a page."""
        return PAGE * self.problem.size * 2

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys and values of a head in a page; values, or elements of keys that are values, are last."""
        return len(self.kinds) * self.tile_bytes

    def head_of_row(self, row: Expr, head: Expr) -> Expr:
        """Offset of a head of the projection: query heads, then key heads, then value heads."""
        heads = self.problem.heads + len(self.kinds) * self.problem.kv_heads
        return (T.Cast("int64", row) * heads + T.Cast("int64", head)) * self.problem.size

    def page_of(self, sequence: Expr, number: Expr) -> Expr:
        """Page number `number` of a sequence, with tokens from ``64 * number`` on; -1 if there is none."""
        return self.table[T.Cast("int64", sequence) * self.max_pages + T.Cast("int64", number)]

    def tile(self, page: Expr, kv_head: Expr, kind: Expr) -> Expr:
        """Offset of keys or values, by the index of their kind, of a head in a page."""
        number = (T.Cast("int64", page) * self.problem.kv_heads + T.Cast("int64", kv_head)) * len(self.kinds) + kind
        return number * (PAGE * self.problem.size)


def in_tile(element: Expr, token: Expr, tokens: int = PAGE) -> Expr:
    """Offset of a token's element in a tile of keys, values or queries."""
    chunk = tirx.floordiv(element, CHUNK)
    return (chunk * tokens + token) * CHUNK + tirx.floormod(element, CHUNK)


def _scores(problem: CachedAttentionProblem) -> Expression:
    """Score of a product: its multiple, capped by ``softcap * tanh(score / softcap)`` unless `softcap` is 0."""

    def times(term: Term, factor: float) -> Term:
        return Term("multiply", (term, Term("number", (), (factor,))))

    product, cap = Term("operand", (), (0,)), problem.softcap
    if not cap:
        return Expression(times(product, problem.scale))
    return Expression(times(Term("tanh", (times(product, problem.scale / cap),)), cap))


def kernel_of(
    name: str,
    problem: AttentionProblem | CachedAttentionProblem,
    plan: AttentionPlan,
    gpu: GpuTarget,
    write: Callable[[Any], None],
    raw: bool = True,
    reads_early: Sequence[int] = (),
) -> tirx.PrimFunc:
    """Kernel whose body `write` writes, given the opened tensors."""
    function = Function(name, registers="local")
    with function:
        tensors: AttentionTensors
        if isinstance(problem, CachedAttentionProblem):
            tensors = PagedTensors(function, problem, plan, gpu)
        else:
            tensors = DenseTensors(function, problem, plan, gpu)
        with function.body():
            tensors.open(raw)
            write(tensors)
    return enable_pdl(function.result, reads_early) if tensors.uses_pdl else function.result
