"""Weights of an ONNX graph: initializers, constants, and the results of chains of simple nodes on them.

Exporters put `ConstantOfShape`, `Transpose`, `Cast` … between a weight and the op that uses it. Those are computed here
once, with ONNX's own reference implementation, so that a weight is a constant wherever it is used, and lives there.
(Arithmetic on small constants is computed by the converters of single ops.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import tvm
from onnx import helper, numpy_helper
from tvm import relax

from ...errors import FrontendError
from ..ops.fold import evaluate
from .inputs import dtype_name
from .model import STANDARD_DOMAINS

# Ops that exporters put between a weight and the op that uses it. Ops that carry the work of a model stay in it, and
# DequantizeLinear too, which would make weights larger.
FOLDED_OPS = frozenset(
    "Cast CastLike Concat ConstantOfShape Flatten Identity Mul Reshape Slice Split Squeeze Transpose Unsqueeze".split()
)

_LARGEST_FILL = 2**31  # bytes that a ConstantOfShape may become; a weight larger than this would not be written so
_GROWTH = 2**24  # bytes by which other results may exceed what they are made of, lest broadcasting fill the memory


def constant_value(node: onnx.NodeProto) -> np.ndarray:
    """The value of a `Constant` node, whichever attribute carries it.

    Raises
    ------
    FrontendError: If it is a string, or nothing.
    """
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if attribute.name == "value":
            return tensor_value(value, f"Constant {node.output[0]!r}")
        if attribute.name == "sparse_value":
            return sparse_value(value)
        if attribute.name in ("value_float", "value_floats"):
            return np.array(value, np.float32)
        if attribute.name in ("value_int", "value_ints"):
            return np.array(value, np.int64)
    names = ", ".join(attribute.name for attribute in node.attribute) or "no attribute"
    raise FrontendError(f"Constant {node.output[0]!r} has {names}; TVM has no tensors of strings")


def tensor_value(tensor: onnx.TensorProto, what: str) -> np.ndarray:
    """The array of a tensor, of a dtype TVM has; the error names it by `what`."""
    dtype_name(tensor.data_type, what)
    if any(dim < 0 for dim in tensor.dims):
        raise FrontendError(f"{what} has the shape {list(tensor.dims)}; expected sizes >= 0")
    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError, OSError) as error:
        raise FrontendError(f"{what}: its data cannot be read: {error}") from error


def sparse_value(sparse: onnx.SparseTensorProto) -> np.ndarray:
    """The dense array of a sparse tensor: indices are flat, or one row of coordinates per value."""
    values = tensor_value(sparse.values, f"sparse tensor {sparse.values.name!r}")
    indices = numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return dense


def initializer_value(tensor: onnx.TensorProto, graph: onnx.GraphProto) -> np.ndarray:
    """The array of an initializer; one of 4 bits that only DequantizeLinear reads as bytes, which mean the same there.

    Raises
    ------
    FrontendError: As `tensor_value`.
    """
    array = tensor_value(tensor, f"initializer {tensor.name!r}")
    wide = {"int4": np.int8, "uint4": np.uint8}.get(str(array.dtype))
    if wide is None:
        return array
    readers = {node.op_type for node in _nodes_in(graph) if tensor.name in node.input}
    is_returned = any(output.name == tensor.name for output in graph.output)
    return array if is_returned or readers != {"DequantizeLinear"} else array.astype(wide)


def _nodes_in(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph and of the graphs inside it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes_in(attribute.g)
            for inner in attribute.graphs:
                yield from _nodes_in(inner)


def make_const(array: np.ndarray) -> tvm.ir.GenericConst:
    """A Relax constant of this array, dtype and rank included.

    Raises
    ------
    FrontendError: If TVM has no tensors of its dtype (4-bit integers).
    """
    try:
        return relax.const(tvm.runtime.tensor(np.ascontiguousarray(array).reshape(array.shape)))
    except (RuntimeError, TypeError, ValueError) as error:
        raise FrontendError(
            f"a constant of shape {list(array.shape)} has elements of type {array.dtype}, which TVM has no tensors of"
        ) from error


def fold_node(node: onnx.NodeProto, operands: list[np.ndarray | None], opset: int) -> list[np.ndarray] | None:
    """The outputs of a node whose operands are known, or None if it is to be computed at run time.

    Parameters
    ----------
    operands: One per input; None for an optional input that is left out.
    """
    if node.op_type not in FOLDED_OPS or node.domain not in STANDARD_DOMAINS or not all(node.output):
        return None
    if node.op_type == "ConstantOfShape" and not _affordable(node, operands[0]):
        return None
    arrays = evaluate(lambda: node, operands, opset)
    if arrays is None or any(array.dtype.kind in "OUSc" for array in arrays):
        return None
    if node.op_type != "ConstantOfShape":
        read = sum(value.nbytes for value in operands if value is not None)
        if sum(array.nbytes for array in arrays) > read + _GROWTH:
            return None
    return arrays


def _affordable(node: onnx.NodeProto, shape: np.ndarray | None) -> bool:
    if shape is None:
        return False
    value = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
    itemsize = 4 if value is None else numpy_helper.to_array(value).dtype.itemsize
    return int(np.prod([int(size) for size in shape], dtype=object)) * itemsize <= _LARGEST_FILL
