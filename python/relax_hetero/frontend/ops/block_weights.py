"""Block-quantized weights of 2, 4 or 8 bits: ``com.microsoft.MatMulNBits``, and DequantizeLinear of constants.

Both become `relax.hetero.dequantize_blocks`; a product with it keeps quantized weights if its device has a kernel.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ...encoding.block_weights import GROUP, bytes_of_row, middle_of
from ...op import dequantize_blocks
from .elementwise import cast
from .node import Node, as_constant, const, dtype_of, is_float, onnx_dtype
from .table import MICROSOFT, converts

_INT8_ACCURACY_LEVEL = 4  # the `accuracy_level` of MatMulNBits that allows to quantize A to 8 bits


@converts("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(node: Node) -> relax.Expr:
    """A @ dequantized(B).T + bias, with at least the precision of `accuracy_level`."""
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
    order = _column_order(node, depth, block) if node.has(4) else None
    if order is not None:
        data = _permute_columns(data, order, bits)
        a = node.emit(relax.op.take(a, const(order, "int64"), axis=node.rank(a) - 1))
    activation_bits = 8 if node.attribute("accuracy_level", 0) == _INT8_ACCURACY_LEVEL else 16
    weight = _dequantize(node, data, scales, zeros, depth, block, bits, activation_bits)
    product = node.emit(relax.op.matmul(cast(node, a, "float32"), relax.op.permute_dims(weight, [1, 0])))
    if node.has(5):
        product = node.emit(product + cast(node, node.tensor(5), "float32"))
    return cast(node, product, dtype_of(a))


def _weights(node: Node, index: int, what: str, size: int, dtype: str = "") -> np.ndarray:
    """A constant input of `size` elements."""
    array = node.constant(index)
    if array is None:
        raise node.refusal(f"{what} is not a constant")
    if array.size != size or (dtype and str(array.dtype) != dtype):
        raise node.refusal(
            f"found {what} of shape {list(array.shape)} and type {array.dtype}, expected {size} elements"
            + (f" of {dtype}" if dtype else "")
        )
    return array


def _zero_points(node: Node, columns: int, blocks: int, bits: int) -> np.ndarray:
    """Zero points of every block, given in A's type, or packed like weights in rows of whole bytes."""
    array = node.constant(3)
    if array is None or str(array.dtype) != "uint8":
        return _weights(node, 3, "zero_points", columns * blocks).astype("float32", copy=False).reshape(columns, blocks)
    packed = _weights(node, 3, "zero_points", columns * bytes_of_row(blocks, bits)).reshape(columns, -1)
    return numbers_of_bytes(packed, bits)[:, :blocks]


def numbers_of_bytes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Unpack rows of bytes to numbers, lowest bits first."""
    parts = [packed >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(packed.shape[0], -1)


def as_four_bits(data: np.ndarray) -> np.ndarray:
    """Repack rows of 2-bit numbers as 4-bit numbers, which kernels read."""
    numbers = numbers_of_bytes(data, 2)
    return numbers[:, 0::2] | numbers[:, 1::2] << 4


def _column_order(node: Node, depth: int, block: int) -> np.ndarray | None:
    """The order of columns that makes every block of `g_idx` contiguous; None if it is the identity."""
    groups = _weights(node, 4, "g_idx", depth)
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], np.arange(depth) // block):
        raise node.refusal(f"found blocks of other sizes than {block} in g_idx, expected that many of each number")
    return None if np.array_equal(order, np.arange(depth)) else order


def _permute_columns(data: np.ndarray, order: np.ndarray, bits: int) -> np.ndarray:
    """Permute the numbers in rows of bytes; padding is zero."""
    numbers = numbers_of_bytes(data, bits)
    permuted = np.zeros_like(numbers)
    permuted[:, : order.size] = numbers[:, order]
    return permuted if bits == 8 else permuted[:, 0::2] | permuted[:, 1::2] << 4


def _dequantize(
    node: Node,
    data: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    depth: int,
    block: int,
    bits: int = 4,
    activation_bits: int = 16,
) -> relax.Expr:
    """Dequantize weights to (columns, depth); zero points in the middle of the range are omitted."""
    if zeros is not None and (zeros == middle_of(bits)).all():
        zeros = None
    points = None if zeros is None else const(np.ascontiguousarray(zeros))
    return node.emit(
        dequantize_blocks(
            const(data), const(scales), points, depth=depth, block=block, bits=bits, activation_bits=activation_bits
        )
    )


def dequantized_blocks(node: Node) -> relax.Expr | None:
    """Convert a DequantizeLinear node with a constant matrix of 4-bit numbers and a scale per block; None for others.

    A matrix with blocks along its columns, as a product's right operand, is transposed.
    """
    data, scale = as_constant(node.inputs[0]), as_constant(node.inputs[1])
    block = node.attribute("block_size", 0)
    is_matrix = data is not None and str(data.dtype) in ("int8", "uint8") and data.ndim == 2 and data.size > 0
    if not is_matrix or data is None or scale is None or scale.ndim != 2 or block == 0 or block % GROUP:
        return None
    low, high = (-8, 7) if data.dtype == np.int8 else (0, 15)
    if data.min() < low or data.max() > high or str(scale.dtype) not in ("float16", "bfloat16", "float32"):
        return None
    zero_points = node.constant(2)
    if node.has(2) and zero_points is None:
        return None
    zeros = (np.zeros(scale.shape, data.dtype) if zero_points is None else zero_points).astype("int64") - low
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
    weight = _dequantize(node, packed, rows[1].astype("float32", copy=False), rows[2].astype("uint8"), depth, block)
    return cast(node, weight if axis == 1 else node.emit(relax.op.permute_dims(weight, [1, 0])), target)
