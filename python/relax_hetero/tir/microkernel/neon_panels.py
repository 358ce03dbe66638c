"""The micro-kernel of AArch64 in assembly: a tile of products from packed panels of both operands.

NEON multiplies a vector by one element of another register. If both operands are packed, the factors of a k-step are
contiguous, and one load fetches up to four registers: 24 products of a step need 1.25 loads (2.5 for matrix
instructions, whose left factors are pairs of rows). LLVM neither forms such loads nor keeps to 32 registers when it
moves them ahead of their use, so the loop is written as assembly: registers 0 to 3 hold left factors, 4 to 7 right
ones, 8 to 31 the accumulators of 12 rows by 8 columns.

Panels are ``[step, row, k0]`` and ``[step, column, k0]``, of whole steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...target.dot_instructions import DotInstruction
from ...target.element_types import bytes_of

COLUMNS = 8
"""Columns of a tile: two vectors of accumulators."""

_REGISTER_BYTES, _LEFT, _RIGHT, _SUMS, _LIST = 16, 0, 4, 8, 4  # first registers of each kind; registers of a load


@dataclass(frozen=True)
class PanelStep:
    """The products of a k-step between a register of left factors and the right factors.

    Attributes
    ----------
    code : str
        The instruction: ``{acc}``, ``{left}``, ``{right}`` are numbers of registers, ``{lane}`` of a left factor.
    high : str
        The instruction for the second vector of columns, if it reads the upper half of the register of the first.
    """

    code: str
    high: str = ""


PANEL_STEPS: dict[str, PanelStep] = {
    "fma": PanelStep("fmla v{acc}.4s, v{right}.4s, v{left}.s[{lane}]"),
    "mla": PanelStep("mla v{acc}.4s, v{right}.4s, v{left}.s[{lane}]"),
    "fmlal": PanelStep(
        "fmlal v{acc}.4s, v{right}.4h, v{left}.h[{lane}]", "fmlal2 v{acc}.4s, v{right}.4h, v{left}.h[{lane}]"
    ),
    **{name: PanelStep(name + " v{acc}.4s, v{right}.16b, v{left}.4b[{lane}]") for name in ("sdot", "udot")},
    **{name: PanelStep(name + " v{acc}.4s, v{left}.16b, v{right}.16b") for name in ("smmla", "ummla", "usmmla")},
    "bfmmla": PanelStep("bfmmla v{acc}.4s, v{left}.8h, v{right}.8h"),
}
"""Steps by `DotInstruction.name`."""


def has_panel_step(dot: DotInstruction) -> bool:
    """Return whether an instruction multiplies panels, for accumulators of 32 bits."""
    return dot.name in PANEL_STEPS and "neon" in dot.isas and bytes_of(dot.types[2]) == 4


def group_bytes(dot: DotInstruction) -> int:
    """Bytes of the k0 factors of a row or a column."""
    return dot.k0 * bytes_of(dot.types[0])


@dataclass(frozen=True)
class PanelKernel:
    """The function that adds the products of two panels to accumulators in memory.

    Attributes
    ----------
    rows : int
        Rows that are multiplied.
    panel_rows : int
        Rows of the left panel, a multiple of 4.
    """

    dot: DotInstruction
    rows: int
    panel_rows: int

    @property
    def name(self) -> str:
        """Name of the function: ``void (accumulators, left, right, int64 steps)``."""
        return f"relax_hetero_{self.dot.name}{'_swapped' * self.dot.swapped}_{self.rows}_of_{self.panel_rows}"

    @property
    def _unit(self) -> int:
        """Steps whose factors fill registers: loads of four, as far as `panel_rows` allows."""
        return max(2, 16 // group_bytes(self.dot))

    @property
    def _unrolled(self) -> int:
        """Steps of an iteration of the main loop: enough for its counter and jump not to count."""
        return 16 if self.rows == 12 and self.dot.rows > 1 else 8

    def text(self) -> str:
        """The function in LLVM IR."""
        main = [line for _ in range(self._unrolled // self._unit) for line in self._steps(self._unit)]
        sums = range(0, self.dot.whole_rows(self.rows) * 2, 2)
        pairs = [(_SUMS + number, 16 * number) for number in sums]
        lines = [
            *(f"ldp q{acc}, q{acc + 1}, [$4, #{offset}]" for acc, offset in pairs),
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
            *(f"stp q{acc}, q{acc + 1}, [$4, #{offset}]" for acc, offset in pairs),
        ]
        constraints = ",".join(
            ["=&r"] * 4 + ["r", "0", "1", "2", "3", "~{cc}", "~{memory}"] + [f"~{{v{number}}}" for number in range(32)]
        )
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

    def _steps(self, count: int) -> Iterator[str]:
        """The instructions of `count` steps: each register is loaded right before its first use."""
        group = group_bytes(self.dot)
        left = _Stream("$0", _LEFT, count * self.panel_rows * group)
        right = _Stream("$1", _RIGHT, count * COLUMNS * group)
        step = PANEL_STEPS[self.dot.name]
        for number in range(count):
            for row in range(0, self.dot.whole_rows(self.rows), self.dot.rows):
                left_byte = (number * self.panel_rows + row) * group
                # Matrix instructions have an accumulator for two columns, others for four.
                for vector in range(2 * self.dot.rows):
                    right_byte = (number * COLUMNS + vector * 4 // self.dot.rows) * group
                    factors = {"left": left.register(left_byte), "right": right.register(right_byte)}
                    yield from left.loads()
                    yield from right.loads()
                    if self.dot.swapped:
                        factors = {"left": factors["right"], "right": factors["left"]}
                    j, block = divmod(vector, self.dot.rows)
                    acc = _SUMS + (row + block) * 2 + j
                    is_high = right_byte % _REGISTER_BYTES > 0 and step.high
                    lane = left_byte % _REGISTER_BYTES // group
                    yield (step.high if is_high else step.code).format(acc=acc, lane=lane, **factors)
        # A panel's rows after the last one are skipped.
        left.register(left.size - 1)
        yield from left.loads()


class _Stream:
    """A panel that is read from its beginning to its end, four registers at a time.

    Parameters
    ----------
    pointer : str
        Operand of the assembly that holds the address, which loads advance.
    first : int
        First of the four registers.
    size : int
        Bytes to read.
    """

    def __init__(self, pointer: str, first: int, size: int) -> None:
        self._pointer, self._first, self.size = pointer, first, size
        self._loaded = 0
        self._lines: list[str] = []

    def register(self, byte: int) -> int:
        """The register that holds a byte; loads that it needs are added to `loads`."""
        while self._loaded <= byte:
            registers = min(_LIST, (self.size - self._loaded) // _REGISTER_BYTES)
            if registers:
                names = ", ".join(f"v{self._first + number}.16b" for number in range(registers))
                self._lines.append(f"ld1 {{ {names} }}, [{self._pointer}], #{registers * _REGISTER_BYTES}")
                self._loaded += registers * _REGISTER_BYTES
            else:
                left = self.size - self._loaded
                number = self._first + self._loaded // _REGISTER_BYTES % _LIST
                self._lines.append(f"ldr {'d' if left == 8 else 's'}{number}, [{self._pointer}], #{left}")
                self._loaded = self.size
        return self._first + byte // _REGISTER_BYTES % _LIST

    def loads(self) -> list[str]:
        """The instructions that were added since the last call."""
        lines, self._lines = self._lines, []
        return lines
