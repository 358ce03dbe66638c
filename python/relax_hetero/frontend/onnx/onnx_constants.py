"""Weights of an ONNX graph: initializers, constants, and chains of simple nodes applied to them.

Exporters put `ConstantOfShape`, `Transpose`, `Cast` … between a weight and the op that uses it. These nodes are
computed at import with ONNX's reference implementation, so that each weight is a constant. (Converters of single ops
compute arithmetic on small constants.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import tvm
from onnx import helper, numpy_helper
from tvm import relax

from ...errors import FrontendError
from ...vm.device.tensors import ALIGNMENT, empty, from_numpy, view_bytes
from ..import_limits import MAX_RANK, budget
from ..ops.fold import evaluate, result_bytes
from ..ops.node import STANDARD_DOMAINS
from .external_data import ExternalData, is_external
from .inputs import dtype_name

# Ops that exporters put between a weight and the op that uses it. DequantizeLinear is not folded: weights would grow.
FOLDED_OPS = frozenset(
    "Cast CastLike Concat ConstantOfShape Flatten Identity Mul Reshape Slice Split Squeeze Transpose Unsqueeze".split()
)

_MAX_GROWTH_BYTES = 2**24  # results may exceed their operands by this much; broadcasting could fill the memory

_MIN_SHARED_BYTES = 2**16  # smaller arrays are copied

# Bits per element of types with several elements per byte.
_PACKED_BITS = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


class Tensors:
    """Reads the tensors of one model. `external`: the files of its external data."""

    def __init__(self, external: ExternalData) -> None:
        self._external = external

    def value(self, tensor: onnx.TensorProto, what: str) -> np.ndarray:
        """The array of a tensor in a dtype that TVM has; a mapping of the file if its data is external.

        Raises FrontendError if the dtype is another one, or the data does not fit the shape; the text begins with
        `what`.
        """
        dtype_name(tensor.data_type, what)
        if any(dim < 0 for dim in tensor.dims):
            raise FrontendError(f"{what} has the shape {list(tensor.dims)}; expected sizes >= 0")
        if is_external(tensor):
            return self._map_external(tensor, what)
        try:
            return numpy_helper.to_array(tensor)
        except Exception as error:  # errors of numpy, ONNX and protobuf
            raise FrontendError(f"{what}: its data cannot be read: {error}") from error

    def _map_external(self, tensor: onnx.TensorProto, what: str) -> np.ndarray:
        data = self._external.bytes_of(tensor, what)
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        elements = int(np.prod(list(tensor.dims), dtype=object))
        bits = _PACKED_BITS.get(str(dtype), dtype.itemsize * 8)
        nbytes = -(-elements * bits // 8)
        if data.nbytes < nbytes or (data.nbytes > nbytes and any(e.key == "length" for e in tensor.external_data)):
            raise FrontendError(
                f"{what} has the shape {list(tensor.dims)} of {dtype}, {nbytes:,} bytes, but its external data has "
                f"{data.nbytes:,}"
            )
        if str(dtype) in _PACKED_BITS:
            packed = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data[:nbytes].tobytes())
            return numpy_helper.to_array(packed)
        return data[:nbytes].view(dtype).reshape(tuple(tensor.dims))

    def sparse(self, sparse: onnx.SparseTensorProto) -> np.ndarray:
        """The dense array of a sparse tensor: indices are flat, or one row of coordinates per value.

        Raises FrontendError for more elements than the import may compute, or indices that do not fit.
        """
        what = f"sparse tensor {sparse.values.name!r}"
        values, indices = self.value(sparse.values, what), self.value(sparse.indices, f"the indices of {what}")
        dims = tuple(sparse.dims)
        if len(dims) > MAX_RANK or any(dim < 0 for dim in dims):
            raise FrontendError(f"{what} has the shape {list(dims)[:10]}; expected at most {MAX_RANK} sizes >= 0")
        shapes = [(values.size,), (values.size, len(dims))]
        if values.ndim != 1 or indices.dtype != np.int64 or indices.shape not in shapes:
            raise FrontendError(
                f"{what} has {values.size} values and indices {list(indices.shape)} of {indices.dtype}; expected int64 "
                f"indices of shape {' or '.join(str(list(shape)) for shape in shapes)}"
            )
        elements = int(np.prod(dims, dtype=object))
        ends = np.array([elements] if indices.ndim == 1 else dims, object)
        if indices.size and ((indices < 0).any() or (indices >= ends).any()):
            raise FrontendError(f"{what} has indices outside of its shape {list(dims)}")
        budget().check_bytes(2 * elements * values.dtype.itemsize, what)
        budget().take_bytes(elements * values.dtype.itemsize, what)
        dense = np.zeros(dims, values.dtype)
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
        return dense

    def constant(self, node: onnx.NodeProto) -> np.ndarray:
        """The value of a `Constant` node, whichever attribute carries it.

        Raises FrontendError if it is a string, or nothing.
        """
        for attribute in node.attribute:
            if attribute.name == "value" and attribute.HasField("t"):
                return self.value(attribute.t, f"Constant {_first_output(node)}")
            if attribute.name == "sparse_value" and attribute.HasField("sparse_tensor"):
                return self.sparse(attribute.sparse_tensor)
            if attribute.name in ("value_float", "value_floats"):
                return np.array(helper.get_attribute_value(attribute), np.float32)
            if attribute.name in ("value_int", "value_ints"):
                return np.array(helper.get_attribute_value(attribute), np.int64)
        names = ", ".join(attribute.name for attribute in node.attribute) or "no attribute"
        raise FrontendError(f"Constant {_first_output(node)} has {names}; TVM has no tensors of strings")

    def initializers(self, graph: onnx.GraphProto) -> Iterator[tuple[str, np.ndarray]]:
        """The weights of a graph. Raises FrontendError as `value` does."""
        for tensor in graph.initializer:
            array = self.value(tensor, f"initializer {tensor.name!r}")
            if is_external(tensor) and not _is_shareable(array):
                budget().take_bytes(array.nbytes, f"initializer {tensor.name!r}")  # the file may consist of holes
            yield tensor.name, array
        for sparse in graph.sparse_initializer:
            yield sparse.values.name, self.sparse(sparse)


def _first_output(node: onnx.NodeProto) -> str:
    return repr(node.output[0]) if node.output else "without an output"


def make_const(array: np.ndarray) -> tvm.ir.GenericConst:
    """Relax constant of an array, without a copy if the array is a suitable mapping of a file.

    Raises FrontendError if TVM has no tensors of its dtype.
    """
    try:
        if str(array.dtype) in _PACKED_BITS:
            return relax.const(from_numpy(array, tvm.cpu()))
        if _is_shareable(array):
            return relax.const(view_bytes(array.reshape(-1).view(np.uint8), array.shape, str(array.dtype)))
        return relax.const(tvm.runtime.tensor(np.ascontiguousarray(array).reshape(array.shape)))
    except (RuntimeError, TypeError, ValueError) as error:
        raise FrontendError(
            f"a constant of shape {list(array.shape)} has elements of type {array.dtype}, which TVM has no tensors of"
        ) from error


def _is_shareable(array: np.ndarray) -> bool:
    """Return whether kernels may read an array in place: a large, aligned, contiguous view of a mapped file."""
    is_plain = array.flags.c_contiguous and array.flags.writeable and array.dtype != np.bool_
    is_view = is_plain and not array.flags.owndata
    return is_view and array.nbytes >= _MIN_SHARED_BYTES and _address(array) % ALIGNMENT == 0


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def fold_node(node: onnx.NodeProto, operands: list[np.ndarray | None], opset: int) -> list[tvm.ir.GenericConst] | None:
    """The outputs of a node with constant operands, or None if it is computed at run time.

    `operands`: one per input; None for an omitted optional input. Raises FrontendError if a `ConstantOfShape` has more
    bytes than the import may compute.
    """
    if node.op_type not in FOLDED_OPS or node.domain not in STANDARD_DOMAINS or not all(node.output):
        return None
    if node.op_type == "ConstantOfShape":
        return _fold_fill(node, operands)
    operand_bytes = {_address(value): value.nbytes for value in operands if value is not None}
    nbytes = result_bytes(node, operands)
    # Twice the bytes: the result exists twice while it is copied into a TVM tensor.
    if nbytes > sum(operand_bytes.values()) + _MAX_GROWTH_BYTES or not budget().has_bytes(2 * nbytes):
        return None
    arrays = evaluate(lambda: node, operands, opset)
    if arrays is None or any(array.dtype.kind in "OUSc" for array in arrays):
        return None
    budget().take_bytes(sum(array.nbytes for array in arrays), f"{node.op_type} node {_name_of(node)!r}")
    return [make_const(array) for array in arrays]


def _name_of(node: onnx.NodeProto) -> str:
    """The name of a node, or of its first result if the node is nameless."""
    return node.name or next(iter(node.output), "")


def _fold_fill(node: onnx.NodeProto, operands: list[np.ndarray | None]) -> list[tvm.ir.GenericConst] | None:
    """Result of a `ConstantOfShape`, filled in place; None if it is invalid, for its converter to report the error."""
    shape = operands[0] if operands else None
    fill = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
    value = np.zeros(1, np.float32) if fill is None else numpy_helper.to_array(fill)
    if shape is None or shape.size > MAX_RANK or value.size != 1 or value.dtype.kind in "OUSc":
        return None
    dims = tuple(int(size) for size in shape.reshape(-1))
    if any(size < 0 for size in dims):
        return None
    nbytes = int(np.prod(dims, dtype=object)) * value.dtype.itemsize
    budget().take_bytes(nbytes, f"ConstantOfShape node {_name_of(node)!r}")
    try:
        tensor = empty(dims, str(value.dtype), tvm.cpu())
        np.from_dlpack(tensor).fill(value.reshape(())[()])
    except (BufferError, RuntimeError, TypeError, ValueError):  # numpy lacks this element type
        return [make_const(np.full(dims, value.reshape(())))]
    return [relax.const(tensor)]
