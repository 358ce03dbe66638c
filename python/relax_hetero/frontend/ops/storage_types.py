"""Storage of element types that LLVM cannot compute with (4 and 2 bits, 8-bit floats) as bytes.

Converters access the bytes of such a tensor by `relax.memory.view`. `relax_hetero.frontend.narrow_storage` replaces the
types in the whole module, which removes the views.
"""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, te, tirx

from ...tir.math.narrow_floats import code_of, number_of
from ...vm.device.tensor_arrays import host_array
from .node import Node, Position, const, dtype_of

INTEGERS = {"int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3)}
"""Minimum and maximum of integer types smaller than a byte."""

STORAGE_TYPES = {
    "int4": "int8",
    "int2": "int8",
    **dict.fromkeys(("uint4", "uint2", "float4_e2m1fn", "float8_e8m0fnu"), "uint8"),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), "uint8"),
}
"""TVM's name of the type -> byte type with an element's value (integers) or code (floats)."""


def stored_array(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """The bytes of a constant of a storage type."""
    array, carrier = host_array(tensor), STORAGE_TYPES[str(tensor.dtype)]
    return array.astype(carrier) if str(tensor.dtype) in INTEGERS else array.view(carrier)


def bytes_of(node: Node, data: relax.Expr) -> relax.Expr:
    """The bytes of a tensor of a storage type; other tensors are unchanged."""
    carrier = STORAGE_TYPES.get(dtype_of(data))
    if carrier is None:
        return data
    if isinstance(data, tvm.ir.GenericConst):
        return const(stored_array(data.value))
    return node.emit(relax.op.memory.view(data, dtype=carrier))


def of_bytes(node: Node, data: relax.Expr, dtype: str) -> relax.Expr:
    """View bytes as a tensor of type `dtype`."""
    return node.emit(relax.op.memory.view(data, dtype=dtype))


def with_bytes(node: Node) -> Node:
    """Replace a node's inputs of integers smaller than a byte by their bytes."""
    values = [
        bytes_of(node, node.tensor(index)) if _is_integer(value) else value for index, value in enumerate(node.inputs)
    ]
    return Node(node.op_type, node.name, node.opset, node.builder, values, node.attributes, node.num_outputs)


def _is_integer(value: object) -> bool:
    return isinstance(value, relax.Expr) and isinstance(value.ty, relax.TensorType) and dtype_of(value) in INTEGERS


def wrapped(node: Node, data: relax.Expr, dtype: str) -> relax.Expr:
    """Truncate integers to an integer type smaller than a byte."""
    bits = int(tvm.DataType(dtype).bits)
    carrier = STORAGE_TYPES[dtype]

    def element(i: Position, x: object) -> tirx.Expr:
        last = tirx.bitwise_and(tirx.Cast("int32", x(*i)), tirx.const((1 << bits) - 1, "int32"))  # type: ignore[operator]
        if carrier == "int8":  # sign extension
            half = tirx.const(1 << (bits - 1), "int32")
            last = tirx.bitwise_xor(last, half) - half
        return tirx.Cast(carrier, last)

    return of_bytes(node, node.kernel("last_bits", element, data), dtype)


# Floats of 8 and 4 bits to and from float32, as nodes of a graph.


def to_float32(node: Node, data: relax.Expr) -> relax.Expr:
    """Convert 8- or 4-bit floats to float32, which is exact."""
    dtype = dtype_of(data)

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        return number_of(tirx.Cast("uint32", x(*i)), dtype)

    return node.kernel("narrow_float_to_float32", element, bytes_of(node, data))


def from_float32(node: Node, data: relax.Expr, dtype: str, saturates: bool, rounding: str = "up") -> relax.Expr:
    """Round float32 half to even to 8- or 4-bit floats; see `code_of` for overflow."""

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        return code_of(x(*i), dtype, saturates, rounding)

    return of_bytes(node, node.kernel("float32_to_narrow_float", element, data), dtype)
