"""Vector code of elementwise expressions, in the epilogue of a product (`EpilogueCode`) or in a kernel (`elementwise`).

Rules of arithmetic
-------------------
- An op has the meaning of the Relax op of the same name, and NaN passes through `maximum`, `minimum`, `relu` and `clip`
  as in numpy. `round` rounds halves to even. Integer `divide` truncates.
- 16-bit floats are computed in float32, from loads to the store, and rounded where the expression casts and where the
  result is stored: more exact than op by op, and cheaper.
- A cast of a float to an integer truncates; for values out of range see `tir.math.casts.truncated`.
- An integer division never traps, not even on padding: division by zero gives the dividend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.expression import Expression
from ...encoding.functions import FUNCTIONS
from ...encoding.problem import Epilogue
from ...errors import EncodingError
from ...target.element_types import HALF_TYPES
from ..core.builder import Expr, Function, prefetch, vector_type
from ..core.view import Coordinates, OperandView
from ..math import vector_math
from ..math.casts import cast, computed_in, round_to_bfloat16
from .expression_ops import FLOAT64_OPS, FLOAT_OPS, INT_OPS, QUANTIZE, quantize, with_quantize


@dataclass(frozen=True)
class _Value:
    """An operand or intermediate: its nominal type, and its value in the type of its arithmetic."""

    dtype: str
    value: tirx.Expr


Ops = Mapping[str, Callable[..., tirx.Expr]]
"""Functions that write the ops of an expression, for operands of one type."""


def ops_for(dtype: str) -> Ops:
    """The ops of CPUs."""
    if not _is_float(dtype):
        return INT_OPS
    return FLOAT64_OPS if dtype == "float64" else FLOAT_OPS


def emit(
    expression: Expression,
    values: Sequence[tirx.Expr],
    dtypes: Sequence[str],
    lanes: int,
    ops: Callable[[str], Ops] = ops_for,
) -> tirx.Expr:
    """An expression over vectors; called while a PrimFunc is being built, where it binds intermediates.

    Parameters
    ----------
    values : sequence of PrimExpr
        Operands of `lanes` lanes; scalars are broadcast.
    dtypes : sequence of str
        Element types of the operands. A value may have the type itself or that of `computed_in`.
    ops : callable
        The device's ops for an element type.

    Returns
    -------
    PrimExpr
        Value of type `expression.dtype(dtypes)` with `lanes` lanes.

    Raises
    ------
    EncodingError
        If two operands of an op differ in type, or an op does not exist for a type.
    """
    operands = []
    for value, dtype in zip(values, dtypes, strict=True):
        vector = cast(value, computed_in(dtype))
        if lanes > 1 and vector.ty.dtype.lanes == 1:
            vector = T.broadcast(vector, lanes)
        operands.append(_Value(dtype, vector if dtype == "bool" else vector_math.once(vector)))

    def apply(op: str, args: list[Any], params: tuple[Any, ...]) -> Any:
        if op == "number":
            return params[0]
        if op == QUANTIZE:
            return _Value(params[-1], vector_math.once(quantize(_require_typed(expression, args[0]).value, *params)))
        if op == "cast":
            return _cast(_require_typed(expression, args[0]), params[0])
        if op == "where":
            return _where(expression, *args)
        typed = [arg for arg in args if isinstance(arg, _Value)]
        if not typed:
            raise EncodingError(f"{op} in expression {expression} has numbers only; their type is unknown")
        types = sorted({arg.dtype for arg in typed})
        if len(types) != 1:
            raise EncodingError(f"{op} in expression {expression} meets element types {types}; expected one")
        like = typed[0]
        terms = [arg.value if isinstance(arg, _Value) else vector_math.constant(like.value, arg) for arg in args]
        function = ops(like.dtype).get(op)
        if function is None and _is_float(like.dtype) and FUNCTIONS[op].formula:
            return Expression.parse(FUNCTIONS[op].formula).fold(args, apply)
        if function is None:
            raise EncodingError(f"{op} in expression {expression} does not exist for {like.dtype}")
        return _Value(like.dtype, vector_math.once(function(*terms, *params)))

    quantized = with_quantize(expression, dtypes)
    if quantized.term.op == "cast" and quantized.term.params[0] in HALF_TYPES:
        # Rounded once, from the stored type's wider one, not to float32 first.
        unrounded = _require_typed(expression, Expression(quantized.term.args[0]).fold(operands, apply))
        return cast(unrounded.value, quantized.term.params[0])
    result = _require_typed(expression, quantized.fold(operands, apply))
    return cast(result.value, result.dtype)


def _require_typed(expression: Expression, value: Any) -> _Value:
    if not isinstance(value, _Value):
        raise EncodingError(f"expression {expression} is a number; its type is unknown")
    return value


def _where(expression: Expression, condition: Any, then: Any, otherwise: Any) -> _Value:
    """Selection between two values, one of which may be a number; an integer condition holds where it is not zero."""
    typed = [arg for arg in (then, otherwise) if isinstance(arg, _Value)]
    if not typed or not isinstance(condition, _Value) or any(arg.dtype != typed[0].dtype for arg in typed):
        raise EncodingError(f"where in expression {expression}: expected a condition and values of one type")
    like = typed[0]
    choices = [
        arg.value if isinstance(arg, _Value) else vector_math.constant(like.value, arg) for arg in (then, otherwise)
    ]
    holds = condition.value
    if condition.dtype != "bool":
        holds = tirx.NE(holds, vector_math.constant(holds, 0))
    return _Value(like.dtype, vector_math.once(T.Select(holds, *choices)))


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _cast(value: _Value, dtype: str) -> _Value:
    if dtype == "bfloat16" and value.dtype != dtype:
        return _Value(dtype, round_to_bfloat16(cast(value.value, "float32")))
    if dtype == "float16":
        return _Value(dtype, vector_math.once(cast(cast(value.value, "float16"), "float32")))
    if dtype == "bool":
        # Not bound: TVM's analyzer fails on bound vectors of bool.
        return _Value(dtype, tirx.NE(value.value, vector_math.constant(value.value, 0)))
    return _Value(dtype, vector_math.once(cast(value.value, computed_in(dtype))))


@dataclass(frozen=True)
class EpilogueCode:
    """Epilogue that a product's kernel applies to its accumulators before it stores them."""

    expression: Expression  # ``x0`` is the accumulator
    views: tuple[OperandView, ...]  # views of ``x1``, ``x2``, ..
    # Element types of the accumulators and of the kernel's result.
    acc_dtype: str
    dtype: str
    lanes: int  # lanes of an accumulator

    @staticmethod
    def of(function: Function, epilogue: Epilogue | None, acc_dtype: str, dtype: str, lanes: int) -> EpilogueCode:
        """Declare the epilogue's operands, if any, as the next parameters of `function`."""
        operands = epilogue.operands if epilogue else ()
        views = tuple(OperandView(function, f"x{i + 1}", operand) for i, operand in enumerate(operands))
        return EpilogueCode(epilogue.expression if epilogue else Expression.operand(0), views, acc_dtype, dtype, lanes)

    def prefetch(
        self,
        along: str,  # the tile's iteration dimension besides "n"
        size: tuple[int, int],  # the tile's extent along it, and its number of vectors
        # Function of an operand, an index along that dimension and a vector that returns coordinates.
        at: Callable[[OperandView, int, int], Coordinates],
    ) -> None:
        """Prefetch the operands of a tile, so that they have arrived when the sums are complete."""
        for view in self.views:
            if self.lanes > 1 and view.runs_along(along) and view.runs_along("n"):
                for i in range(size[0]):
                    for j in range(size[1]):
                        prefetch(view.data, view.address(at(view, i, j)))

    def result(self, acc: Expr, load: Callable[[OperandView], Expr]) -> Expr:
        """Value to store for a vector of accumulators; `load` reads an operand at its position."""
        dtypes = [self.acc_dtype, *(view.dtype for view in self.views)]
        value = emit(self.expression, [acc, *map(load, self.views)], dtypes, self.lanes)
        if self.expression.dtype(dtypes) == self.dtype:
            return value
        return tirx.Cast(vector_type(self.dtype, self.lanes), value)

    def result_at(self, acc: Expr, at: Coordinates, mask: Expr | None) -> Expr:
        """Value to store for a vector of accumulators along "n"; `mask` has its existing lanes (None: all)."""
        return self.result(acc, lambda view: view.load(at, "n", self.lanes, mask if view.runs_along("n") else None))
