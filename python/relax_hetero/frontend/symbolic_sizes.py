"""Arithmetic on symbolic sizes: nodes that compute shapes become symbolic expressions instead of kernels.

Exporters compute shapes with nodes: ``Concat(Gather(Shape(x), [0]), [-1, 768])``. Symbolic dimensions pass through such
nodes as expressions, so that the final reshape has a shape that kernels can be compiled for, and no device has to add
two integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import helper
from tvm import relax, sym, tirx
from tvm_ffi import structural_map

from ..tir.core.builder import int64
from ..transform.ir.requirements import DIVISIONS, divisors_in
from .joined_sizes import analyzer_for, simplified

_MAX_ELEMENTS = 64  # larger constants are not sizes

# Array of ints and int64 expressions. A rule returns one, or None if it does not apply.
_Sizes = np.ndarray
_Rule = Callable[[list["_Sizes | None"], dict[str, Any]], "_Sizes | None"]


def compute_sizes(node: onnx.NodeProto, operands: Sequence[Any]) -> relax.Expr | tvm.tirx.Expr | None:
    """Evaluate a node on sizes; the result is a shape for a vector, an expression for a scalar, or a constant.

    `node`: node of the ONNX standard; `operands`: a value per input, None for an omitted optional one. Returns None if
    the node has no rule, or operands other than sizes and small integer constants.
    """
    rule = _RULES.get(node.op_type)
    if rule is None or not any(map(_is_symbolic, operands)):
        return None
    arrays = [None if operand is None else sizes_of(operand) for operand in operands]
    if any(array is None and operand is not None for array, operand in zip(arrays, operands, strict=True)):
        return None
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    try:
        result = rule(arrays, attributes)
    except (ValueError, IndexError, TypeError):
        return None  # invalid: the op's converter reports the error
    return None if result is None else _as_expr(result)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, relax.ShapeExpr) or (
        tvm.ir.is_prim_expr(value) and str(value.ty.dtype) == "int64" and not isinstance(value, tirx.IntImm)
    )


def sizes_of(value: Any) -> _Sizes | None:
    """Convert sizes to an array of ints and expressions; None for other values."""
    if isinstance(value, relax.ShapeExpr):
        return _array(list(value.values))
    if _is_symbolic(value) or isinstance(value, tirx.IntImm):
        return _array([value]).reshape(())
    if isinstance(value, tvm.ir.GenericConst):
        array = value.value.numpy()
        if array.dtype in (np.int64, np.int32, np.bool_) and array.size <= _MAX_ELEMENTS:
            return _array([bool(x) if array.dtype == np.bool_ else int(x) for x in array.flat]).reshape(array.shape)
    return None


def _array(values: Sequence[Any]) -> _Sizes:
    """Vector of objects (numpy would try to iterate over expressions)."""
    array = np.empty(len(values), object)
    for index, value in enumerate(values):
        array[index] = int(value) if isinstance(value, tirx.IntImm) else value
    return array


def _as_expr(sizes: _Sizes) -> relax.Expr | tvm.tirx.Expr | None:
    values = [value if isinstance(value, (bool, int)) else simplified(value) for value in sizes.reshape(-1)]
    if all(isinstance(value, bool) for value in values):
        return relax.const(np.array(values, np.bool_).reshape(sizes.shape), "bool")
    if all(isinstance(value, int) for value in values):
        return relax.const(np.array(values, np.int64).reshape(sizes.shape), "int64")
    if sizes.ndim == 0:
        return values[0]
    return relax.ShapeExpr(values) if sizes.ndim == 1 else None


def common_shape(first: relax.TensorType, second: relax.TensorType, name: str) -> list[Any]:
    """Equal sizes of two types of one rank, and new symbols ``<name>_d<axis>`` for different ones.

    Equal sizes are defined in the outer scope, because symbols of one scope do not occur in the other.
    """
    analyzer = sym.Analyzer()
    shapes = [ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else [None] * ty.ndim for ty in (first, second)]
    sizes: list[Any] = []
    for axis, (a, b) in enumerate(zip(*shapes, strict=True)):
        is_equal = a is not None and b is not None and (a.same_as(b) or analyzer.can_prove_equal(a, b))
        sizes.append(a if is_equal else tirx.Var(f"{name}_d{axis}", "int64"))
    return sizes


def with_safe_divisions(value: Any) -> Any:
    """Replace divisors of 0 by 1, because sizes are computed before a call with such a size is refused."""
    if not divisors_in(value):
        return value
    analyzer = analyzer_for(value)

    def replace(part: Any) -> Any:
        if isinstance(part.b, tirx.IntImm):
            return part
        is_size = analyzer.can_prove(part.b >= 0)
        safe = tirx.max(part.b, int64(1)) if is_size else tirx.Select(tirx.EQ(part.b, int64(0)), int64(1), part.b)
        return type(part)(part.a, safe)

    for kind in DIVISIONS:
        value = structural_map(value, (kind, replace))
    return value


def _ints(array: _Sizes | None) -> list[int] | None:
    if array is None:
        return None
    values = list(array.reshape(-1))
    if not all(isinstance(value, int) for value in values):
        raise ValueError("not known")
    return values


def _data(operands: list[_Sizes | None], index: int = 0) -> _Sizes:
    value = operands[index] if index < len(operands) else None
    if value is None:
        raise ValueError("missing")
    return value


def _axes(operands: list[_Sizes | None], attributes: dict[str, Any]) -> list[int] | None:
    """Axes from the second input, or from the attribute (before opset 13)."""
    return _ints(operands[1]) if len(operands) > 1 else attributes.get("axes")


def _gather(operands: list[_Sizes | None], attributes: dict[str, Any]) -> _Sizes:
    indices = _data(operands, 1)
    positions = np.array(_ints(indices), np.int64).reshape(indices.shape)
    return np.asarray(np.take(_data(operands), positions, axis=attributes.get("axis", 0)), object)


def _concat(operands: list[_Sizes | None], attributes: dict[str, Any]) -> _Sizes:
    return np.concatenate([_data(operands, index) for index in range(len(operands))], axis=attributes["axis"])


def _slice(operands: list[_Sizes | None], attributes: dict[str, Any]) -> _Sizes:
    data = _data(operands)
    if len(operands) < 3:  # before opset 10 these are attributes
        starts, ends, axes, steps = attributes["starts"], attributes["ends"], attributes.get("axes"), None
    else:
        starts, ends = _ints(_data(operands, 1)), _ints(_data(operands, 2))
        axes, steps = (_ints(operands[index]) if len(operands) > index else None for index in (3, 4))
    if data.ndim != 1 or len(starts) != 1 or (axes or [0])[0] not in (0, -1):
        raise ValueError("not a vector")
    return data[slice(starts[0], ends[0], (steps or [1])[0])]


def _squeeze(operands: list[_Sizes | None], attributes: dict[str, Any]) -> _Sizes:
    axes = _axes(operands, attributes)
    return np.squeeze(_data(operands), None if axes is None else tuple(axes))


def _reshape(operands: list[_Sizes | None], attributes: dict[str, Any]) -> _Sizes:
    target = _ints(_data(operands, 1))
    if target not in ([-1], [1], []):
        raise ValueError("not a vector")
    return _data(operands).reshape(tuple(target))


def _cast(operands: list[_Sizes | None], attributes: dict[str, Any]) -> _Sizes | None:
    return _data(operands) if attributes["to"] == onnx.TensorProto.INT64 else None


def _reduce_prod(operands: list[_Sizes | None], attributes: dict[str, Any]) -> _Sizes:
    data = _data(operands)
    product: Any = 1
    for value in data.reshape(-1):
        product = value * product
    keeps = attributes.get("keepdims", 1)
    return _array([product]).reshape((1,) * data.ndim if keeps else ())


def _elementwise(operation: Callable[..., Any]) -> _Rule:
    def rule(operands: list[_Sizes | None], attributes: dict[str, Any]) -> _Sizes | None:
        arrays = np.broadcast_arrays(*(_data(operands, index) for index in range(len(operands))))
        results = [operation(*values) for values in zip(*(array.reshape(-1) for array in arrays), strict=True)]
        return None if any(result is None for result in results) else _array(results).reshape(arrays[0].shape)

    return rule


def _divide(a: Any, b: Any) -> Any:
    """Divide integers, truncating as ONNX does; for non-negative sizes as floordiv, which simplifies better."""
    if isinstance(a, int) and isinstance(b, int):
        return None
    analyzer = analyzer_for(a, b)
    is_size = analyzer.can_prove(tirx.all(int64(a) >= 0, int64(b) >= 0)) or is_size_where_not_empty(a, b)
    return with_safe_divisions(simplified((tirx.floordiv if is_size else tirx.truncdiv)(int64(a), int64(b))))


def is_size_where_not_empty(a: Any, b: Any) -> bool:
    """Return whether `a` is not negative if no symbolic size is 0, as in ``(n - 1) / 2``, so that floordiv applies.

    Convolutions have such sizes, rounded down. With truncation they would differ from the same size computed by nodes
    of the model, and every sum of the two would broadcast. The caller must require that `a` is not negative.
    """
    if isinstance(a, int) or not isinstance(b, int) or b <= 0:
        return False
    return not analyzer_for(a).can_prove(a >= 0) and analyzer_for(a, minimum=1).can_prove(a >= 0)


def _modulo(a: Any, b: Any) -> Any:
    """ONNX's Mod of integers, whose sign is the divisor's (floormod)."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b if b else None
    return with_safe_divisions(simplified(tirx.floormod(int64(a), int64(b))))


