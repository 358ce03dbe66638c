"""Table of the instructions by which CPUs multiply each pair of element types.

A row describes the instruction of a k-step. A step takes `k0` consecutive k of one row of the left operand (broadcast
to all lanes) and `k0` consecutive k of one column per lane of the right operand, and adds their products to one
accumulator per lane. The first matching row counts. To add an instruction, add a row;
`relax_hetero.tir.microkernel.k_step` implements the values of `form`.

A byte dot product requires one signed and one unsigned operand, or equal signedness. If the left operand's signedness
is wrong, its top bit is flipped: int8 becomes uint8 plus 128, uint8 becomes int8 minus 128. The right operand's layout
then contains -128 times every column's sum (`PackedLayout.compensation`), which, times `DotInstruction.compensation`,
initializes the accumulators.

AVX512-FP16 multiplies and adds float16 twice as fast as AVX-512 does float32, but accumulates in float16. Such a row
accumulates a few steps in float16 (`DotInstruction.short`), and these partial sums in float32
(`relax_hetero.tir.microkernel.fp16_partial_sums`). Its steps take a pair of k per lane, because broadcasting a pair
from memory as a 32-bit word is free, while broadcasting a 16-bit element costs a shuffle.

Matrix instructions of AArch64 (`DotInstruction.rows`) multiply two rows of the left operand by two columns of the right
operand, eight bytes each, which is twice the work of a dot product. They support all four pairs of signs. A product of
one row computes that row twice, which is no slower than dot products of twice the steps.

Where AArch64 multiplies packed panels of both operands (`relax_hetero.tir.microkernel.aarch64_panels`), the instruction
is written with one element of the left operand's register instead of a broadcast, and may be that of SVE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .cpu_target import QUICK_BF16, WIDE_SVE, CpuTarget
from .element_types import bytes_of, stored_type


@dataclass(frozen=True)
class DotInstruction:
    """The instruction of a k-step."""

    name: str  # short name for kernel names and ``explain``: "fma", "vnni", "sdot"
    isas: tuple[str, ...]  # names of the `InstructionSet` rows that include it
    features: tuple[str, ...]  # required features besides the row's
    types: tuple[str, str, str]  # element types of left operand, right operand and accumulator
    form: str  # key of `relax_hetero.tir.microkernel.k_step.FORMS`, which emits the code
    k0: int = 1  # number of k values of a step; the right operand is packed with innermost tiles of k0 along k
    instruction: str = ""  # LLVM intrinsic, if the form uses one
    swapped: bool = False  # whether the right operand is the instruction's first factor
    flip: bool = False  # whether the top bit of every byte of the left operand is flipped
    # Factor of the layout's compensation block in the initial accumulators: 1, -1, or 0 for layouts without one. K=0
    # has a block of zeros.
    compensation: int = 0
    # Vector registers that a step needs besides the accumulators, the right factors and one left factor, with two
    # vectors of columns; CPUs with few registers use fewer rows because of them.
    temporaries: int = 0
    # Number of steps of a partial sum in the operands' own type; 0 if every step adds to the accumulators.
    # `widened_instruction` is the same step without partial sums.
    short: int = 0
    # Rows of the left operand that a step multiplies: 1, or 2 for matrix instructions, whose accumulators hold blocks
    # of two rows and two columns.
    rows: int = 1

    def whole_rows(self, rows: int) -> int:
        """`rows` rounded up to a multiple of the rows of a step."""
        return -(-rows // self.rows) * self.rows


_VECTOR = ("avx512", "avx2", "sse", "neon")
_ANY = (*_VECTOR, "generic")

FLOAT32_FMA = DotInstruction("fma", _ANY, (), ("float32",) * 3, "fma")  # multiply-adds of float32, which every CPU has
INT32_MLA = DotInstruction("mla", _ANY, (), ("int32",) * 3, "fma", temporaries=2)  # multiply-adds of int32

_U8S8 = ("uint8", "int8", "int32")
_S8S8 = ("int8", "int8", "int32")
_S8U8 = ("int8", "uint8", "int32")
_U8U8 = ("uint8", "uint8", "int32")
_S16S8 = ("int16", "int8", "int32")
_BYTES = (_U8S8, _S8S8, _S8U8, _U8U8)
_BF16 = ("bfloat16", "bfloat16", "float32")
_F16 = ("float16", "float16", "float32")


def _unsigned_by_signed(name: str, isa: str, features: tuple[str, ...], instruction: str) -> tuple[DotInstruction, ...]:
    """Rows of a dot product whose first factor is unsigned and whose second is signed (x86 VNNI)."""
    return (
        DotInstruction(name, (isa,), features, _U8S8, "dot", 4, instruction),
        DotInstruction(name, (isa,), features, _S8S8, "dot", 4, instruction, flip=True, compensation=1),
        DotInstruction(name, (isa,), features, _S8U8, "dot", 4, instruction, swapped=True),
        DotInstruction(name, (isa,), features, _U8U8, "dot", 4, instruction, swapped=True, flip=True, compensation=-1),
    )


_SDOT, _UDOT, _SMMLA, _UMMLA, _USMMLA = (
    f"llvm.aarch64.neon.{name}.v4i32.v16i8" for name in ("sdot", "udot", "smmla", "ummla", "usmmla")
)
_PMADDWD = {
    "avx512": "llvm.x86.avx512.pmaddw.d.512",
    "avx2": "llvm.x86.avx2.pmadd.wd",
    "sse": "llvm.x86.sse2.pmadd.wd",
}
_MADDUBS_SSE = "llvm.x86.ssse3.pmadd.ub.sw.128"
_BFMMLA = "llvm.aarch64.neon.bfmmla"
_I8MM = (("neon",), ("i8mm",))
_A64FX = (("neon",), (WIDE_SVE,))

# Sources: Intel SDM vol. 2 (VPDPBUSD, VDPBF16PS, PMADDWD, VCVTPH2PS); Arm ARM (SDOT, UDOT, BFDOT, SMMLA, UMMLA, USMMLA,
# BFMMLA).
DOT_INSTRUCTIONS: tuple[DotInstruction, ...] = (
    FLOAT32_FMA,
    DotInstruction("fma", _ANY, (), ("float64",) * 3, "fma"),
    INT32_MLA,
    replace(INT32_MLA, types=("uint32",) * 3),
    DotInstruction("mla", _ANY, (), ("int64",) * 3, "fma", temporaries=7),
    # bytes
    *_unsigned_by_signed("vnni", "avx512", ("avx512vnni",), "llvm.x86.avx512.vpdpbusd.512"),
    *_unsigned_by_signed("avxvnni", "avx2", ("avxvnni",), "llvm.x86.avx512.vpdpbusd.256"),
    *(
        DotInstruction("pmaddwd", (isa,), (), t, "i16_pairs", 4, instruction, temporaries=6 if isa == "avx2" else 5)
        for isa, instruction in _PMADDWD.items()
        for t in _BYTES
    ),
    *(
        DotInstruction("pmaddwd", (isa,), (), _S16S8, "i16_words", 2, instruction, temporaries=1)
        for isa, instruction in _PMADDWD.items()
    ),
    DotInstruction("smmla", *_I8MM, _S8S8, "blocks", 8, _SMMLA, temporaries=2, rows=2),
    DotInstruction("ummla", *_I8MM, _U8U8, "blocks", 8, _UMMLA, temporaries=2, rows=2),
    DotInstruction("usmmla", *_I8MM, _U8S8, "blocks", 8, _USMMLA, temporaries=2, rows=2),
    DotInstruction("usmmla", *_I8MM, _S8U8, "blocks", 8, _USMMLA, swapped=True, temporaries=2, rows=2),
    DotInstruction("sdot", ("neon",), ("dotprod",), _S8S8, "dot", 4, _SDOT),
    DotInstruction("udot", ("neon",), ("dotprod",), _U8U8, "dot", 4, _UDOT),
    DotInstruction("sdot", ("neon",), ("dotprod",), _U8S8, "dot", 4, _SDOT, flip=True, compensation=-1),
    DotInstruction("udot", ("neon",), ("dotprod",), _S8U8, "dot", 4, _UDOT, flip=True, compensation=1),
    # An A64FX has dot products of SVE only: those of packed panels.
    DotInstruction("sdot", *_A64FX, _S8S8, "i32_bytes", 4, temporaries=5),
    DotInstruction("udot", *_A64FX, _U8U8, "i32_bytes", 4, temporaries=5),
    DotInstruction("sdot", *_A64FX, _U8S8, "i32_bytes", 4, flip=True, compensation=-1, temporaries=5),
    DotInstruction("udot", *_A64FX, _S8U8, "i32_bytes", 4, flip=True, compensation=1, temporaries=5),
    *(DotInstruction("mla", ("neon",), (), t, "i32_bytes", 4, temporaries=5) for t in _BYTES),
    *(DotInstruction("fma", ("generic",), (), t, "fma") for t in (*_BYTES, _S16S8)),
    # halves
    DotInstruction("dpbf16", ("avx512",), (QUICK_BF16,), _BF16, "bf16_dot", 2, "llvm.x86.avx512bf16.dpbf16ps.512"),
    DotInstruction("bfmmla", ("neon",), ("bf16",), _BF16, "bf16_blocks", 4, _BFMMLA, temporaries=2, rows=2),
    DotInstruction("bfdot", ("neon",), ("bf16",), _BF16, "bf16_dot", 2, "llvm.aarch64.neon.bfdot.v4f32.v8bf16"),
    DotInstruction("bf16", _VECTOR, (), _BF16, "bf16_pairs", 2, temporaries=6),
    DotInstruction("fma", ("generic",), (), _BF16, "fma"),
    DotInstruction("fmaph", ("avx512",), ("avx512fp16",), _F16, "f16_sums", 2, short=16),
    DotInstruction("fmlal", ("neon",), ("fp16fml",), _F16, "f16_fma", temporaries=2),
    DotInstruction("cvtph", ("avx512", "avx2", "neon"), (), _F16, "f16_fma", temporaries=2),
    DotInstruction("f16", ("sse", "generic"), (), _F16, "f16_bits", temporaries=7),
)


SMALL_CODE_INSTRUCTIONS: tuple[DotInstruction, ...] = (
    DotInstruction("maddubs", ("avx2",), (), _S8U8, "int16_sums", 4, "llvm.x86.avx2.pmadd.ub.sw", swapped=True),
    DotInstruction("maddubs", ("sse",), ("ssse3",), _S8U8, "int16_sums", 4, _MADDUBS_SSE, swapped=True),
)
"""Products of bytes whose pairs are added in int16 (Intel SDM: VPMADDUBSW), for unsigned factors of few bits."""

ADD_INT16_PAIRS = {8: _PMADDWD["avx2"], 4: _PMADDWD["sse"]}
"""Products of int16 whose pairs are added in int32 (PMADDWD), by lanes of int32."""


SIGN_INSTRUCTIONS: tuple[DotInstruction, ...] = (
    DotInstruction("psignb", ("avx2",), (), _S8S8, "sign_dot", 4, "llvm.x86.avx2.pmadd.ub.sw"),
    DotInstruction("psignb", ("sse",), ("ssse3",), _S8S8, "sign_dot", 4, _MADDUBS_SSE),
)
"""Products of signed bytes of which the left ones are not -128: the sign of the right ones moves to the left ones."""

_SIGNED_DOT = DotInstruction("sdot", ("neon",), ("dotprod",), _S8S8, "dot", 4, _SDOT)

MOVE_SIGN = {8: "llvm.x86.avx2.psign.b", 4: "llvm.x86.ssse3.psign.b.128"}
"""Bytes negated where others are negative (PSIGNB), by lanes of int32."""


def int16_steps(max_code: int) -> int:
    """Steps of ``int16_sums`` that cannot overflow, with unsigned factors up to `max_code` and any signed bytes."""
    return (1 << 15) // (2 * 128 * max_code + 1)


def block_dot_instruction(
    cpu: CpuTarget,
    max_code: int,  # largest of the weights as unsigned bytes
    steps: int,  # steps of an unrolled loop body, a multiple of those of a partial sum in int16
    is_one_byte: bool,  # whether an activation is one byte, which is then not -128
) -> DotInstruction | None:
    """The CPU's best instruction for block-quantized weights, or None."""
    dot = dot_instruction_for(cpu, "int8", "uint8", "int32")
    if dot is not None and dot.form == "dot" and cpu.isa.name in ("avx512", "avx2"):
        return dot
    if cpu.features.issuperset(_SIGNED_DOT.features) and cpu.isa.name in _SIGNED_DOT.isas:
        # Bytes up to 127 are the same with a sign.
        return replace(_SIGNED_DOT, types=_S8U8) if max_code < 128 else _SIGNED_DOT
    short = next((count for count in range(min(steps, int16_steps(max_code)), 0, -1) if steps % count == 0), 0)
    for row in SMALL_CODE_INSTRUCTIONS if short else SIGN_INSTRUCTIONS if is_one_byte else ():
        if cpu.isa.name in row.isas and cpu.features.issuperset(row.features):
            return replace(row, short=short)
    return None


