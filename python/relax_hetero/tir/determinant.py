"""Determinants: Gaussian elimination with the largest pivot of each column, in float64."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.problem import Dim
from .core.builder import Expr, Function, Registers, int64, loop, materialize, when
from .core.view import View

_EXACT = "float64"


def determinant_kernel(batch: Dim, size: Dim, dtype: str) -> tirx.PrimFunc:
    """The determinants ``(batch,)`` of square matrices ``(batch, size, size)``; 1 for matrices without elements."""
    with Function("determinant") as function:
        count, order = map(function.size, (batch, size))
        matrices = View(function, "matrices", [count, order, order], dtype)
        results = View(function, "determinants", [count], dtype)
        with function.body():
            matrices.open()
            results.open()
            work = T.alloc_buffer([int64(count * order * order)], _EXACT, scope="global")
            with loop(count, parallel=not isinstance(count, int) or count > 1) as batch_index:
                first = materialize(batch_index * order * order)
                with loop(order * order) as i:
                    T.buffer_store(work, tirx.Cast(_EXACT, matrices.data[first + i]), [first + i])
                result = Registers(1, _EXACT, 1)
                result[0] = tirx.const(1, _EXACT)
                with loop(order) as k:
                    _eliminate(work, first, order, k, result)
                T.buffer_store(results.data, tirx.Cast(dtype, result[0]), [batch_index])
    return function.result


def _eliminate(work: tirx.Buffer, first: Expr, order: Expr, k: Expr, result: Registers) -> None:
    """Swap the pivot of column k into row k, clear the column below it, and multiply the result by the pivot."""

    def offset(row: Expr, column: Expr) -> Expr:
        return first + row * order + column

    pivot, factor = Registers(1, "int64", 1), Registers(1, _EXACT, 1)
    pivot[0] = k
    with loop(order - k) as below:
        with when(_magnitude(work[offset(k + below, k)]) > _magnitude(work[offset(pivot[0], k)])):
            pivot[0] = k + below
    with when(tirx.NE(pivot[0], k)):
        with loop(order) as column:
            factor[0] = work[offset(k, column)]
            T.buffer_store(work, work[offset(pivot[0], column)], [offset(k, column)])
            T.buffer_store(work, factor[0], [offset(pivot[0], column)])
        result[0] = -result[0]
    result[0] = result[0] * work[offset(k, k)]
    with when(tirx.NE(work[offset(k, k)], tirx.const(0, _EXACT))), loop(order - k - 1) as below:
        row = materialize(k + 1 + below)
        factor[0] = work[offset(row, k)] / work[offset(k, k)]
        with loop(order - k - 1) as right:
            column = materialize(k + 1 + right)
            T.buffer_store(work, work[offset(row, column)] - factor[0] * work[offset(k, column)], [offset(row, column)])


def _magnitude(value: Expr) -> Expr:
    # TVM's C code generator lacks fabs.
    return T.max(value, -value)
