"""Compute a node at import time when everything it reads is known, with ONNX's own reference implementation.

Exporters spell out shape arithmetic as chains of small nodes (Shape, Gather, Concat, ...). Folding them here, by the
definition of the ops, leaves the shapes, axes and sizes that converters need as plain constants.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from tvm import relax

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
# Element types that relax constants and numpy agree on.
_DTYPES = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
}  # fmt: skip


def _result_elements(op_type: str, arrays: list[np.ndarray | None]) -> float:
    """Elements of the result of an op that can make a large tensor of small ones; 0 for other ops."""
    first = arrays[0] if arrays else None
    second = arrays[1] if len(arrays) > 1 else None
    if op_type == "ConstantOfShape" and first is not None:
        return math.prod(abs(int(dim)) for dim in first.reshape(-1))
    if op_type in ("Expand", "Tile") and first is not None and second is not None:
        return first.size * math.prod(abs(int(dim)) for dim in second.reshape(-1))
    if op_type == "Range" and len(arrays) == 3 and all(array is not None for array in arrays):
        start, limit, delta = (float(array.reshape(())) for array in arrays if array is not None)
        return abs(limit - start) / abs(delta) if delta else math.inf
    return 0


def fold(node: Node) -> relax.Expr | None:
    """The node's outputs as constants, or None where it cannot or should not be computed now."""
    if node.op_type not in _FOLDED or not any(node.has(i) for i in range(len(node.inputs))):
        return None
    arrays = [as_constant(value) if value is not None else None for value in node.inputs]
    for value, array in zip(node.inputs, arrays, strict=True):
        if value is not None and (array is None or array.size > MAX_ELEMENTS or str(array.dtype) not in _DTYPES):
            return None
    if _result_elements(node.op_type, arrays) > MAX_ELEMENTS:
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
