"""Compute a node at import time when everything it reads is known, with ONNX's own reference implementation.

Exporters spell out shape arithmetic as chains of small nodes (Shape, Gather, Concat, ...). Folding them here, by the
definition of the ops, leaves the shapes, axes and sizes that converters need as plain constants.
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

MAX_ELEMENTS = 1 << 16
"""Larger inputs or results stay in the graph: they are weights, not shape arithmetic."""

# What shapes, axes and positions are computed with. Of these the reference is right in every opset; of some other ops
# it is not (softmax before opset 13, LRN, the 1-norm of negative numbers).
_FOLDED = frozenset(
    """Abs Add And Cast CastLike Ceil Clip Compress Concat ConstantOfShape Cos CumSum Div Equal Exp Expand Flatten Floor
    Gather GatherElements GatherND Greater GreaterOrEqual Identity Less LessOrEqual Log Max Min Mod Mul Neg NonZero Not
    Or Pow Range Reciprocal ReduceMax ReduceMin ReduceProd ReduceSum Reshape Round Shape Sign Sin Size Slice Split Sqrt
    Squeeze Sub Sum Tile Transpose Trilu Unsqueeze Where Xor""".split()
)
# Stock converters compute these on constants, of any size.
_STOCK_FOLDS = frozenset("BitShift BitwiseAnd BitwiseOr BitwiseXor Mean PRelu".split())
# Element types that relax constants and numpy agree on.
_DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
}  # fmt: skip


# Results of these are given by what their inputs say, and may be large where those are small.
_LARGE_OF_SMALL = frozenset({"ConstantOfShape", "Expand", "Range", "Tile"})

# Elements that other results may have: a mask of positions, two vectors broadcast to each other.
_MAX_RESULT = 1 << 22


def result_bytes(node: onnx.NodeProto, arrays: Sequence[np.ndarray | None]) -> int:
    """The most bytes that the results of a node take in all, before it is computed."""
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
    """The most elements that the results of a node have in all, before it is computed."""
    known = [array for array in arrays if array is not None]
    first = known[0] if known else np.zeros(0)
    second = known[1] if len(known) > 1 else np.zeros(0)
    if op_type == "ConstantOfShape":
        return math.prod(abs(int(dim)) for dim in first.reshape(-1))
    if op_type in ("Expand", "Tile"):
        return int(first.size * math.prod(abs(int(dim)) for dim in second.reshape(-1)))
    if op_type == "Range":
        return _range_elements(known)
    if op_type == "Concat":
        return sum(array.size for array in known)
    if op_type == "Gather":
        axis = int((attributes or {}).get("axis", 0))
        size = first.shape[axis] if -first.ndim <= axis < first.ndim else 1
        return int(second.size * (first.size // max(size, 1)))
    if op_type == "GatherND":
        return int(second.size * first.size)
    if op_type == "NonZero":
        return int(first.size * max(first.ndim, 1))
    # Of other ops: along each axis at most as many as the largest input has, aligned as in a broadcast.
    rank = max((array.ndim for array in known), default=0)
    aligned = [(1,) * (rank - array.ndim) + array.shape for array in known]
    broadcast = math.prod(max(sizes) for sizes in zip(*aligned, strict=True))
    return max(broadcast, sum(int(array.size) for array in known[:1]))


def _range_elements(known: Sequence[np.ndarray]) -> int:
    if len(known) != 3 or any(array.size != 1 for array in known):
        return 0
    start, limit, delta = (float(array.reshape(())) for array in known)
    elements = abs(limit - start) / abs(delta) if delta else math.inf
    return int(elements) + 1 if math.isfinite(elements) else 1 << 63


def fold(node: Node) -> relax.Expr | None:
    """The node's outputs as constants, or None where it cannot or should not be computed now."""
    if node.op_type not in _FOLDED | _STOCK_FOLDS or not any(node.has(i) for i in range(len(node.inputs))):
        return None
    arrays = [as_constant(value) if value is not None else None for value in node.inputs]
    if any(value is not None and array is None for value, array in zip(node.inputs, arrays, strict=True)):
        return None
    known = [array for array in arrays if array is not None]
    elements = result_elements(node.op_type, arrays, node.attributes)
    # Whoever computes it: converters make tables of their own, and the compiler folds constants.
    budget().check_bytes(elements * max(array.dtype.itemsize for array in known), node.title)
    max_elements = MAX_ELEMENTS if node.op_type in _LARGE_OF_SMALL else _MAX_RESULT
    if node.op_type in _STOCK_FOLDS or elements > max_elements:
        return None
    if any(array.size > MAX_ELEMENTS or str(array.dtype) not in _DTYPES for array in known):
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
    """The outputs of a node by ONNX's reference; None where it fails, or gives anything but tensors.

    `arrays` has an entry for each input of the node, None for an optional one that is left out.
    """
    try:
        node = make_node()
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            feeds = {name: array for name, array in zip(node.input, arrays, strict=True) if array is not None}
            results = ReferenceEvaluator(node, opsets={"": opset}).run(None, feeds)
    except Exception:  # the reference does not cover every op and type; the converter then does the work or refuses
        return None
    tensors = [np.asarray(value) for value in results if isinstance(value, (np.ndarray, np.generic))]
    return tensors if len(tensors) == len(results) else None
