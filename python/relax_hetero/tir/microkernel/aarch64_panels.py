"""The micro-kernel of AArch64 in assembly: a tile of products from packed panels of both operands.

NEON and SVE multiply a vector by one element of another register. If both operands are packed, the factors of a k-step
are contiguous. LLVM neither loads four registers of NEON at once nor keeps to 32 registers when it moves loads ahead of
their use, so the loop is written as assembly: registers 0 to 3 hold left factors, 4 to 7 right ones, 8 to 31 the
accumulators of 12 rows by two vectors of columns.

With NEON, one load fetches up to four registers: 24 products of a step need 1.25 loads (2.5 for matrix instructions,
whose left factors are pairs of rows). SVE has no such loads, and its left factors are 16 bytes that a load repeats in
all of a vector, whose 16-byte segments each multiply by an element of their own: 24 products need 5 loads, or 10 for
matrix instructions, but each does the work of two or four.

Panels are ``[step, row, k0]`` and ``[step, column, k0]``, of whole steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ...target.cpu_target import WIDE_SVE
from ...target.dot_instructions import DotInstruction
from ...target.element_types import bytes_of

SEGMENT_BYTES = 16
"""Bytes of a register of NEON, and of the segments of a vector of SVE that matrix instructions multiply by."""

_LEFT, _RIGHT, _SUMS, _LIST = 0, 4, 8, 4  # first registers of each kind; registers of a panel
_LEFT_OFFSETS = range(-128, 128, SEGMENT_BYTES)  # those that a load of repeated bytes of SVE can have


@dataclass(frozen=True)
class PanelStep:
    """The products of a k-step between a register of left factors and the right factors."""

    # The instruction: ``{acc}``, ``{left}``, ``{right}`` are numbers of registers, ``{lane}`` of a left factor.
    code: str
    # The instruction for the second vector of columns, if both read one register: its upper half in NEON, its odd
    # elements in SVE.
    high: str = ""


_DOTS, _MATRIX = ("sdot", "udot"), ("smmla", "ummla", "usmmla")

NEON_STEPS: dict[str, PanelStep] = {
    "fma": PanelStep("fmla v{acc}.4s, v{right}.4s, v{left}.s[{lane}]"),
    "mla": PanelStep("mla v{acc}.4s, v{right}.4s, v{left}.s[{lane}]"),
    "fmlal": PanelStep(
        "fmlal v{acc}.4s, v{right}.4h, v{left}.h[{lane}]", "fmlal2 v{acc}.4s, v{right}.4h, v{left}.h[{lane}]"
    ),
    **{name: PanelStep(name + " v{acc}.4s, v{right}.16b, v{left}.4b[{lane}]") for name in _DOTS},
    **{name: PanelStep(name + " v{acc}.4s, v{left}.16b, v{right}.16b") for name in _MATRIX},
    "bfmmla": PanelStep("bfmmla v{acc}.4s, v{left}.8h, v{right}.8h"),
}
"""Steps by `DotInstruction.name`."""

SVE_STEPS: dict[str, PanelStep] = {
    "fma": PanelStep("fmla z{acc}.s, z{right}.s, z{left}.s[{lane}]"),
    "mla": PanelStep("mla z{acc}.s, z{right}.s, z{left}.s[{lane}]"),
    "fmlal": PanelStep(
        "fmlalb z{acc}.s, z{right}.h, z{left}.h[{lane}]", "fmlalt z{acc}.s, z{right}.h, z{left}.h[{lane}]"
    ),
    **{name: PanelStep(name + " z{acc}.s, z{right}.b, z{left}.b[{lane}]") for name in _DOTS},
    **{name: PanelStep(name + " z{acc}.s, z{left}.b, z{right}.b") for name in _MATRIX},
    "bfmmla": PanelStep("bfmmla z{acc}.s, z{left}.h, z{right}.h"),
}
"""Steps by `DotInstruction.name`."""


def has_neon_step(dot: DotInstruction) -> bool:
    """Return whether an instruction of NEON multiplies panels, for accumulators of 32 bits."""
    return (
        dot.name in NEON_STEPS
        and "neon" in dot.isas
        and WIDE_SVE not in dot.features
        and bytes_of(dot.types[2]) == bytes_of("float32")
    )


def group_bytes(dot: DotInstruction) -> int:
    """Bytes of the k0 factors of a row or a column."""
    return dot.k0 * bytes_of(dot.types[0])


@dataclass(frozen=True)
class PanelKernel:
    """The function that adds the products of two panels to accumulators in memory, with NEON.

    Accumulators are segments in the order of `segment`.
    """

    dot: DotInstruction
    rows: int  # rows that are multiplied
    panel_rows: int  # rows of the left panel, a multiple of 4
    vector_bytes: int = SEGMENT_BYTES  # bytes of a vector register

    _prologue: ClassVar[tuple[str, ...]] = ()
    _clobbers: ClassVar[tuple[str, ...]] = tuple(f"v{number}" for number in range(32))

    @property
    def name(self) -> str:
        """Name of the function: ``void (accumulators, left, right, int64 steps)``."""
        dot = f"{self.dot.name}{'_swapped' * self.dot.swapped}"
        return f"relax_hetero_{dot}_{8 * self.vector_bytes}_{self.rows}_of_{self.panel_rows}"

    @property
    def columns(self) -> int:
        """Columns of a tile: two vectors of accumulators."""
        return 2 * self._lanes

    def segment(self, row: int, j: int) -> int:
        """Number of the segment with columns 4j to 4j + 3 of a row, or of a block of two rows and two columns.

        Of a matrix instruction, row ``2 * i + block`` has blocks of rows 2i and 2i + 1, and of columns 4j + 2 * block.
        """
        group, block = divmod(row, self.dot.rows)
        return (group * self.columns // 4 + j) * self.dot.rows + block

    @property
    def _lanes(self) -> int:
        return self.vector_bytes // bytes_of(self.dot.types[2])

    @property
    def _unit(self) -> int:
        """Steps whose factors fill registers: loads of four, as far as `panel_rows` allows."""
        return max(2, SEGMENT_BYTES // group_bytes(self.dot))

    @property
    def _unrolled(self) -> int:
        """Steps of an iteration of the main loop: enough for its counter and jump not to count."""
        return 16 if self.rows == 12 and self.dot.rows > 1 else 8

    def text(self) -> str:
        """The function in LLVM IR."""
        main = [line for _ in range(self._unrolled // self._unit) for line in self._steps(self._unit)]
        lines = [
            *self._prologue,
            *self._sums("ld"),
            "cbz $2, 2f",
            "1:",
            *main,
            "subs $2, $2, #1",
            "b.ne 1b",
            "2:",
            "cbz $3, 4f",
            "3:",
            *self._steps(1),
            "subs $3, $3, #1",
            "b.ne 3b",
            "4:",
            *self._sums("st"),
        ]
        outputs, inputs = ["=&r"] * 4, ["r", "0", "1", "2", "3"]
        constraints = ",".join([*outputs, *inputs, *(f"~{{{name}}}" for name in ("cc", "memory", *self._clobbers))])
        code = "\\0A".join(lines)
        return f"""
