"""Discrete Fourier transforms (DFT, STFT) as products with matrices of sines and cosines.

The length of a transform is static. Real and imaginary parts are interleaved in the matrix's rows as in the input, and
in its columns as in the result. Inputs shorter than the transform, which ONNX pads with zeros, use its first rows only.
"""

from __future__ import annotations

import numpy as np
from tvm import relax, te, tirx

from ..elementwise import cast
from ..node import Dim, Node, Position, const, dtype_of
from ..products import matmul
from ..required_sizes import as_expr, require_shape
from ..slicing import slice_axes
from ..table import converts


@converts("DFT")
def dft(node: Node) -> relax.Expr:
    """Transform along an axis; with `onesided` the spectrum (the input of an inverse) is its first half."""
    data = node.tensor(0)
    rank = node.rank(data)
    if rank < 2:
        raise node.refusal(f"its input has rank {rank}, expected at least 2")
    axis = node.axis(_axis(node), rank)
    if axis == rank - 1:
        raise node.refusal(f"axis {axis} is the one of real and imaginary parts")
    return _transform(node, data, axis, _scalar(node, 1, "its dft_length is") if node.has(1) else None)


def _axis(node: Node) -> int:
    if node.opset < 20:
        return int(node.attribute("axis", 1))
    return _scalar(node, 2, "its axis is") if node.has(2) else -2


def _scalar(node: Node, index: int, subject: str) -> int:
    """A constant input of one integer."""
    value = node.constant(index)
    if value is None:
        raise node.unknown(subject)
    if value.size != 1:
        raise node.refusal(f"input {index} has {value.size} elements, expected 1")
    return int(value.reshape(()))


def _transform(node: Node, data: relax.Expr, axis: int, length: int | None) -> relax.Expr:
    """Transform an axis by the node's attributes, with the axis's length by default."""
    dims = node.shape(data)
    size, parts = dims[axis], dims[-1]
    if not isinstance(size, int) or not isinstance(parts, int):
        raise node.refusal(f"axis {axis} has {size} elements of {parts} parts; give them with shapes=")
    if parts not in (1, 2):
        raise node.refusal(f"the last axis of its input has {parts} elements, expected 1 (real) or 2 (complex)")
    is_inverse, is_onesided = bool(node.attribute("inverse", 0)), bool(node.attribute("onesided", _onesided(node)))
    if length is None:
        length = 2 * (size - 1) if is_inverse and is_onesided else size
    if length < 1 or size < 1:
        raise node.refusal(f"transforms {size} elements to a length of {length}, expected at least 1")
    num_rows = min(size, length // 2 + 1 if is_inverse and is_onesided else length)
    node.check_constant_size(2 * num_rows, 2 * length)
    if is_inverse and is_onesided:
        matrix, result_parts = _real_inverse_table(num_rows, length), 1
    else:
        matrix, result_parts = _table(num_rows, length // 2 + 1 if is_onesided else length, length, is_inverse), 2
    matrix = matrix.reshape(num_rows, 2, -1)[:, :parts].reshape(num_rows * parts, -1)

    order = [*(i for i in range(len(dims)) if i not in (axis, len(dims) - 1)), axis, len(dims) - 1]
    last = node.emit(relax.op.permute_dims(slice_axes(node, data, {axis: (0, num_rows, 1)}), order))
    other_dims = [dims[i] for i in order[:-2]]
    rows = node.emit(relax.op.reshape(last, [*other_dims, num_rows * parts]))
    result = matmul(node, rows, const(matrix, dtype_of(data)))
    spectrum = node.emit(relax.op.reshape(result, [*other_dims, matrix.shape[1] // result_parts, result_parts]))
    return node.emit(relax.op.permute_dims(spectrum, [order.index(i) for i in range(len(dims))]))


def _onesided(node: Node) -> int:
    return 1 if node.op_type == "STFT" else 0


def _angles(rows: int, columns: int, length: int) -> np.ndarray:
    """The angles 2 pi n k / length modulo 2 pi, [rows, columns], reduced exactly."""
    return np.outer(np.arange(rows), np.arange(columns)) % length * (2 * np.pi / length)


def _table(rows: int, columns: int, length: int, is_inverse: bool) -> np.ndarray:
    """Matrix of a complex transform, [2 rows, 2 columns]."""
    angle = _angles(rows, columns, length)
    cosine, sine = np.cos(angle), np.sin(angle) if is_inverse else -np.sin(angle)
    table = np.stack([np.stack([cosine, sine], -1), np.stack([-sine, cosine], -1)], 1)
    return table.reshape(2 * rows, 2 * columns) / (length if is_inverse else 1)


def _real_inverse_table(rows: int, length: int) -> np.ndarray:
    """Matrix of the inverse of half a spectrum to real numbers, [2 rows, length]."""
    angle = _angles(rows, length, length)
    weight = np.full((rows, 1), 2.0 / length)
    weight[0] = 1 / length
    if length % 2 == 0 and rows == length // 2 + 1:
        weight[-1] = 1 / length
    return np.stack([np.cos(angle) * weight, -np.sin(angle) * weight], 1).reshape(2 * rows, length)


@converts("STFT")
def stft(node: Node) -> relax.Expr:
    """Transform frames of a signal, [batch, frames, frequencies, 2]."""
    signal, step = node.tensor(0), _scalar(node, 1, "its frame_step is")
    if node.rank(signal) == 2:
        signal = node.emit(relax.op.expand_dims(signal, [2]))
    if node.rank(signal) != 3:
        raise node.refusal(f"its signal has rank {node.rank(signal)}, expected 2 or 3")
    batch, size, parts = node.shape(signal)
    length = _frame_length(node, size)
    if step < 1 or length < 1:
        raise node.refusal(f"its frames of {length} elements are {step} apart, expected at least 1")
    node.require(as_expr(size) >= length, f"its signal has {size} elements, expected at least a frame of {length}")
    count = (size - length) // step + 1 if isinstance(size, int) else tirx.floordiv(size - length, step) + 1
    dims: list[Dim] = [batch, count, length, parts]
    inputs = [signal]
    if node.has(2):
        inputs.append(cast(node, require_shape(node, node.tensor(2), [length], "its window"), dtype_of(signal)))

    def element(i: Position, x: te.Tensor, *window: te.Tensor) -> tirx.Expr:
        value = x(i[0], i[1] * step + i[2], i[3])
        return value * window[0](i[2]) if window else value

    return _transform(node, node.kernel("frames", element, *inputs, shape=dims), 2, length)


def _frame_length(node: Node, size: Dim) -> int:
    if node.has(3):
        return _scalar(node, 3, "its frame_length is")
    length = node.shape(node.tensor(2))[0] if node.has(2) else size
    if not isinstance(length, int):
        raise node.refusal(f"its frames have {length} elements; give their number with shapes=")
    return length
