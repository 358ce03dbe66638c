"""Constant folding: computation of nodes with constant operands at import, by ONNX's reference implementation.

Exporters write shape arithmetic as chains of small nodes (Shape, Gather, Concat, ...). Folding yields the shapes, axes
and sizes that converters need as constants.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from tvm import relax

from ..import_limits import budget
from .node import Node, as_constant, const

MAX_ELEMENTS = 1 << 16  # larger inputs or results are not folded: they are weights

# Ops of shape arithmetic, for which the reference is correct in every opset. For some other ops it is not (softmax
# before opset 13, LRN, the 1-norm of negative numbers).
_FOLDED = frozenset(
    """Abs Add And Cast CastLike Ceil Clip Compress Concat ConstantOfShape Cos CumSum Div Equal Exp Expand Flatten Floor
    Gather GatherElements GatherND Greater GreaterOrEqual Identity Less LessOrEqual Log Max Min Mod Mul Neg NonZero Not
    Or Pow Range Reciprocal ReduceMax ReduceMin ReduceProd ReduceSum Reshape Round Shape Sign Sin Size Slice Split Sqrt
    Squeeze Sub Sum Tile Transpose Trilu Unsqueeze Where Xor""".split()
)
# Ops that stock converters fold, for any size.
_STOCK_FOLDS = frozenset("BitShift BitwiseAnd BitwiseOr BitwiseXor Mean PRelu".split())
# Element types that are the same in relax constants and numpy.
_DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
}  # fmt: skip


# Ops whose results may be large although their inputs are small.
_EXPANDING_OPS = frozenset({"ConstantOfShape", "Expand", "Range", "Tile"})

# Maximum elements of results of other ops: a mask of positions, two vectors broadcast to a matrix.
_MAX_RESULT_ELEMENTS = 1 << 22


def result_bytes(node: onnx.NodeProto, arrays: Sequence[np.ndarray | None]) -> int:
    """Upper bound of the bytes of a node's results, without computing them."""
    itemsize = max((array.dtype.itemsize for array in arrays if array is not None), default=8)
    for attribute in node.attribute:
        if attribute.name == "to" and node.op_type == "Cast":
            itemsize = max(itemsize, 8)
    if node.op_type == "CastLike":
        arrays = arrays[:1]
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    return result_elements(node.op_type, arrays, attributes) * itemsize


def result_elements(
    op_type: str, arrays: Sequence[np.ndarray | None], attributes: Mapping[str, Any] | None = None
) -> int:
    """Upper bound of the elements of a node's results, without computing them."""
    constants = [array for array in arrays if array is not None]
    first = constants[0] if constants else np.zeros(0)
    second = constants[1] if len(constants) > 1 else np.zeros(0)
    if op_type == "ConstantOfShape":
        return math.prod(abs(int(dim)) for dim in first.reshape(-1))
    if op_type in ("Expand", "Tile"):
        return int(first.size * math.prod(abs(int(dim)) for dim in second.reshape(-1)))
    if op_type == "Range":
        return _range_elements(constants)
    if op_type == "Concat":
        return sum(array.size for array in constants)
    if op_type == "Gather":
        axis = int((attributes or {}).get("axis", 0))
        size = first.shape[axis] if -first.ndim <= axis < first.ndim else 1
        return int(second.size * (first.size // max(size, 1)))
    if op_type == "GatherND":
        return int(second.size * first.size)
    if op_type == "NonZero":
        return int(first.size * max(first.ndim, 1))
    # Other ops: at most the broadcast shape of the inputs.
    rank = max((array.ndim for array in constants), default=0)
    aligned = [(1,) * (rank - array.ndim) + array.shape for array in constants]
    broadcast = math.prod(max(sizes) for sizes in zip(*aligned, strict=True))
    return max(broadcast, sum(int(array.size) for array in constants[:1]))


def _range_elements(operands: Sequence[np.ndarray]) -> int:
    if len(operands) != 3 or any(array.size != 1 for array in operands):
        return 0
    start, limit, delta = (float(array.reshape(())) for array in operands)
    elements = abs(limit - start) / abs(delta) if delta else math.inf
    return int(elements) + 1 if math.isfinite(elements) else 1 << 63


def fold(node: Node) -> relax.Expr | None:
    """The node's outputs as constants, or None if it cannot or should not be folded."""
    if node.op_type not in _FOLDED | _STOCK_FOLDS or not any(node.has(i) for i in range(len(node.inputs))):
        return None
    arrays = [as_constant(value) if value is not None else None for value in node.inputs]
    if any(value is not None and array is None for value, array in zip(node.inputs, arrays, strict=True)):
        return None
    operands = [array for array in arrays if array is not None]
    elements = result_elements(node.op_type, arrays, node.attributes)
    # Check the budget in any case, because converters and the compiler would compute the result too.
    budget().check_bytes(elements * max(array.dtype.itemsize for array in operands), node.title)
    max_elements = MAX_ELEMENTS if node.op_type in _EXPANDING_OPS else _MAX_RESULT_ELEMENTS
    if node.op_type in _STOCK_FOLDS or elements > max_elements:
        return None
    if any(array.size > MAX_ELEMENTS or str(array.dtype) not in _DTYPES for array in operands):
        return None
    if any(isinstance(value, onnx.GraphProto) for value in node.attributes.values()):
        return None
    results = evaluate(node.proto, arrays, node.opset)
    if results is None or len(results) != node.num_outputs or any(str(r.dtype) not in _DTYPES for r in results):
        return None
    constants = [const(array) for array in results]
    return constants[0] if len(constants) == 1 else relax.Tuple(constants)


def evaluate(
    make_node: Callable[[], onnx.NodeProto], arrays: Sequence[np.ndarray | None], opset: int
) -> list[np.ndarray] | None:
    """The outputs of a node by ONNX's reference; None if it fails, or an output is not a tensor.

    `arrays` has an entry for each input of the node, None for an omitted optional one.
    """
    try:
        node = make_node()
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            feeds = {name: array for name, array in zip(node.input, arrays, strict=True) if array is not None}
            results = ReferenceEvaluator(node, opsets={"": opset}).run(None, feeds)
    except Exception:  # the reference does not cover every op and type
        return None
    tensors = [np.asarray(value) for value in results if isinstance(value, (np.ndarray, np.generic))]
    return tensors if len(tensors) == len(results) else None
