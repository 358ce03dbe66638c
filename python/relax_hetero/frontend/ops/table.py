"""Conversion of a node: by constant folding, this library's converters, stock TVM's, or its ONNX function body."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx
import tvm
from tvm import relax, tirx
from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

from ..import_limits import MAX_RANK
from .fold import fold
from .function_body import body_with_graphs, expand, has_body
from .node import STANDARD, Dim, Node, as_dim
from .required_sizes import MAX_ELEMENTS, laid_by_axis, shown, with_one_shape, with_short_sizes

Convert = Callable[[Node], Any]
"""Converter of this library: from a node to its output, or to a `relax.Tuple` of its outputs."""

OpKey: TypeAlias = "tuple[str, str]"
"""(domain, op type)."""

CLASSICAL = "ai.onnx.ml"  # domain of classical machine learning
MICROSOFT = "com.microsoft"  # domain of ONNX Runtime's ops

_CONVERTERS: dict[OpKey, Convert] = {}
# Stock TVM's table mixes ops of ONNX Runtime's domain in, which ONNX does not define.
_STOCK: dict[str, Any] = {name: converter for name, converter in _get_convert_map().items() if onnx.defs.has(name)}
_BROADCASTING = frozenset(
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
    "Mod Mul Or Pow Sub Sum Where Xor".split()
)
"""Op types whose inputs all broadcast."""
_BROADCAST_BY_AXIS = frozenset("Add And Div Equal Greater Less Mul Or Pow Sub Xor".split())
"""Op types that had an attribute `axis` for broadcasting."""
_FIRST_BROADCASTING_OPSET = 7  # first opset with numpy's broadcasting
_SIZE_OPS = frozenset(
    "AffineGrid CenterCropPad Col2Im ConstantOfShape Expand Pad ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp "
    "ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Reshape Resize Slice Squeeze Tile Unsqueeze "
    "Upsample".split()
)
"""Op types whose inputs after the data are vectors with one or two entries per dimension."""
_NUMBER_OPS = _SIZE_OPS | frozenset("CumProd CumSum OneHot Split TopK".split())
"""Op types whose inputs after the data give the result's shape, or an axis."""


_SAME_SHAPE_OPS = frozenset({"Hardmax", "LogSoftmax", "Softmax"})
"""Op types whose result has their input's shape, and whose kernels do not support empty tensors."""


def takes_size(op_type: str, index: int) -> bool:
    """Return whether an op type reads sizes, axes or a number of elements from input `index`."""
    return op_type in _NUMBER_OPS and index >= (op_type != "ConstantOfShape") and (op_type, index) != ("OneHot", 2)


def converts(*op_types: str, domain: str = STANDARD) -> Callable[[Convert], Convert]:
    """Register a function as the converter of these op types of a domain.

    An op with the same meaning in two domains has two decorators.
    """

    def register(function: Convert) -> Convert:
        for op_type in op_types:
            assert (domain, op_type) not in _CONVERTERS, op_type
            _CONVERTERS[domain, op_type] = function
        return function

    return register


def convert_node(node: Node) -> Any:
    """Convert one node.

    Raises FrontendError if the op, or this form of it, cannot be imported, and SizeIsBounded if its inputs imply a new
    upper bound of a size of the model's inputs.
    """
    if node.domain == STANDARD:
        _check_lengths(node)
        if node.opset < _FIRST_BROADCASTING_OPSET and node.op_type in _BROADCAST_BY_AXIS:
            node = laid_by_axis(node)
        folded = fold(node)
        if folded is not None:
            return folded
        if node.op_type in _BROADCASTING:
            node = with_one_shape(node)
        if node.op_type in _SAME_SHAPE_OPS and 0 in (_shape_of(node.inputs[0]) or ()):
            return node.inputs[0]
    value = _CONVERTERS.get((node.domain, node.op_type), convert_by_default)(node)
    if not isinstance(value, relax.Expr):
        return value
    value = node.builder.normalize(value)
    _check_extents(node, value.ty)
    return with_short_sizes(node, value)