def dot_instruction_for(
    cpu: CpuTarget, lhs_dtype: str, rhs_dtype: str, acc_dtype: str, by_rows: bool = False
) -> DotInstruction | None:
    """The CPU's best instruction for these types, or None; `by_rows` excludes steps of several rows."""
    lhs_dtype, rhs_dtype = stored_type(lhs_dtype), stored_type(rhs_dtype)  # tfloat32 permits rounding; no CPU rounds
    for dot in DOT_INSTRUCTIONS:
        if (
            dot.types == (lhs_dtype, rhs_dtype, acc_dtype)
            and cpu.isa.name in dot.isas
            and cpu.features.issuperset(dot.features)
            and not (by_rows and dot.rows > 1)
        ):
            return dot
    return None


def multiplies_int16(cpu: CpuTarget) -> bool:
    """Return whether bytes of a left operand are better stored as int16: the CPU lacks dot products of bytes."""
    dot = dot_instruction_for(cpu, "uint8", "int8", "int32")
    return dot is not None and dot.form == "i16_pairs"


def is_widened_in_panels(dot: DotInstruction) -> bool:
    """Return whether packed panels of AArch64 hold factors in the accumulator's type, since a step converts them."""
    return dot.name in ("cvtph", "bf16") or (dot.form == "i32_bytes" and dot.name == "mla")


def panel_instruction(dot: DotInstruction) -> DotInstruction:
    """The instruction of AArch64 that multiplies packed panels for `dot`."""
    if not is_widened_in_panels(dot):
        return dot
    return INT32_MLA if dot.types[2] == "int32" else FLOAT32_FMA


_SVE_FEATURES = {
    **dict.fromkeys(("fma", "sdot", "udot", "smmla", "ummla", "usmmla", "bfmmla"), "sve"),
    **dict.fromkeys(("mla", "fmlal"), "sve2"),
}
"""Features with which SVE has the instructions of packed panels, for accumulators of 4 bytes."""


def multiplies_by_sve(cpu: CpuTarget, dot: DotInstruction) -> bool:
    """Return whether vectors of SVE, longer than those of NEON, multiply packed panels for `dot`."""
    feature = _SVE_FEATURES.get(panel_instruction(dot).name)
    return cpu.features.issuperset((feature, WIDE_SVE)) and bytes_of(dot.types[2]) == 4


def widened_instruction(dot: DotInstruction) -> DotInstruction:
    """The step for the same operands without float16 partial sums, which adds every product to the accumulators."""
    return replace(dot, name="cvtph", form="f16_pairs", short=0, temporaries=6)