define void @{self.name}(ptr %c, ptr %a, ptr %b, i64 %steps) {{
  %main = udiv i64 %steps, {self._unrolled}
  %rest = urem i64 %steps, {self._unrolled}
  %r = call {{ ptr, ptr, i64, i64 }} asm sideeffect "{code}", "{constraints}"(
    ptr %c, ptr %a, ptr %b, i64 %main, i64 %rest)
  ret void
}}
"""

    def _sums(self, move: str) -> Iterator[str]:
        """The loads ("ld") or stores ("st") of the accumulators."""
        for number in range(0, self.dot.whole_rows(self.rows) * 2, 2):
            acc = _SUMS + number
            yield f"{move}p q{acc}, q{acc + 1}, [$4, #{SEGMENT_BYTES * number}]"

    def _streams(self, left_size: int, right_size: int) -> tuple[_Stream, _Stream]:
        """The panels, of which so many bytes are read."""
        return _NeonStream("$0", _LEFT, left_size), _NeonStream("$1", _RIGHT, right_size)

    def _step(self) -> PanelStep:
        return NEON_STEPS[self.dot.name]

    def _steps(self, count: int) -> Iterator[str]:
        """The instructions of `count` steps: each register is loaded right before its first use."""
        group, rows = group_bytes(self.dot), self.dot.rows
        left, right = self._streams(count * self.panel_rows * group, count * self.columns * group)
        step = self._step()
        for number in range(count):
            for row in range(0, self.dot.whole_rows(self.rows), rows):
                left_byte = (number * self.panel_rows + row) * group
                # A register of a matrix instruction's accumulators has half the columns of others.
                for vector in range(2 * rows):
                    right_byte = (number * self.columns + vector * self._lanes // rows) * group
                    factors = {"left": left.register(left_byte), "right": right.register(right_byte)}
                    yield from left.lines()
                    yield from right.lines()
                    if self.dot.swapped:
                        factors = {"left": factors["right"], "right": factors["left"]}
                    is_high = right_byte % self.vector_bytes > 0 and step.high
                    lane = left_byte % SEGMENT_BYTES // group
                    code = step.high if is_high else step.code
                    yield code.format(acc=_SUMS + row * 2 + vector, lane=lane, **factors)
        for stream in (left, right):
            stream.finish()
            yield from stream.lines()


class _Stream(ABC):
    """A panel that is read from its beginning to its end, by four registers in turn."""

    def __init__(
        self,
        pointer: str,  # operand of the assembly that holds the address, which is advanced
        first: int,  # first of the four registers
        size: int,  # bytes to read
        register_bytes: int = SEGMENT_BYTES,  # bytes that a register holds
    ) -> None:
        self._pointer, self._first, self._size, self._register_bytes = pointer, first, size, register_bytes
        self._loaded = 0
        self._lines: list[str] = []

    def register(self, byte: int) -> int:
        """The register that holds a byte; loads that it needs are added to `lines`."""
        while self._loaded <= byte:
            self._lines += self._load(self._number(self._loaded), self._size - self._loaded)
        return self._number(byte)

    def _number(self, byte: int) -> int:
        return self._first + byte // self._register_bytes % _LIST

    def lines(self) -> list[str]:
        """The instructions that were added since the last call."""
        lines, self._lines = self._lines, []
        return lines

    @abstractmethod
    def finish(self) -> None:
        """Advance the pointer to the end: a panel's rows after the last one are skipped."""

    @abstractmethod
    def _load(self, register: int, remaining: int) -> list[str]:
        """The instructions that load the next bytes; advances `_loaded`."""