def _mod(operands: list[_Sizes | None], attributes: dict[str, Any]) -> _Sizes | None:
    if not attributes.get("fmod", 0):
        return _elementwise(_modulo)(operands, attributes)
    analyzer = analyzer_for(*(value for operand in operands if operand is not None for value in operand.reshape(-1)))
    is_size = all(
        analyzer.can_prove(int64(value) >= 0) for operand in operands if operand is not None for value in operand.flat
    )
    return _elementwise(_modulo)(operands, attributes) if is_size else None


def _compare(compare: Callable[[Any, Any], bool]) -> _Rule:
    """A comparison of numbers, or of sizes if its result is provable."""

    def operation(a: Any, b: Any) -> bool | None:
        if isinstance(a, int) and isinstance(b, int):
            return compare(a, b)
        analyzer, condition = analyzer_for(a, b), compare(int64(a), int64(b))
        if analyzer.can_prove(condition):
            return True
        return False if analyzer.can_prove(tirx.Not(condition)) else None

    return _elementwise(operation)


def _equal(a: Any, b: Any) -> bool | None:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    analyzer = analyzer_for(a, b)
    if analyzer.can_prove_equal(int64(a), int64(b)):
        return True
    return False if analyzer.can_prove(tirx.NE(int64(a), int64(b))) else None


