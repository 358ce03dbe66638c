"""Table of AMX instructions, by element types.

A tile register holds up to 16 rows of 64 bytes. One instruction multiplies a tile of the left operand, with rows along
m, by a tile of the right operand, whose rows are groups of k0 consecutive k of 16 columns, and adds to a tile of 16
columns of sums. The right operand is packed as for vector instructions (`dot_instructions`), so that both can read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cpu_target import CpuTarget
from .element_types import stored_type

TILE_ROWS = 16  # maximum number of rows of a tile register
TILE_BYTES = 64  # bytes of a row of a tile register


@dataclass(frozen=True)
class AmxInstruction:
    """An instruction that multiplies two tile registers and adds the product to a third."""

    features: tuple[str, ...]  # required LLVM features
    types: tuple[str, str, str]  # element types of left operand, right operand and accumulator
    instruction: str  # LLVM intrinsic; its operands are the numbers of the tiles of sums, left and right factors
    k0: int  # number of k values of a group
    # Minimum number of rows of a product. With fewer rows vector instructions read the right operand as fast (measured
    # with 768x768 on one core of an Emerald Rapids).
    min_rows: int
    rate: int  # throughput relative to float32 vector instructions, over a whole product


_BYTES = ("amx-tile", "amx-int8")

# Source: Intel SDM vol. 2 (TDPBF16PS, TDPBUSD, TDPBSSD, TDPBSUD, TDPBUUD).
AMX_INSTRUCTIONS: tuple[AmxInstruction, ...] = (
    AmxInstruction(
        ("amx-tile", "amx-bf16"), ("bfloat16", "bfloat16", "float32"), "llvm.x86.tdpbf16ps", k0=2, min_rows=2, rate=6
    ),
    AmxInstruction(_BYTES, ("uint8", "int8", "int32"), "llvm.x86.tdpbusd", k0=4, min_rows=4, rate=12),
    AmxInstruction(_BYTES, ("int8", "int8", "int32"), "llvm.x86.tdpbssd", k0=4, min_rows=4, rate=12),
    AmxInstruction(_BYTES, ("int8", "uint8", "int32"), "llvm.x86.tdpbsud", k0=4, min_rows=4, rate=12),
    AmxInstruction(_BYTES, ("uint8", "uint8", "int32"), "llvm.x86.tdpbuud", k0=4, min_rows=4, rate=12),
)


def amx_instruction_for(cpu: CpuTarget, lhs_dtype: str, rhs_dtype: str, acc_dtype: str) -> AmxInstruction | None:
    """The CPU's AMX instruction for these types, or None."""
    types = (stored_type(lhs_dtype), stored_type(rhs_dtype), acc_dtype)
    for instruction in AMX_INSTRUCTIONS:
        if instruction.types == types and cpu.features.issuperset(instruction.features):
            return instruction
    return None
