"""Conversion of a node: folded, by a converter of this library, by stock TVM's, or through its ONNX function body."""

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
"""A converter of ours: from a node to its output, or to a `relax.Tuple` of its outputs."""

OpKey: TypeAlias = "tuple[str, str]"
"""A domain and an op type: ops of two domains may share a name and mean different things."""

CLASSICAL = "ai.onnx.ml"
"""The domain of classical machine learning."""

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own ops."""

_OURS: dict[OpKey, Convert] = {}
# Stock TVM looks up ops of ONNX Runtime's own domain by the same names; ONNX does not define those.
_STOCK: dict[str, Any] = {name: converter for name, converter in _get_convert_map().items() if onnx.defs.has(name)}
_BROADCASTING = frozenset(
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
    "Mod Mul Or Pow Sub Sum Where Xor".split()
)
"""Op types all of whose inputs broadcast to each other."""
_LAID_BY_AXIS = frozenset("Add And Div Equal Greater Less Mul Or Pow Sub Xor".split())
"""Op types whose second input once was laid along the first by an attribute."""
_OPSET_OF_BROADCASTING = 7
"""The first opset whose ops broadcast as numpy does."""
_TAKE_SIZES = frozenset(
    "AffineGrid CenterCropPad Col2Im ConstantOfShape Expand Pad ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp "
    "ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Reshape Resize Slice Squeeze Tile Unsqueeze "
    "Upsample".split()
)
"""Op types whose inputs behind the data are vectors with an entry or two for each dimension."""
_TAKE_NUMBERS = _TAKE_SIZES | frozenset("CumProd CumSum OneHot Split TopK".split())
"""Op types whose inputs after the data give the result's shape, or an axis."""


_SHAPED_AS_INPUT = frozenset({"Hardmax", "LogSoftmax", "Softmax"})
"""Op types whose result has the shape of their input, and whose kernels need elements."""


def takes_size(op_type: str, place: int) -> bool:
    """Return whether ops of a type read sizes, axes or a number of elements from their input at `place`."""
    return op_type in _TAKE_NUMBERS and place >= (op_type != "ConstantOfShape") and (op_type, place) != ("OneHot", 2)


def converts(*op_types: str, domain: str = STANDARD) -> Callable[[Convert], Convert]:
    """Register a function as the converter of these op types of a domain.

    An op that means the same in two domains is registered for both, by two decorators.
    """

    def register(function: Convert) -> Convert:
        for op_type in op_types:
            assert (domain, op_type) not in _OURS, op_type
            _OURS[domain, op_type] = function
        return function

    return register


def convert_node(node: Node) -> Any:
    """Convert one node.

    Raises
    ------
    FrontendError
        If the op, or this form of it, cannot be imported.
    SizeIsBounded
        If its inputs show that a size of the model's inputs is bounded which was not known to be.
    """
    if node.domain == STANDARD:
        _check_lengths(node)
        if node.opset < _OPSET_OF_BROADCASTING and node.op_type in _LAID_BY_AXIS:
            node = laid_by_axis(node)
        folded = fold(node)
        if folded is not None:
            return folded
        if node.op_type in _BROADCASTING:
            node = with_one_shape(node)
        if node.op_type in _SHAPED_AS_INPUT and 0 in (_shape_of(node.inputs[0]) or ()):
            return node.inputs[0]
    value = _OURS.get((node.domain, node.op_type), convert_by_default)(node)
    if not isinstance(value, relax.Expr):
        return value
    value = node.builder.normalize(value)
    _check_extents(node, value.ty)
    return with_short_sizes(node, value)


def _check_extents(node: Node, ty: tvm.ir.Type) -> None:
    """Refuse a result whose known sizes no memory can hold, before anything is made of it."""
    if isinstance(ty, tvm.ir.TupleType):
        for field in ty.fields:
            _check_extents(node, field)
    shape = ty.shape if isinstance(ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        return
    known = [int(dim) for dim in shape.values if isinstance(dim, tirx.IntImm)]
    if any(size < 0 for size in known):
        raise node.refusal(f"its result would have the shape {shown(shape.values)}, expected sizes of 0 and more")
    if math.prod(max(size, 1) for size in known) > MAX_ELEMENTS:
        raise node.refusal(f"its result would have the shape {shown(shape.values)}, more elements than memory can hold")


def _check_lengths(node: Node) -> None:
    """Refuse vectors of sizes, axes or pads with more entries than any tensor has dimensions, known or not."""
    if node.op_type not in _TAKE_SIZES:
        return
    for index in range(0 if node.op_type == "ConstantOfShape" else 1, len(node.inputs)):
        shape = _shape_of(node.inputs[index])
        if shape is not None and len(shape) == 1 and isinstance(shape[0], int) and shape[0] > 2 * MAX_RANK:
            raise node.refusal(f"input {index} has {shape[0]:,} entries, expected at most 2 for each dimension")


def convert_by_default(node: Node) -> Any:
    """Convert a node without a converter of ours: by stock TVM's, else through its function body."""
    if node.domain != STANDARD:
        raise node.refusal(f"this op of domain {node.domain!r} cannot be imported")
    if node.op_type in _STOCK:
        return convert_by_stock(node)
    if has_body(node.op_type, node.opset):
        return expand(node, convert_node)
    raise node.refusal("this op cannot be imported")


def expansion_with_graphs(node: Node) -> tuple[onnx.FunctionProto, onnx.NodeProto] | None:
    """The body through which an op without a converter is imported, and its call, if nodes in it have graphs."""
    if (STANDARD, node.op_type) in _OURS or node.op_type in _STOCK:
        return None
    return body_with_graphs(node)


def convert_by_body(node: Node) -> Any:
    """Convert a node through the function that ONNX defines its op by."""
    if not has_body(node.op_type, node.opset):
        raise node.refusal(f"ONNX opset {node.opset} does not define it by other ops")
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
    """An input as a tensor where it is one in ONNX; sequences and empty optionals as they are."""
    value = node.inputs[index]
    is_shape = isinstance(value, relax.Expr) and isinstance(value.ty, (relax.ShapeType, tvm.ir.PrimType))
    return node.tensor(index) if is_shape else value


class _StockInputs(list[Any]):
    """The inputs of a stock converter, which reads past the end to find an optional input absent."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(max(len(self), index.stop or 0)))]
        return super().__getitem__(index) if index < len(self) else None

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


@dataclass(frozen=True)
class Converter:
    """An entry of the table, called as stock TVM calls its converters."""

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
    """The whole table: every op that can be imported, by domain and op type."""
    schemas = (schema for schema in onnx.defs.get_all_schemas() if schema.domain == STANDARD)
    bodies = {schema.name for schema in schemas if has_body(schema.name, schema.since_version)}
    keys = {*_OURS, *((STANDARD, op_type) for op_type in {*_STOCK, *bodies})}
    return {key: Converter(*key) for key in sorted(keys)}


def _shape_of(value: Any) -> list[Dim] | None:
    is_tensor = isinstance(value, (relax.Var, tvm.ir.GenericConst)) and isinstance(value.ty, relax.TensorType)
    if not is_tensor or not isinstance(value.ty.shape, relax.ShapeExpr):
        return None
    return [as_dim(dim) for dim in value.ty.shape.values]
