"""Sizes, parameters, and offsets of tokens in pages, which kernels of attention over pages share.

The order of a page (`encoding.pages`) is "chunks" here: keys are ``(size / 8, 64, 8)``, and so are values. Eight
neighbouring elements of a head, 16 bytes, are a row of what tensor cores read as one matrix, and the rows of 64 tokens
lie after each other: `ptx.load_matrices` meets no bank twice, either way round, and keys and values of a head are one
stretch of memory, which one bulk copy brings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE, page_shape
from ....encoding.problem import Dim
from ....target.element_types import HALF_TYPES
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, Function, flat

CHUNK = 8
"""Elements of a head that lie together: 16 bytes."""
WIDEST = 256
"""Maximum width of a head: sums of values stay in registers."""
MAX_BLOCKS_PER_SM = 16
"""Heads of queries that read one head of keys: rows of a tile."""


@dataclass(frozen=True)
class PagedWork:
    """Sizes of an attention over the pages of a cache.

    Attributes
    ----------
    rows : int
        Number of rows of the joined projection, ``(rows, (heads + 2 * kv_heads) * size)``.
    heads, kv_heads, size : int
        Heads of queries and of keys, and the elements of each.
    scale : float
        Factor of scores.
    slots, max_pages : int
        Extents of the table: sequences, and pages of each.
    pages : int or str
        Number of pages of the cache of the layer; the name of a symbolic extent.
    window : int
        Keys that a row sees, its own among them; 0: all before it.
    softcap : float
        ``c * tanh(score / c)`` where it is not 0.
    rotary : str
        Which elements are rotated together: "halves", "pairs" or "" for none; `rotated` of them.
    eps : float
        Epsilon of the norms.
    has_q_norm, has_k_norm : bool
        Whether heads of queries and keys are normalized first.
    dtype, page_dtype : str
        Element types of the projection and of the result; of keys and values in pages.
    is_chunk : bool
        Whether all rows are of one sequence, at consecutive positions.
    """

    rows: int
    heads: int
    kv_heads: int
    size: int
    scale: float
    slots: int
    max_pages: int
    pages: Dim
    window: int = 0
    softcap: float = 0.0
    rotary: str = ""
    rotated: int = 0
    eps: float = 1e-6
    has_q_norm: bool = False
    has_k_norm: bool = False
    dtype: str = "float16"
    page_dtype: str = "float16"
    is_chunk: bool = False

    @property
    def group(self) -> int:
        """Heads of queries that read one head of keys."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Elements of a row of the projection."""
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def tile_bytes(self) -> int:
        """Bytes of the keys, or the values, of a head in a page."""
        return PAGE * self.size * 2


def unsupported_reason(work: PagedWork, gpu: GpuTarget) -> str:
    """Why no kernel of tensor cores solves this; empty where they do."""
    if not gpu.bulk_copies:
        return f"{gpu.arch} has no bulk copies"
    if work.page_dtype not in HALF_TYPES or work.dtype not in (*HALF_TYPES, "float32"):
        return f"pages of {work.page_dtype} and rows of {work.dtype}, expected pages of 16-bit floats"
    if work.size % 16 or work.size > WIDEST:
        return f"heads of {work.size}, expected a multiple of 16, at most {WIDEST}"
    if not work.is_chunk and work.group > MAX_BLOCKS_PER_SM:
        return f"{work.group} heads of queries for one of keys, expected at most {MAX_BLOCKS_PER_SM}"
    return "an extent is 0" if 0 in (work.rows, work.slots, work.max_pages, work.pages) else ""


class PagedTensors:
    """The parameters of a kernel, declared in the order of the op's operands; the result is declared last.

    Attributes
    ----------
    qkv, table, sequences, positions, rotation, q_norm, k_norm, out : Buffer or None
        Flat.
    pages : Buffer
        Flat, elements as their bits.
    """

    qkv: Any
    pages: Any
    table: Any
    sequences: Any
    positions: Any
    rotation: Any
    q_norm: Any
    k_norm: Any
    out: Any

    def __init__(self, function: Function, work: PagedWork, has_result: bool = True) -> None:
        self.work = work
        rows, ints = [work.rows], "int32"
        self._flat: dict[str, tuple[Any, list[Expr], str]] = {}

        def take(name: str, shape: list[Expr], dtype: str, read_as: str | None = None) -> None:
            self._flat[name] = (function.argument(name, shape, dtype), shape, read_as or dtype)

        take("qkv", [work.rows, work.width], work.dtype)
        pages = list(page_shape(function.extent(work.pages), work.kv_heads, work.size, work.page_dtype))
        take("pages", pages, work.page_dtype, "uint16")
        take("table", [work.slots, work.max_pages], ints)
        take("sequences", rows, ints)
        take("positions", rows, ints)
        if work.rotary:
            take("rotation", [work.rows, work.rotated], "float32")
        if work.has_q_norm:
            take("q_norm", [work.size], "float32")
        if work.has_k_norm:
            take("k_norm", [work.size], "float32")
        if has_result:
            take("out", [work.rows, work.heads * work.size], work.dtype)

    @property
    def order(self) -> list[str]:
        """The names of the parameters, in order."""
        return list(self._flat)

    def open(self) -> None:
        """Declare the elements; within the body of the function."""
        for name in ("rotation", "q_norm", "k_norm", "out"):
            setattr(self, name, None)
        for name, (buffer, shape, dtype) in self._flat.items():
            setattr(self, name, flat(buffer, shape, dtype))

    def head_of_row(self, row: Expr, head: Expr) -> Expr:
        """Where the elements of a head of the projection begin: heads of queries, then of keys, then of values."""
        return T.Cast("int64", row) * self.work.width + T.Cast("int64", head) * self.work.size

    def page_of(self, sequence: Expr, number: Expr) -> Expr:
        """The page with the tokens from ``64 * number`` on of a sequence; -1 where there is none."""
        return self.table[T.Cast("int64", sequence) * self.work.max_pages + T.Cast("int64", number)]

    def tile(self, page: Expr, kv_head: Expr, is_value: Expr) -> Expr:
        """The first element of keys or values of a head in a page."""
        number = (T.Cast("int64", page) * self.work.kv_heads + T.Cast("int64", kv_head)) * 2 + is_value
        return number * (PAGE * self.work.size)


def in_tile(element: Expr, token: Expr) -> Expr:
    """Where a tile of keys or values has an element of a token, counted in elements."""
    chunk = tirx.floordiv(element, CHUNK)
    return (chunk * PAGE + token) * CHUNK + tirx.floormod(element, CHUNK)
