"""TIR of a k-step with each `DotInstruction`.

Operands keep their logical dtype (int8, bfloat16, float16) in buffers and loads; TVM's legalization of bfloat16 turns
such buffers into uint16 and does not change a ``reinterpret`` of a load, so buffers need no aliases. LLVM folds the
broadcast of a reinterpreted four-byte load into one ``vpbroadcastd`` from memory, unaligned.

Use, for one row i and one vector j of columns::

    lhs = lhs_group(dot, A[i, T.ramp(k * k0, 1, k0)])         # or a list of k0 scalars, zeros after K
    rhs = rhs_groups(dot, B[..., T.ramp(j * lanes * k0, 1, lanes * k0)], lanes)
    acc = emit_step(dot, acc, lhs, rhs, lanes)

with the whole body under ``T.attr(0, "pragma_import_llvm", text)`` if `llvm_import` returns a text. A group that ends
after K must have zeros there, not the content of memory: zero times NaN is NaN.

Instructions that multiply two rows (`DotInstruction.rows`) take the groups of both as one left factor. Tiles use, for
all instructions::

    add_step(dot, accs, numbers, rows_group([lhs_group(dot, ...), lhs_group(dot, ...)]), rhs, lanes)

and `deinterleave_rows` when all steps are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import tirx as T

from ...target.dot_instructions import ADD_INT16_PAIRS, MOVE_SIGN, DotInstruction
from ...target.element_types import bytes_of
from ..core.builder import Registers, broadcast, constant, let, vector_type, zeros
from ..math.casts import cast

_FLIP = -0x7F7F7F80  # 0x80808080 as int32
_SHIM = "relax_hetero_bf16_dot"


def lhs_group(dot: DotInstruction, values: Expr | Sequence[Expr]) -> Expr:
    """The k0 left factors of a step as one scalar, which may be bound to a variable.

    `values`: vector of k0 elements (a contiguous load; a scalar if k0 is 1), or k0 scalars, of the left operand's type.
    If k0 is 1, the element in the type that the step takes (float16, or the accumulator's type); else the k0 elements
    as an int32 or int64, the first in the low bits.
    """
    if dot.k0 == 1:
        value = values if isinstance(values, Expr) else values[0]
        return value if dot.form == "f16_fma" else _widen(dot, value, 1)
    word = _group_dtype(dot)
    group: Expr = tirx.const(0, word)
    if isinstance(values, Expr):
        group = tirx.reinterpret(word, values)
    else:
        bits = 8 * bytes_of(dot.types[0])
        for position, value in enumerate(values):
            if isinstance(value, (tirx.IntImm, tirx.FloatImm)) and not value.value:
                continue
            wide = tirx.Cast(word, tirx.reinterpret(f"uint{bits}", value))
            group = tirx.bitwise_or(group, tirx.shift_left(wide, tirx.const(bits * position, word)))
    return _flipped(dot, group, 1)


def lhs_groups(dot: DotInstruction, values: Expr, count: int) -> Expr:
    """The left factors of `count` steps, contiguous elements of a row, in the type of `lhs_group`, before it widens."""
    if dot.k0 == 1:
        return values
    return _flipped(dot, tirx.reinterpret(vector_type(_group_dtype(dot), count), values), count)


def _flipped(dot: DotInstruction, groups: Expr, count: int) -> Expr:
    return tirx.bitwise_xor(groups, constant(_FLIP, "int32", count)) if dot.flip else groups


def rhs_groups(dot: DotInstruction, values: Expr, lanes: int) -> Expr:
    """The right factors of a step, a group for each lane, which may be bound to a variable.

    `values`: ``lanes * k0`` elements of the right operand's type, column after column, the k of a column together.
    `lanes`: lanes of the accumulator's type on the CPU. If k0 is 1, the elements in the accumulator's type; else an
    int32 or int64 for each lane.
    """
    if dot.k0 == 1:
        return _widen(dot, values, lanes)
    if dot.form == "i16_words":
        values = tirx.Cast(vector_type("int16", lanes * dot.k0), values)
    return tirx.reinterpret(vector_type(_group_dtype(dot), lanes), values)


def _group_dtype(dot: DotInstruction) -> str:
    """The integer type with the bits of a group."""
    return f"int{8 * dot.k0 * bytes_of(dot.types[0])}"


def emit_step(
    dot: DotInstruction,
    # `lanes` accumulators: a vector of the accumulator's type, a scalar if lanes is 1; for an instruction with fp16
    # partial sums, `lanes` groups of k0 in the operands' type.
    acc: Expr,
    # lhs, rhs: results of `lhs_group` and `rhs_groups`.
    lhs: Expr,
    rhs: Expr,
    lanes: int,  # lanes of the accumulator's type on the CPU
) -> Expr:
    """The accumulators after one k-step."""
    return FORMS[dot.form](dot, acc, lhs, rhs, lanes)


def rows_group(groups: Sequence[Expr]) -> Expr:
    """The groups of several rows, from `lhs_group`, as one left factor of a step."""
    return groups[0] if len(groups) == 1 else let(T.Shuffle(list(groups), list(range(len(groups)))))


def add_step(dot: DotInstruction, accs: Registers, numbers: Sequence[int], lhs: Expr, rhs: Expr, lanes: int) -> None:
    """Add one k-step to some accumulators.

    `numbers`: numbers of the accumulators of `DotInstruction.rows` rows, for the same columns. `lhs`, `rhs`: results of
    `rows_group` and `rhs_groups`.
    """
    if dot.rows == 1:
        accs[numbers[0]] = emit_step(dot, accs[numbers[0]], lhs, rhs, lanes)
        return
    groups = lanes // len(numbers)
    for block, number in enumerate(numbers):
        columns = T.Shuffle([rhs], list(range(block * groups, (block + 1) * groups)))
        accs[number] = emit_step(dot, accs[number], lhs, columns, lanes)


def deinterleave_rows(dot: DotInstruction, accs: Registers, rows: int, vectors: int) -> None:
    """Reorder accumulators to vectors of rows: number ``i * vectors + j`` is vector j of row i.

    A matrix instruction accumulates blocks of two rows and two columns.
    """
    if dot.rows == 1:
        return
    # Columns come first where the right operand is the instruction's first factor.
    along_row, along_column = (1, 2) if dot.swapped else (2, 1)
    orders = [
        [4 * block + along_row * row + along_column * column for block in range(2) for column in range(2)]
        for row in range(2)
    ]
    for first in range(0, rows, 2):
        for j in range(vectors):
            numbers = (first * vectors + j, (first + 1) * vectors + j)
            blocks = [accs[number] for number in numbers]
            for number, row in zip(numbers, [let(T.Shuffle(blocks, order)) for order in orders], strict=True):
                accs[number] = row


def zero(dot: DotInstruction, lanes: int) -> Expr:
    """`lanes` accumulators of zero."""
    return zeros(dot.types[2], lanes)


def llvm_import(dot: DotInstruction, lanes: int) -> str | None:
    """LLVM IR that a kernel with this product imports, or None.

    The intrinsics of bfloat16 take vectors of LLVM's type ``bfloat``, which TVM's legalization would turn into
    integers; the imported function casts bits.
    """
    if dot.form not in ("bf16_dot", "bf16_blocks"):
        return None
    words = f"<{lanes} x i32>" if dot.form == "bf16_dot" else f"<{lanes // dot.rows} x i64>"
    acc, ints, halves = f"<{lanes} x float>", words, f"<{2 * lanes} x bfloat>"
    return f"""
declare {acc} @{dot.instruction}({acc}, {halves}, {halves})
define {acc} @{_SHIM}({acc} %c, {ints} %a, {ints} %b) {{
  %x = bitcast {ints} %a to {halves}
  %y = bitcast {ints} %b to {halves}
  %r = call {acc} @{dot.instruction}({acc} %c, {halves} %x, {halves} %y)
  ret {acc} %r
}}
"""


def _widen(dot: DotInstruction, values: Expr, lanes: int) -> Expr:
    """Elements of an operand in the accumulator's type."""
    return _decode_float16(values, lanes) if dot.form == "f16_bits" else cast(values, dot.types[2])


def _decode_float16(values: Expr, lanes: int) -> Expr:
    """float16 to float32 on CPUs without the conversion: exponent and fraction are shifted, and scaled by 2^112."""
    floats = vector_type("float32", lanes)
    bits = tirx.Cast(vector_type("uint32", lanes), tirx.reinterpret(vector_type("uint16", lanes), values))
    magnitude = tirx.bitwise_and(bits, constant(0x7FFF, "uint32", lanes))
    sign = tirx.bitwise_and(bits, constant(0x8000, "uint32", lanes))
    shifted = tirx.shift_left(magnitude, constant(13, "uint32", lanes))
    scaled = tirx.reinterpret(floats, shifted) * constant(2.0**112, "float32", lanes)
    # Infinity and NaN keep their fraction and get the maximum exponent.
    special = tirx.bitwise_or(shifted, constant(0x7F800000, "uint32", lanes))
    finite = tirx.reinterpret(vector_type("uint32", lanes), scaled)
    float_bits = tirx.Select(magnitude >= constant(0x7C00, "uint32", lanes), special, finite)
    return tirx.reinterpret(floats, tirx.bitwise_or(float_bits, tirx.shift_left(sign, constant(16, "uint32", lanes))))


def _fma(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """One k per step."""
    return acc + broadcast(lhs, lanes) * rhs


def _f16_fma(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """One k per step.

    The left factor is broadcast before its conversion: twice as fast as converting a scalar, since the load of a single
    float16 depends on the previous content of its register.
    """
    return acc + cast(tirx.Broadcast(lhs, lanes), dot.types[2]) * rhs


def _dot(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Four bytes by four bytes in one instruction; NEON's multiplies by a lane of its second factor."""
    left = tirx.reinterpret(f"int8x{4 * lanes}", tirx.Broadcast(lhs, lanes))
    right = tirx.reinterpret(f"int8x{4 * lanes}", rhs)
    first, second = (right, left) if dot.swapped or "neon" in dot.isas else (left, right)
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", dot.instruction, acc, first, second)


def _bf16_dot(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Two bfloat16 by two in one instruction, through the function of `llvm_import`."""
    return tirx.call_pure_extern(f"float32x{lanes}", _SHIM, acc, tirx.Broadcast(lhs, lanes), rhs)


def _blocks(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Two rows by two columns of eight bytes each."""
    left, right = (tirx.reinterpret(f"int8x{4 * lanes}", factor) for factor in (lhs, rhs))
    first, second = (right, left) if dot.swapped else (left, right)
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", dot.instruction, acc, first, second)


def _bf16_blocks(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Two rows by two columns of four bfloat16 each, through the function of `llvm_import`."""
    return tirx.call_pure_extern(f"float32x{lanes}", _SHIM, acc, lhs, rhs)


def _bf16_pairs(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Two bfloat16 by two as float32: a bfloat16 is the upper half of a float32."""

    def low(bits: Expr, count: int) -> Expr:
        return tirx.reinterpret(vector_type("float32", count), tirx.shift_left(bits, constant(16, "int32", count)))

    def high(bits: Expr, count: int) -> Expr:
        return tirx.reinterpret(vector_type("float32", count), tirx.bitwise_and(bits, constant(-65536, "int32", count)))

    for half in (low, high):
        acc = acc + tirx.Broadcast(half(lhs, 1), lanes) * half(rhs, lanes)
    return acc


def _f16_sums(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Two float16 by two; products of even and of odd k accumulate separately, in float16."""
    left, right = (tirx.reinterpret(f"float16x{2 * lanes}", group) for group in (tirx.Broadcast(lhs, lanes), rhs))
    return acc + left * right


def _f16_pairs(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Two float16 by two as float32."""
    for shift in (0, 16):

        def half(bits: Expr, count: int, shift: int = shift) -> Expr:
            shifted_bits = tirx.shift_right(bits, constant(shift, "int32", count)) if shift else bits
            short = tirx.Cast(vector_type("uint16", count), shifted_bits)
            return cast(tirx.reinterpret(vector_type("float16", count), short), dot.types[2])

        acc = acc + broadcast(half(lhs, 1), lanes) * half(rhs, lanes)
    return acc


def _i16_pairs(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Bytes 0 and 2, then 1 and 3 of every group, widened to int16: PMADDWD multiplies and adds pairs, exactly."""
    count = 2 * lanes
    left = tirx.reinterpret(f"int16x{count}", tirx.Broadcast(lhs, lanes))
    right = tirx.reinterpret(f"int16x{count}", rhs)
    for half in (_even_bytes, _odd_bytes):
        factors = (half(value, dtype, count) for value, dtype in zip((left, right), dot.types[:2], strict=True))
        acc = acc + tirx.call_llvm_pure_intrin(f"int32x{lanes}", dot.instruction, *factors)
    return acc


def _i16_words(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Two int16 by two bytes, which `rhs_groups` has widened."""
    left, right = (tirx.reinterpret(f"int16x{2 * lanes}", value) for value in (tirx.Broadcast(lhs, lanes), rhs))
    return acc + tirx.call_llvm_pure_intrin(f"int32x{lanes}", dot.instruction, left, right)


def _int16_sums(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Four bytes by four bytes, added to two int16 sums in each accumulator; see `widen_int16_sums`."""
    left, right = (tirx.reinterpret(f"int8x{4 * lanes}", value) for value in (tirx.Broadcast(lhs, lanes), rhs))
    first, second = (right, left) if dot.swapped else (left, right)
    kind = f"int16x{2 * lanes}"
    pairs = tirx.call_llvm_pure_intrin(kind, dot.instruction, first, second)
    return tirx.reinterpret(f"int32x{lanes}", tirx.reinterpret(kind, acc) + pairs)


def widen_int16_sums(acc: Expr, lanes: int) -> Expr:
    """The int32 sums of accumulators of the form ``int16_sums``."""
    kind = f"int16x{2 * lanes}"
    ones = constant(1, "int16", 2 * lanes)
    return tirx.call_llvm_pure_intrin(f"int32x{lanes}", ADD_INT16_PAIRS[lanes], tirx.reinterpret(kind, acc), ones)


def _sign_dot(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """Four signed bytes by four, with sums of pairs of at most 2 * 127 * 128 in int16."""
    kind = f"int8x{4 * lanes}"
    left, right = tirx.reinterpret(kind, tirx.Broadcast(lhs, lanes)), let(tirx.reinterpret(kind, rhs))
    magnitude, signed = (tirx.call_llvm_pure_intrin(kind, MOVE_SIGN[lanes], value, right) for value in (right, left))
    pairs = tirx.call_llvm_pure_intrin(f"int16x{2 * lanes}", dot.instruction, magnitude, signed)
    return acc + widen_int16_sums(tirx.reinterpret(f"int32x{lanes}", pairs), lanes)


def _even_bytes(pairs: Expr, dtype: str, count: int) -> Expr:
    if dtype == "uint8":
        return tirx.bitwise_and(pairs, constant(0xFF, "int16", count))
    eight = constant(8, "int16", count)
    return tirx.shift_right(tirx.shift_left(pairs, eight), eight)


def _odd_bytes(pairs: Expr, dtype: str, count: int) -> Expr:
    eight = constant(8, "int16", count)
    if dtype == "int8":
        return tirx.shift_right(pairs, eight)
    shifted = tirx.shift_right(tirx.reinterpret(f"uint16x{count}", pairs), constant(8, "uint16", count))
    return tirx.reinterpret(f"int16x{count}", shifted)


def _i32_bytes(dot: DotInstruction, acc: Expr, lhs: Expr, rhs: Expr, lanes: int) -> Expr:
    """The four bytes of a group in sequence, each widened to int32."""

    def byte(position: int, bits: Expr, dtype: str, count: int) -> Expr:
        if dtype == "uint8":
            shifted_bits = tirx.shift_right(bits, constant(8 * position, "int32", count))
            return tirx.bitwise_and(shifted_bits, constant(0xFF, "int32", count))
        shifted_bits = tirx.shift_left(bits, constant(24 - 8 * position, "int32", count))
        return tirx.shift_right(shifted_bits, constant(24, "int32", count))

    left_type = dot.types[1] if dot.flip else dot.types[0]  # a flip is to the sign of the right factors
    for position in range(4):
        left = tirx.Broadcast(byte(position, lhs, left_type, 1), lanes)
        acc = acc + left * byte(position, rhs, dot.types[1], lanes)
    return acc


FORMS: dict[str, Callable[[DotInstruction, Expr, Expr, Expr, int], Expr]] = {
    "fma": _fma,
    "f16_fma": _f16_fma,
    "dot": _dot,
    "bf16_dot": _bf16_dot,
    "bf16_pairs": _bf16_pairs,
    "blocks": _blocks,
    "bf16_blocks": _bf16_blocks,
    "f16_bits": _fma,
    "f16_sums": _f16_sums,
    "f16_pairs": _f16_pairs,
    "i16_pairs": _i16_pairs,
    "i32_bytes": _i32_bytes,
    "i16_words": _i16_words,
    "int16_sums": _int16_sums,
    "sign_dot": _sign_dot,
}
"""Emitters of k-steps by `DotInstruction.form`."""
