"""Intel AMX in TIR: permission, configuration, tile loads, products and stores.

Linux grants the tile registers to a process that requests them, once for all of its threads; using them without
permission kills the process. Compiled code therefore requests them itself (`may_use_amx`), and falls back to vectors
where the CPU lacks them or a container forbids the request. Tile shapes are per thread: every task configures the
tiles, and releases them at its end.

The body of a kernel that uses AMX stands under ``T.attr(0, "pragma_import_llvm", LLVM_TEXT)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.amx_instructions import TILE_BYTES, AmxInstruction
from ..core.builder import Expr, either, int64, loop, materialize

LANES = 16  # columns of a tile of accumulators

LEFT_TILES, RIGHT_TILES = (4, 5), (6, 7)
"""Tiles of factors; tiles 0 to 3 are accumulators, two for each of the left factors."""

_REQUEST, _COPY = "relax_hetero_may_use_tiles", "relax_hetero_copy_64"

# The system call is arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of Linux on x86-64, which returns zero if
# granted. The answer is cached: 1 if granted, 2 if refused.
LLVM_TEXT = f"""
@relax_hetero_tiles_answer = internal global i32 0
define i32 @{_REQUEST}() {{
entry:
  %known = load atomic i32, ptr @relax_hetero_tiles_answer monotonic, align 4
  %is_known = icmp ne i32 %known, 0
  br i1 %is_known, label %done, label %ask
ask:
  %code = call i64 asm sideeffect "syscall", "={{rax}},{{rax}},{{rdi}},{{rsi}},~{{rcx}},~{{r11}},~{{memory}}"(
    i64 158, i64 4131, i64 18)
  %granted = icmp eq i64 %code, 0
  %found = select i1 %granted, i32 1, i32 2
  store atomic i32 %found, ptr @relax_hetero_tiles_answer monotonic, align 4
  br label %done
done:
  %answer = phi i32 [ %known, %entry ], [ %found, %ask ]
  %yes = icmp eq i32 %answer, 1
  %number = zext i1 %yes to i32
  ret i32 %number
}}
declare <64 x i8> @llvm.masked.load.v64i8.p0(ptr, i32, <64 x i1>, <64 x i8>)
define void @{_COPY}(ptr %source, ptr %target, i64 %mask) {{
  %lanes = bitcast i64 %mask to <64 x i1>
  %value = call <64 x i8> @llvm.masked.load.v64i8.p0(ptr %source, i32 1, <64 x i1> %lanes, <64 x i8> zeroinitializer)
  store <64 x i8> %value, ptr %target, align 1
  ret void
}}
"""


def may_use_amx() -> Expr:
    """Return whether the operating system lets the process use AMX; the first call requests it."""
    return tirx.EQ(tirx.call_extern("int32", _REQUEST), tirx.const(1, "int32"))


def amx_or_vectors(with_amx: Callable[[], None], with_vectors: Callable[[], None], enough_rows: Expr = True) -> None:
    """Write a kernel with AMX and with vectors; a call uses AMX if `enough_rows` holds and the process may."""
    allowed = may_use_amx()
    either(allowed if enough_rows is True else tirx.And(enough_rows, allowed), with_amx, with_vectors)


def _emit(name: str, *args: Expr) -> None:
    T.evaluate(tirx.call_llvm_intrin("void", name, *args))


def configure(rows: list[Expr], widths: list[int]) -> None:
    """Configure the rows and the bytes per row of the eight tiles; Intel SDM, LDTILECFG, palette 1."""
    words = T.alloc_buffer((16,), "int32", scope="global")
    counts = [tirx.Cast("int32", r) if isinstance(r, tirx.Expr) else tirx.const(r, "int32") for r in rows]

    def four(first: int) -> Expr:
        word = counts[first]
        for i in range(1, 4):
            word = tirx.bitwise_or(word, tirx.shift_left(counts[first + i], tirx.const(8 * i, "int32")))
        return word

    pairs = [tirx.const(high << 16 | low, "int32") for low, high in zip(widths[::2], widths[1::2], strict=True)]
    zero = tirx.const(0, "int32")
    for i, word in enumerate([tirx.const(1, "int32"), *[zero] * 3, *pairs, *[zero] * 4, four(0), four(4), zero, zero]):
        T.buffer_store(words, word, [i])
    _emit("llvm.x86.ldtilecfg", T.address_of(words[0]))


def release() -> None:
    """Release the tiles, which makes context switches cheaper."""
    _emit("llvm.x86.tilerelease")


def clear(tile: int) -> None:
    """Fill a tile with zeros."""
    _emit("llvm.x86.tilezero", T.int8(tile))


def load(tile: int, address: Expr, stride: Expr, streamed: bool = False) -> None:
    """Load a tile from rows `stride` bytes apart; `streamed` loads do not evict others from the L1 cache."""
    name = "llvm.x86.tileloaddt164" if streamed else "llvm.x86.tileloadd64"
    _emit(name, T.int8(tile), address, int64(stride))


def store(tile: int, address: Expr, stride: Expr) -> None:
    """Store a tile's rows `stride` bytes apart."""
    _emit("llvm.x86.tilestored64", T.int8(tile), address, int64(stride))


