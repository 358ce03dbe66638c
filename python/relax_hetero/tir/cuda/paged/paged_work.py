"""Sizes, parameters and page layout of paged attention kernels.

Pages (`encoding.pages`) have the order "chunks": keys are ``(size / 8, 64, 8)``, and so are values. Eight neighbouring
elements of a head, 16 bytes, are a row of an 8x8 matrix, and the rows of 64 tokens are contiguous: `ptx.load_matrices`
has no bank conflicts, transposed or not, and one bulk copy loads the keys and values of a head.
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
"""Contiguous elements of a head: 16 bytes."""
MAX_HEAD_SIZE = 256
"""Maximum head size: accumulators of values stay in registers."""
MAX_GROUP_HEADS = 16
"""Maximum query heads per key head: rows of a tile."""


@dataclass(frozen=True)
class PagedWork:
    """Sizes of a paged attention.

    Attributes
    ----------
    rows : int
        Rows of the fused qkv projection, ``(rows, (heads + 2 * kv_heads) * size)``.
    heads, kv_heads, size : int
        Query heads, key heads, and their size.
    scale : float
        Factor of scores.
    slots, max_pages : int
        Extents of the block table: sequences, and pages of each.
    pages : int or str
        Pages of the layer's cache; a symbolic extent is a name.
    window : int
        Sliding window: keys visible to a row, its own included; 0: unlimited.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``, unless it is 0.
    rotary : str
        Pairs of rotary embedding: "halves" (NeoX), "pairs" (GPT-J) or "" for none; `rotated` elements take part.
    eps : float
        Epsilon of the norms.
    has_q_norm, has_k_norm : bool
        Whether query and key heads are normalized first.
    dtype, page_dtype : str
        Element types of projection and result, and of keys and values in pages.
    is_chunk : bool
        Whether rows are consecutive tokens of one sequence (prefill).
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
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Elements of a row of the projection."""
        return (self.heads + 2 * self.kv_heads) * self.size

    @property
    def tile_bytes(self) -> int:
        """Bytes of the keys, or of the values, of a head in a page."""
        return PAGE * self.size * 2


def unsupported_reason(work: PagedWork, gpu: GpuTarget) -> str:
    """Reason why paged attention kernels do not support a problem; empty if they do."""
    if not gpu.bulk_copies:
        return f"{gpu.arch} lacks bulk copies"
    if work.page_dtype not in HALF_TYPES or work.dtype not in (*HALF_TYPES, "float32"):
        return f"pages of {work.page_dtype} and rows of {work.dtype}, expected pages of 16-bit floats"
    if work.size % 16 or work.size > MAX_HEAD_SIZE:
        return f"heads of {work.size}, expected a multiple of 16, at most {MAX_HEAD_SIZE}"
    if not work.is_chunk and work.group > MAX_GROUP_HEADS:
        return f"{work.group} query heads per key head, expected at most {MAX_GROUP_HEADS}"
    return "an extent is 0" if 0 in (work.rows, work.slots, work.max_pages, work.pages) else ""


class PagedTensors:
    """Parameters of a kernel, declared in the order of the op's operands, then the result.

    Attributes
    ----------
    qkv, table, sequences, positions, rotation, q_norm, k_norm, out : Buffer or None
        Flat views.
    pages : Buffer
        Flat view of bits.
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

        def declare(name: str, shape: list[Expr], dtype: str, read_as: str | None = None) -> None:
            self._flat[name] = (function.argument(name, shape, dtype), shape, read_as or dtype)

        declare("qkv", [work.rows, work.width], work.dtype)
        pages = list(page_shape(function.extent(work.pages), work.kv_heads, work.size, work.page_dtype))
        declare("pages", pages, work.page_dtype, "uint16")
        declare("table", [work.slots, work.max_pages], ints)
        declare("sequences", rows, ints)
        declare("positions", rows, ints)
        if work.rotary:
            declare("rotation", [work.rows, work.rotated], "float32")
        if work.has_q_norm:
            declare("q_norm", [work.size], "float32")
        if work.has_k_norm:
            declare("k_norm", [work.size], "float32")
        if has_result:
            declare("out", [work.rows, work.heads * work.size], work.dtype)

    @property
    def order(self) -> list[str]:
        """Names of the parameters, in order."""
        return list(self._flat)

    def open(self) -> None:
        """Declare the elements, within the body of the function."""
        for name in ("rotation", "q_norm", "k_norm", "out"):
            setattr(self, name, None)
        for name, (buffer, shape, dtype) in self._flat.items():
            setattr(self, name, flat(buffer, shape, dtype))

    def head_of_row(self, row: Expr, head: Expr) -> Expr:
        """Offset of a head of the projection: query heads, then key heads, then value heads."""
        return T.Cast("int64", row) * self.work.width + T.Cast("int64", head) * self.work.size

    def page_of(self, sequence: Expr, number: Expr) -> Expr:
        """Page number `number` of a sequence, with tokens from ``64 * number`` on; -1 if there is none."""
        return self.table[T.Cast("int64", sequence) * self.work.max_pages + T.Cast("int64", number)]

    def tile(self, page: Expr, kv_head: Expr, is_value: Expr) -> Expr:
        """Offset of keys or values of a head in a page."""
        number = (T.Cast("int64", page) * self.work.kv_heads + T.Cast("int64", kv_head)) * 2 + is_value
        return number * (PAGE * self.work.size)


def in_tile(element: Expr, token: Expr) -> Expr:
    """Offset of a token's element in a tile of keys or values."""
    chunk = tirx.floordiv(element, CHUNK)
    return (chunk * PAGE + token) * CHUNK + tirx.floormod(element, CHUNK)