def _check_extents(node: Node, ty: tvm.ir.Type) -> None:
    """Refuse a result with negative static sizes, or with more elements than memory can hold."""
    if isinstance(ty, tvm.ir.TupleType):
        for field in ty.fields:
            _check_extents(node, field)
    shape = ty.shape if isinstance(ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        return
    static_dims = [int(dim) for dim in shape.values if isinstance(dim, tirx.IntImm)]
    if any(size < 0 for size in static_dims):
        raise node.refusal(f"its result would have the shape {shown(shape.values)}, expected sizes of 0 and more")
    if math.prod(max(size, 1) for size in static_dims) > MAX_ELEMENTS:
        raise node.refusal(f"its result would have the shape {shown(shape.values)}, more elements than memory can hold")


def _check_lengths(node: Node) -> None:
    """Refuse vectors of sizes, axes or pads that are longer than the maximum rank allows."""
    if node.op_type not in _SIZE_OPS:
        return
    for index in range(0 if node.op_type == "ConstantOfShape" else 1, len(node.inputs)):
        shape = _shape_of(node.inputs[index])
        if shape is not None and len(shape) == 1 and isinstance(shape[0], int) and shape[0] > 2 * MAX_RANK:
            raise node.refusal(f"input {index} has {shape[0]:,} entries, expected at most 2 for each dimension")


def convert_by_default(node: Node) -> Any:
    """Convert a node by stock TVM's converter, else by its function body."""
    if node.domain != STANDARD:
        raise node.refusal(f"this op of domain {node.domain!r} cannot be imported")
    if node.op_type in _STOCK:
        return convert_by_stock(node)
    if has_body(node.op_type, node.opset):
        return expand(node, convert_node)
    raise node.refusal("this op cannot be imported")


def expansion_with_graphs(node: Node) -> tuple[onnx.FunctionProto, onnx.NodeProto] | None:
    """The function body of an op without a converter, and its call, if nodes in it have subgraphs; else None."""
    if (STANDARD, node.op_type) in _CONVERTERS or node.op_type in _STOCK:
        return None
    return body_with_graphs(node)


def convert_by_body(node: Node) -> Any:
    """Convert a node by its function body."""
    if not has_body(node.op_type, node.opset):
        raise node.refusal(f"ONNX opset {node.opset} does not define it by a function body")
    return expand(node, convert_node)


def convert_by_stock(node: Node) -> Any:
    """Convert a node by stock TVM's converter; its errors become a `FrontendError`."""
    attributes = dict(node.attributes)
    attributes["tvm_custom"] = {"name": node.name, "num_outputs": node.num_outputs}
    inputs = _StockInputs(_stock_input(node, index) for index in range(len(node.inputs)))
    try:
        return _STOCK[node.op_type].get_converter(node.opset)(node.builder, inputs, attributes, [{}, {}])
    except Exception as error:
        raise node.refusal(f"stock TVM's converter failed: {type(error).__name__}: {error}") from error


def _stock_input(node: Node, index: int) -> Any:
    """Convert an input that is a tensor in ONNX to one; sequences and empty optionals are unchanged."""
    value = node.inputs[index]
    is_shape = isinstance(value, relax.Expr) and isinstance(value.ty, (relax.ShapeType, tvm.ir.PrimType))
    return node.tensor(index) if is_shape else value


class _StockInputs(list[Any]):
    """Inputs of a stock converter, which reads absent optional inputs past the end."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(max(len(self), index.stop or 0)))]
        return super().__getitem__(index) if index < len(self) else None

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


@dataclass(frozen=True)
class Converter:
    """An entry of the table, with the interface of stock TVM's converters."""

    domain: str
    op_type: str

    def get_converter(self, opset: int) -> Callable[..., Any]:
        """The conversion for one opset: `(builder, inputs, attributes, scope) -> expression`."""

        def convert(builder: relax.BlockBuilder, inputs: Any, attributes: dict[str, Any], scope: Any) -> Any:
            custom = attributes.get("tvm_custom", {})
            outputs = custom.get("num_outputs", 1)
            name = custom.get("name", "")
            return convert_node(
                Node(self.op_type, name, opset, builder, list(inputs), attributes, outputs, domain=self.domain)
            )

        return convert


def converters() -> dict[OpKey, Converter]:
    """Table of all ops that can be imported."""
    schemas = (schema for schema in onnx.defs.get_all_schemas() if schema.domain == STANDARD)
    bodies = {schema.name for schema in schemas if has_body(schema.name, schema.since_version)}
    keys = {*_CONVERTERS, *((STANDARD, op_type) for op_type in {*_STOCK, *bodies})}
    return {key: Converter(*key) for key in sorted(keys)}


def _shape_of(value: Any) -> list[Dim] | None:
    is_tensor = isinstance(value, (relax.Var, tvm.ir.GenericConst)) and isinstance(value.ty, relax.TensorType)
    if not is_tensor or not isinstance(value.ty.shape, relax.ShapeExpr):
        return None
    return [as_dim(dim) for dim in value.ty.shape.values]