def multiply(instruction: AmxInstruction, sums: int, left: int, right: int) -> None:
    """Add the product of two tiles to a third."""
    _emit(instruction.instruction, T.int8(sums), T.int8(left), T.int8(right))


def prefetch(address: Expr) -> None:
    """Prefetch a cache line into the L2 cache."""
    read, level, data = tirx.const(0, "int32"), tirx.const(2, "int32"), tirx.const(1, "int32")
    _emit("llvm.prefetch", address, read, level, data)


def copy_line(source: Expr, target: Expr, count: int = TILE_BYTES) -> None:
    """Copy `count` bytes between addresses.

    The rest of the target's 64 bytes becomes zero; the rest of the source is not read.
    """
    mask = -1 if count >= TILE_BYTES else (1 << count) - 1
    T.evaluate(tirx.call_extern("void", _COPY, source, target, T.int64(mask)))


def copy_bytes(source: tuple[Any, Expr], target: tuple[Any, Expr], count: int) -> None:
    """Copy `count` bytes between buffers in one dimension, given with the first element, in lines of 64 bytes.

    The rest of the last line of the target becomes zero; the rest of the source is not read.
    """
    lines, tail = divmod(count, TILE_BYTES)

    def copy(line: Expr, count: int) -> None:
        source_line, target_line = (
            address(memory, start + line * _line_elements(memory)) for memory, start in (source, target)
        )
        copy_line(source_line, target_line, count)

    if lines:
        with loop(lines) as line:
            copy(line, TILE_BYTES)
    if tail:
        copy(tirx.const(lines, "int64"), tail)


def _line_elements(memory: Any) -> int:
    return TILE_BYTES * 8 // tvm.DataType(memory.dtype).bits


def scratch(size: int, dtype: str) -> Any:
    """Memory of a task for loads and stores that TVM does not see.

    TVM shrinks an allocation to the elements whose accesses it sees, so both ends are written.
    """
    memory = T.alloc_buffer((size,), dtype, scope="global")
    for end in (0, size - 1):
        T.buffer_store(memory, tirx.const(0, dtype), [end])
    return memory


def address(memory: Any, at: Expr) -> Expr:
    """Address of an element of a buffer in one dimension."""
    return T.address_of(memory[at])


class PendingRows:
    """Rows of accumulators in memory of a task whose epilogue is interleaved with the steps of the next products."""

    def __init__(self, numbers: int) -> None:
        self._range = T.alloc_buffer((2,), "int64", scope="global")  # the next row to finish, and the end
        # Destination of the rows, in numbers of the kernel.
        self.place = T.alloc_buffer((numbers,), "int64", scope="global")
        for slot in (0, 1):
            T.buffer_store(self._range, tirx.const(0, "int64"), [slot])

    def put(self, begin: Expr, end: Expr, place: Sequence[Expr]) -> None:
        """Add rows; all earlier ones must be finished."""
        for buffer, numbers in ((self._range, (begin, end)), (self.place, place)):
            for slot, number in enumerate(numbers):
                T.buffer_store(buffer, int64(number), [slot])

    def finish(self, finish_row: Callable[[Expr], None], max_rows: int | None = None) -> None:
        """Finish at most `max_rows` rows (None: all), each with code that `finish_row` writes."""
        next_row = materialize(self._range[0])
        left = self._range[1] - next_row
        count = materialize(left if max_rows is None else T.min(left, int64(max_rows)))
        with loop(count) as r:
            finish_row(materialize(next_row + r))
        T.buffer_store(self._range, next_row + count, [0])
