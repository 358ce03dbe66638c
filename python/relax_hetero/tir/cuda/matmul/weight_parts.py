"""Scales, zero points and factors of block-quantized weights, as a lane of tensor cores loads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import Operand, QuantizedMatmulProblem
from ....target.element_types import bytes_of
from ...core.builder import Expr


@dataclass(frozen=True)
class Part:
    """Scales, zero points or factors of the weights: a few numbers of a lane for each unit of k."""

    dtype: str
    width: int  # numbers of a lane: of its two columns, perhaps scales and then minimums
    unit: int  # extent of k that shares them
    units: int  # number of units of a column

    @staticmethod
    def of(operand: Operand, unit: int) -> Part:
        """Part that an operand of a problem stores."""
        _, units, _, width = operand.shape
        assert isinstance(units, int) and isinstance(width, int), "sizes of weights are known"
        return Part(operand.dtype, width, unit, units)

    @property
    def lane_bytes(self) -> int:
        """Bytes of a lane."""
        return self.width * bytes_of(self.dtype)

    @property
    def unit_bytes(self) -> int:
        """Bytes of 16 columns."""
        return 8 * self.lane_bytes

    @property
    def words(self) -> int:
        """Registers of a lane."""
        return max(1, self.lane_bytes // 4)

    @property
    def word_type(self) -> str:
        """Type of a register."""
        return "uint32" if self.lane_bytes > 2 else "uint16"

    @property
    def load_type(self) -> str:
        """Type of a load, as PTX names it."""
        return f"u{self.word_type[4:]}"

    def number(self, words: Any, first: int, index: int) -> Expr:
        """Number `index` of a lane whose registers begin at `first`."""
        size = bytes_of(self.dtype)
        if size == 4:
            return T.reinterpret(self.dtype, words[first + index])
        per_word = 4 // size if self.word_type == "uint32" else 2
        word, shift = words[first + index // per_word], 8 * size * (index % per_word)
        kind, mask = f"uint{8 * size}", tirx.const((1 << 8 * size) - 1, self.word_type)
        bits = T.Cast(kind, (word >> tirx.const(shift, self.word_type)) & mask)
        return bits if self.dtype == kind else T.reinterpret(self.dtype, bits)


def parts_of(problem: QuantizedMatmulProblem) -> list[Part]:
    """The parts of a problem: scales, and zero points or factors."""
    block, form = problem.block, problem.form
    units = [block, form.superblock_size if form is not None and has_factors(problem) else block]
    return [Part.of(operand, unit) for operand, unit in zip(problem.weights[1:], units, strict=False)]


def has_factors(problem: QuantizedMatmulProblem) -> bool:
    """Return whether scales are integers, multiplied by factors of superblocks."""
    return problem.form is not None and problem.form.scale == "int8"


def point_registers(problem: QuantizedMatmulProblem) -> int:
    """Registers of a scale's zero points: 0, 1, or 2 if they are arbitrary numbers."""
    if problem.form is not None:
        return 2 if problem.form.minimum else 0
    return 0 if len(problem.weights) < 3 else 2 if problem.weights[2].dtype == "float32" else 1