class _NeonStream(_Stream):
    """Up to four registers at a time, by loads that advance the pointer."""

    def _load(self, register: int, remaining: int) -> list[str]:
        registers = min(_LIST, remaining // SEGMENT_BYTES)
        if registers:
            size = registers * SEGMENT_BYTES
            names = ", ".join(f"v{register + number}.16b" for number in range(registers))
            load = f"ld1 {{ {names} }}, [{self._pointer}], #{size}"
        else:
            size = remaining
            load = f"ldr {'d' if size == 8 else 's'}{register}, [{self._pointer}], #{size}"
        self._loaded += size
        return [load]

    def finish(self) -> None:
        self.register(self._size - 1)


class _VectorStream(_Stream):
    """One vector of SVE at a time."""

    def _load(self, register: int, remaining: int) -> list[str]:
        number = self._loaded // self._register_bytes
        self._loaded += self._register_bytes
        return [f"ldr z{register}, [{self._pointer}, #{number}, mul vl]"]

    def finish(self) -> None:
        self._lines.append(f"add {self._pointer}, {self._pointer}, #{self._size}")


class _RepeatedStream(_Stream):
    """16 bytes at a time, repeated in all of a vector of SVE; the pointer is ahead by 128 bytes, for more offsets."""

    _advanced = 0

    def _load(self, register: int, remaining: int) -> list[str]:
        lines = []
        if self._loaded - self._advanced == len(_LEFT_OFFSETS) * SEGMENT_BYTES:
            lines = self._advance(self._loaded)
        offset = self._loaded - self._advanced + _LEFT_OFFSETS[0]
        predicate = "p0" if remaining >= SEGMENT_BYTES else "p1"
        self._loaded += min(SEGMENT_BYTES, remaining)
        return [*lines, f"ld1rqb {{ z{register}.b }}, {predicate}/z, [{self._pointer}, #{offset}]"]

    def _advance(self, byte: int) -> list[str]:
        size, self._advanced = byte - self._advanced, byte
        return [f"add {self._pointer}, {self._pointer}, #{size}"]

    def finish(self) -> None:
        self._lines += self._advance(self._size)


@dataclass(frozen=True)
class SvePanelKernel(PanelKernel):
    """The same with vectors of SVE, whose length is fixed. Predicate p0 is true, p1 for 8 bytes."""

    _prologue = ("ptrue p0.b", "ptrue p1.b, vl8", f"add $0, $0, #{-_LEFT_OFFSETS[0]}")
    _clobbers = (*(f"z{number}" for number in range(32)), "p0", "p1")

    @property
    def _unit(self) -> int:
        return self._unrolled

    @property
    def _unrolled(self) -> int:
        return 8 if self.dot.rows > 1 else 16

    def _sums(self, move: str) -> Iterator[str]:
        is_interleaved = bool(self._step().high)
        for number in range(0, self.dot.whole_rows(self.rows) * 2, 2):
            accs = (_SUMS + number, _SUMS + number + 1)
            registers = (0, 1) if is_interleaved else accs
            moves = [f"{move}r z{register}, [$4, #{number + i}, mul vl]" for i, register in enumerate(registers)]
            if is_interleaved and move == "ld":
                yield from (*moves, *(f"uzp{i + 1} z{acc}.s, z0.s, z1.s" for i, acc in enumerate(accs)))
            elif is_interleaved:
                yield from (*(f"zip{i + 1} z{i}.s, z{accs[0]}.s, z{accs[1]}.s" for i in range(2)), *moves)
            else:
                yield from moves

    def _streams(self, left_size: int, right_size: int) -> tuple[_Stream, _Stream]:
        return _RepeatedStream("$0", _LEFT, left_size), _VectorStream("$1", _RIGHT, right_size, self.vector_bytes)

    def _step(self) -> PanelStep:
        return SVE_STEPS[self.dot.name]
