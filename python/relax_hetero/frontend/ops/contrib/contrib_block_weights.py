"""Block-quantized weights in formats of ONNX Runtime."""

from __future__ import annotations

import numpy as np
from tvm import relax, te, tirx

from ..elementwise import cast
from ..node import Dim, Node, Position, const, dtype_of
from ..products import matmul
from ..storage_types import with_bytes
from ..table import MICROSOFT, convert_node, converts

# 4-bit types of bitsandbytes: FP4, and quantiles of the normal distribution (NF4).
_POSITIVE = (0.0, 0.005208333333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_FP4 = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], "float32")
_NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    "float32",
)  # fmt: skip


@converts("MatMulBnb4", domain=MICROSOFT)
def matmul_bnb4(node: Node) -> relax.Expr:
    """A @ B', where B is [N, K] in 4-bit codes with a scale per block."""
    rows, depth, block = (int(node.attribute(name, 0)) for name in ("N", "K", "block_size"))
    kind = node.attribute("quant_type", 0)
    codes, scales = node.constant(1), node.constant(2)
    if codes is None or scales is None:
        raise node.refusal("its weights or scales are computed when the model runs; they must be known at import")
    if not node.attribute("transB", 1):
        raise node.refusal("found transB=0, which only the backward pass has")
    count = rows * depth
    if block < 1 or kind not in (0, 1):
        raise node.refusal(f"found block_size {block} and quant_type {kind}, expected 16 or more, and 0 or 1")
    if codes.size != (count + 1) // 2 or scales.size != -(-count // block):
        raise node.refusal(
            f"found {codes.size} bytes and {scales.size} scales, expected {(count + 1) // 2} and {-(-count // block)}"
        )
    flat = codes.reshape(-1).astype("uint8")
    nibbles = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)[:count]
    numbers = (_FP4, _NF4)[kind][nibbles] * np.repeat(scales.astype("float32").reshape(-1), block)[:count]
    weight = np.ascontiguousarray(numbers.reshape(rows, depth).T)
    data = node.tensor(0)
    return cast(node, matmul(node, cast(node, data, "float32"), const(weight)), dtype_of(data))


@converts("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(node: Node) -> relax.Expr:
    """Gather rows of a block-quantized table and dequantize them."""
    is_bytes = dtype_of(node.tensor(0)) == "uint8"
    if not is_bytes and dtype_of(node.tensor(0)) not in ("int4", "uint4"):
        raise node.refusal(f"found data of type {dtype_of(node.tensor(0))}, expected uint8, int4 or uint4")
    bits = int(node.attribute("bits", 4)) if is_bytes else 8
    node = with_bytes(node)
    data, scales = node.tensor(0), node.tensor(2)
    rank = node.rank(data)
    gather_axis = node.axis(node.attribute("gather_axis", 0), rank)
    axis = node.axis(node.attribute("quantize_axis", 1), rank)
    block = int(node.attribute("block_size", 128))
    has_two_axes = axis != gather_axis  # else an index selects an element of a block, not a row of blocks
    if (is_bytes and not has_two_axes) or block < 1 or bits not in (2, 4, 8):
        raise node.refusal(
            f"found gather_axis {gather_axis}, quantize_axis {axis}, block_size {block} and bits {bits}; expected "
            "blocks of 16 or more of 2, 4 or 8 bits, and two axes for bytes"
        )
    parts = [node.tensor(0), scales] + ([node.tensor(3)] if node.has(3) else [])
    indices = node.tensor(1)
    block_indices = indices if has_two_axes else _block_indices(node, indices, node.shape(data)[gather_axis], block)
    gathered = [
        node.builder.normalize(convert_node(node.as_op("Gather", [part, place], axis=gather_axis)))
        for part, place in zip(parts, [indices, block_indices, block_indices], strict=False)
    ]
    result_axis = axis + node.rank(indices) - 1 if axis > gather_axis else axis
    per_byte = 8 // bits
    packed, last = node.shape(gathered[0]), node.rank(gathered[0]) - 1
    shape = [size * per_byte if place == last else size for place, size in enumerate(packed)]
    zero_offset = (1 << (bits - 1)) if is_bytes else 0

    def element(i: Position, x: te.Tensor, scale: te.Tensor, *points: te.Tensor) -> tirx.Expr:
        block_position = (*i[:result_axis], i[result_axis] // block, *i[result_axis + 1 :]) if has_two_axes else i
        zero = code(points[0], block_position) if points else tirx.const(zero_offset, "int32")
        factor = scale(*block_position)
        return (tirx.Cast("float32", code(x, i) - zero) * tirx.Cast("float32", factor)).astype(dtype_of(scales))

    def code(x: te.Tensor, i: Position) -> tirx.Expr:
        """Unpack the number at a position."""
        if per_byte == 1:
            return tirx.Cast("int32", x(*i))
        byte = tirx.Cast("int32", x(*i[:-1], i[-1] // per_byte))
        shift = tirx.Cast("int32", tirx.floormod(i[-1], per_byte)) * bits
        return tirx.bitwise_and(tirx.shift_right(byte, shift), tirx.const((1 << bits) - 1, "int32"))

    return node.kernel("gather_blocks", element, *gathered, shape=shape)


def _block_indices(node: Node, indices: relax.Expr, size: Dim, block: int) -> relax.Expr:
    """The blocks of (possibly negative) indices along an axis."""
    if not isinstance(size, int):
        raise node.refusal(f"found data of {size} elements along its axis, expected a known number")

    def element(i: Position, index: te.Tensor) -> tirx.Expr:
        from_front = tirx.Select(index(*i) < 0, index(*i) + size, index(*i))
        return tirx.floordiv(from_front, tirx.const(block, str(index.dtype)))

    return node.kernel("block_places", element, indices)
