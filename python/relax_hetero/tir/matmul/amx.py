"""Tile registers (Intel AMX) in TIR: permission, configuration, loads, products, stores.

Linux gives tile registers to a process that asks for them, once and for all of its threads; their first use without
permission kills the process. So compiled code asks by itself (`may_use_tiles`), wherever its library is loaded, and
has another way where the answer is no: the CPU has no tiles, or a container forbids the question. The shapes of tiles
are a thread's: every task configures them, and releases them at its end.

The body of a kernel that uses any of this stands under ``T.attr(0, "pragma_import_llvm", LLVM_TEXT)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.amx_instructions import TILE_BYTES, AmxInstruction
from ..core.builder import Expr, either, int64, loop, materialize

_ASK, _COPY = "relax_hetero_may_use_tiles", "relax_hetero_copy_64"

# The system call is arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of Linux on x86-64, which returns zero where it
# grants; the answer is 1 or 2 after the first question.
LLVM_TEXT = f"""
@relax_hetero_tiles_answer = internal global i32 0
define i32 @{_ASK}() {{
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


def may_use_tiles() -> Expr:
    """Return whether the operating system lets the process use tiles; asks at first."""
    return tirx.EQ(tirx.call_extern("int32", _ASK), tirx.const(1, "int32"))


def tiles_or_vectors(by_tiles: Callable[[], None], by_vectors: Callable[[], None], enough: Expr = True) -> None:
    """Write both ways of a kernel; a run goes by tiles if `enough` holds and the process may use them."""
    allowed = may_use_tiles()
    either(allowed if enough is True else tirx.And(enough, allowed), by_tiles, by_vectors)


def _emit(name: str, *args: Expr) -> None:
    T.evaluate(tirx.call_llvm_intrin("void", name, *args))


def configure(rows: list[Expr], widths: list[int] | None = None) -> None:
    """Give each of the eight tiles its rows, and the bytes of a row (None: 64); Intel SDM, LDTILECFG, palette 1."""
    words = T.alloc_buffer((16,), "int32", scope="global")
    counts = [tirx.Cast("int32", r) if isinstance(r, tirx.Expr) else tirx.const(r, "int32") for r in rows]

    def four(first: int) -> Expr:
        word = counts[first]
        for i in range(1, 4):
            word = tirx.bitwise_or(word, tirx.shift_left(counts[first + i], tirx.const(8 * i, "int32")))
        return word

    sizes = widths or [TILE_BYTES] * 8
    pairs = [tirx.const(high << 16 | low, "int32") for low, high in zip(sizes[::2], sizes[1::2], strict=True)]
    zero = tirx.const(0, "int32")
    for i, word in enumerate([tirx.const(1, "int32"), *[zero] * 3, *pairs, *[zero] * 4, four(0), four(4), zero, zero]):
        T.buffer_store(words, word, [i])
    _emit("llvm.x86.ldtilecfg", T.address_of(words[0]))


def release() -> None:
    """Give the tiles back: what is switched between threads becomes less."""
    _emit("llvm.x86.tilerelease")


def clear(tile: int) -> None:
    """Fill a tile with zeros."""
    _emit("llvm.x86.tilezero", T.int8(tile))


def load(tile: int, address: Expr, stride: Expr, streamed: bool = False) -> None:
    """Fill a tile with rows `stride` bytes apart; `streamed` ones do not drive others out of the first-level cache."""
    name = "llvm.x86.tileloaddt164" if streamed else "llvm.x86.tileloadd64"
    _emit(name, T.int8(tile), address, int64(stride))


def store(tile: int, address: Expr, stride: Expr) -> None:
    """Write a tile's rows `stride` bytes apart."""
    _emit("llvm.x86.tilestored64", T.int8(tile), address, int64(stride))


def multiply(instruction: AmxInstruction, sums: int, left: int, right: int) -> None:
    """Add the product of two tiles to a third."""
    _emit(instruction.instruction, T.int8(sums), T.int8(left), T.int8(right))


def fetch(address: Expr) -> None:
    """Ask for a cache line, into the second-level cache."""
    read, level, data = tirx.const(0, "int32"), tirx.const(2, "int32"), tirx.const(1, "int32")
    _emit("llvm.prefetch", address, read, level, data)


def copy_line(source: Expr, target: Expr, count: int = TILE_BYTES) -> None:
    """Copy `count` bytes between addresses.

    The others of the target's 64 become zero, those of the source are not touched.
    """
    mask = -1 if count >= TILE_BYTES else (1 << count) - 1
    T.evaluate(tirx.call_extern("void", _COPY, source, target, T.int64(mask)))


def scratch(size: int, dtype: str) -> Any:
    """Memory of a task that tiles are loaded from and stored to.

    TVM cuts an allocation down to the elements that it sees touched, which the rows of a tile are not: its ends are.
    """
    memory = T.alloc_buffer((size,), dtype, scope="global")
    for end in (0, size - 1):
        T.buffer_store(memory, tirx.const(0, dtype), [end])
    return memory


def address(memory: Any, at: Expr) -> Expr:
    """Address of an element of a buffer in one dimension."""
    return T.address_of(memory[at])


class WaitingRows:
    """Rows of sums that wait in memory of a task, to be finished between the steps of the products behind them.

    Attributes
    ----------
    place : Buffer
        Where the rows are to go, as the kernel's own numbers.
    """

    def __init__(self, numbers: int) -> None:
        self._range = T.alloc_buffer((2,), "int64", scope="global")  # the next row to finish, and the end
        self.place = T.alloc_buffer((numbers,), "int64", scope="global")
        for slot in (0, 1):
            T.buffer_store(self._range, tirx.const(0, "int64"), [slot])

    def put(self, begin: Expr, end: Expr, place: Sequence[Expr]) -> None:
        """Let rows wait; those before are finished."""
        for buffer, numbers in ((self._range, (begin, end)), (self.place, place)):
            for slot, number in enumerate(numbers):
                T.buffer_store(buffer, int64(number), [slot])

    def finish(self, finish_row: Callable[[Expr], None], most: int | None = None) -> None:
        """Finish rows, each by code that `finish_row` writes, at most so many (None: all)."""
        next_row = materialize(self._range[0])
        left = self._range[1] - next_row
        count = materialize(left if most is None else T.min(left, int64(most)))
        with loop(count) as r:
            finish_row(materialize(next_row + r))
        T.buffer_store(self._range, next_row + count, [0])
