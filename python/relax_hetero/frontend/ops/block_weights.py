"""Weights of 2, 4 or 8 bits in blocks that share a scale: ``com.microsoft.MatMulNBits``, DequantizeLinear of constants.

Both become `relax.hetero.dequantize_blocks`; a product that reads that keeps its weights as they are where its device
has a kernel for them.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ...encoding.block_weights import GROUP, bytes_of_row, middle_of
from ...op import dequantize_blocks
from .elementwise import cast
from .node import Node, as_constant, const, dtype_of, is_float, onnx_dtype
from .table import MICROSOFT, converts

_OF_BYTES = 4
"""The `accuracy_level` of MatMulNBits that allows A to become integers of 8 bits."""


@converts("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(node: Node) -> relax.Expr:
    """A @ dequantized(B).T + bias, at least as exact as `accuracy_level` asks."""
    depth, columns, block = (int(node.attribute(name, 0)) for name in ("K", "N", "block_size"))
    bits = node.attribute("bits", 4)
    if bits not in (2, 4, 8):
        raise node.refusal(f"found weights of {bits} bits, expected 2, 4 or 8")
    if node.attribute("weight_prepacked", 0):
        raise node.refusal("found weights in the order of a GPU's kernel (weight_prepacked), expected rows of bytes")
    if block < 16 or block & (block - 1):
        raise node.refusal(f"found blocks of {block}, expected a power of two of 16 at least")
    a, blocks = node.tensor(0), -(-depth // block)
    if not is_float(dtype_of(a)) or dtype_of(a) == "float64":
        raise node.refusal(f"found A of type {dtype_of(a)}, expected float32, float16 or bfloat16")
    data = _weights(node, 1, "B", columns * blocks * bytes_of_row(block, bits), "uint8").reshape(columns, -1)
    scales = _weights(node, 2, "scales", columns * blocks).astype("float32", copy=False).reshape(columns, blocks)
    zeros = _zero_points(node, columns, blocks, bits) if node.has(3) else None
    if bits == 2:
        data, zeros, bits = as_four_bits(data), np.full((columns, blocks), 2, "uint8") if zeros is None else zeros, 4
    order = _order(node, depth, block) if node.has(4) else None
    if order is not None:
        data = _reordered(data, order, bits)
        a = node.emit(relax.op.take(a, const(order, "int64"), axis=node.rank(a) - 1))
    activation_bits = 8 if node.attribute("accuracy_level", 0) == _OF_BYTES else 16
    weight = _dequantized(node, data, scales, zeros, depth, block, bits, activation_bits)
    product = node.emit(relax.op.matmul(cast(node, a, "float32"), relax.op.permute_dims(weight, [1, 0])))
    if node.has(5):
        product = node.emit(relax.op.add(product, cast(node, node.tensor(5), "float32")))
    return cast(node, product, dtype_of(a))


def _weights(node: Node, index: int, what: str, size: int, dtype: str = "") -> np.ndarray:
    """A constant input of so many elements."""
    array = node.constant(index)
    if array is None:
        raise node.refusal(f"{what} is no constant")
    if array.size != size or (dtype and str(array.dtype) != dtype):
        raise node.refusal(
            f"found {what} of shape {list(array.shape)} and type {array.dtype}, expected {size} elements"
            + (f" of {dtype}" if dtype else "")
        )
    return array


def _zero_points(node: Node, columns: int, blocks: int, bits: int) -> np.ndarray:
    """Zero points of every block: numbers of A's type, or as many bits as weights have, rows of whole bytes."""
    array = node.constant(3)
    if array is None or str(array.dtype) != "uint8":
        return _weights(node, 3, "zero_points", columns * blocks).astype("float32", copy=False).reshape(columns, blocks)
    packed = _weights(node, 3, "zero_points", columns * bytes_of_row(blocks, bits)).reshape(columns, -1)
    return numbers_of_bytes(packed, bits)[:, :blocks]


def numbers_of_bytes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Rows of bytes as rows of the numbers that they hold, the first one in the lowest bits."""
    parts = [packed >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(packed.shape[0], -1)


def as_four_bits(data: np.ndarray) -> np.ndarray:
    """Rows of numbers of 2 bits as rows of the same numbers of 4 bits, which kernels read."""
    numbers = numbers_of_bytes(data, 2)
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def _order(node: Node, depth: int, block: int) -> np.ndarray | None:
    """The order of rows of B in which every block has neighbours; None where they have it already."""
    groups = _weights(node, 4, "g_idx", depth)
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], np.arange(depth) // block):
        raise node.refusal(f"found blocks of other sizes than {block} in g_idx, expected that many of each number")
    return None if np.array_equal(order, np.arange(depth)) else order


def _reordered(data: np.ndarray, order: np.ndarray, bits: int) -> np.ndarray:
    """Rows of bytes with their numbers in another order; those behind the last are zeros."""
    numbers = numbers_of_bytes(data, bits)
    moved = np.zeros_like(numbers)
    moved[:, : order.size] = numbers[:, order]
    return moved if bits == 8 else moved[:, 0::2] | moved[:, 1::2] << 4


def _dequantized(
    node: Node,
    data: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    depth: int,
    block: int,
    bits: int = 4,
    activation_bits: int = 16,
) -> relax.Expr:
    """The weights as numbers, (columns, depth); zero points that say nothing are left out."""
    if zeros is not None and (zeros == middle_of(bits)).all():
        zeros = None
    points = None if zeros is None else const(np.ascontiguousarray(zeros))
    return node.emit(
        dequantize_blocks(
            const(data), const(scales), points, depth=depth, block=block, bits=bits, activation_bits=activation_bits
        )
    )


def dequantized_blocks(node: Node) -> relax.Expr | None:
    """A DequantizeLinear node's output where its input is a matrix of constants that fit in 4 bits, scaled by blocks.

    None for any other; a matrix whose blocks run down its columns, as a product's right operand, is transposed.
    """
    data, scale = as_constant(node.inputs[0]), as_constant(node.inputs[1])
    block = node.attribute("block_size", 0)
    is_matrix = data is not None and str(data.dtype) in ("int8", "uint8") and data.ndim == 2 and data.size > 0
    if not is_matrix or data is None or scale is None or scale.ndim != 2 or block == 0 or block % GROUP:
        return None
    low, high = (-8, 7) if data.dtype == np.int8 else (0, 15)
    if data.min() < low or data.max() > high or str(scale.dtype) not in ("float16", "bfloat16", "float32"):
        return None
    points = node.constant(2)
    if node.has(2) and points is None:
        return None
    zeros = (np.zeros(scale.shape, data.dtype) if points is None else points).astype("int64") - low
    if zeros.min() < 0 or zeros.max() > 255:
        return None
    axis = node.axis(node.attribute("axis", 1), 2)
    rows = [array if axis == 1 else array.T for array in (data.astype("int16") - low, scale, zeros)]
    depth, target = rows[0].shape[1], dtype_of(node.tensor(1))
    if node.attribute("output_dtype", 0):
        target = onnx_dtype(node.attribute("output_dtype"))
    padded = np.zeros((rows[0].shape[0], depth + depth % 2), np.uint8)
    padded[:, :depth] = rows[0]
    packed = padded[:, 0::2] | padded[:, 1::2] << 4
    weight = _dequantized(node, packed, rows[1].astype("float32", copy=False), rows[2].astype("uint8"), depth, block)
    return cast(node, weight if axis == 1 else node.emit(relax.op.permute_dims(weight, [1, 0])), target)