def _choose(condition: Any, a: Any, b: Any) -> Any:
    return (a if condition else b) if isinstance(condition, bool) else None


def _extreme(integer: Callable[..., int], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    def operation(first: Any, *rest: Any) -> Any:
        for value in rest:
            are_ints = isinstance(first, int) and isinstance(value, int)
            first = integer(first, value) if are_ints else symbolic(int64(first), int64(value))
        return first

    return operation


_RULES: dict[str, _Rule] = {
    "Abs": _elementwise(lambda a: abs(a) if isinstance(a, int) else simplified(tirx.max(a, -a))),
    "Add": _elementwise(lambda a, b: a + b),
    "Cast": _cast,
    "Concat": _concat,
    "Div": _elementwise(_divide),
    "Equal": _elementwise(_equal),
    "Gather": _gather,
    "Greater": _compare(lambda a, b: a > b),
    "GreaterOrEqual": _compare(lambda a, b: a >= b),
    "Identity": lambda operands, _: _data(operands),
    "Less": _compare(lambda a, b: a < b),
    "LessOrEqual": _compare(lambda a, b: a <= b),
    "Max": _elementwise(_extreme(max, tirx.max)),
    "Min": _elementwise(_extreme(min, tirx.min)),
    "Mod": _mod,
    "Mul": _elementwise(lambda a, b: a * b),
    "Neg": _elementwise(lambda a: -a),
    "ReduceProd": _reduce_prod,
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _elementwise(lambda a, b: a - b),
    "Unsqueeze": lambda operands, attributes: np.expand_dims(_data(operands), tuple(_axes(operands, attributes) or ())),
    "Where": _elementwise(_choose),
}
