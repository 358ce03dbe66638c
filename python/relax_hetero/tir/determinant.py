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
    function = Function("determinant")
    with function:
        count, order = (function.symbol(dim) if isinstance(dim, str) else dim for dim in (batch, size))
        matrices = View(function, "matrices", [count, order, order], dtype)
        results = View(function, "determinants", [count], dtype)
        with function.body():
            matrices.open()
            results.open()
            space = T.alloc_buffer([int64(count * order * order)], _EXACT, scope="global")
            with loop(count, parallel=not isinstance(count, int) or count > 1) as number:
                first = materialize(number * order * order)
                with loop(order * order) as i:
                    T.buffer_store(space, tirx.Cast(_EXACT, matrices.data[first + i]), [first + i])
                found = Registers(1, _EXACT, 1)
                found[0] = tirx.const(1, _EXACT)
                with loop(order) as k:
                    _eliminate(space, first, order, k, found)
                T.buffer_store(results.data, tirx.Cast(dtype, found[0]), [number])
    return function.result


def _eliminate(space: tirx.Buffer, first: Expr, order: Expr, k: Expr, found: Registers) -> None:
    """Clear column k below its pivot, which is brought to row k, and multiply the result by that pivot."""

    def at(row: Expr, column: Expr) -> Expr:
        return first + row * order + column

    best, held = Registers(1, "int64", 1), Registers(1, _EXACT, 1)
    best[0] = k
    with loop(order - k) as below:
        with when(_magnitude(space[at(k + below, k)]) > _magnitude(space[at(best[0], k)])):
            best[0] = k + below
    with when(tirx.NE(best[0], k)):
        with loop(order) as column:
            held[0] = space[at(k, column)]
            T.buffer_store(space, space[at(best[0], column)], [at(k, column)])
            T.buffer_store(space, held[0], [at(best[0], column)])
        found[0] = -found[0]
    found[0] = found[0] * space[at(k, k)]
    with when(tirx.NE(space[at(k, k)], tirx.const(0, _EXACT))), loop(order - k - 1) as below:
        row = materialize(k + 1 + below)
        held[0] = space[at(row, k)] / space[at(k, k)]
        with loop(order - k - 1) as right:
            column = materialize(k + 1 + right)
            T.buffer_store(space, space[at(row, column)] - held[0] * space[at(k, column)], [at(row, column)])


def _magnitude(value: Expr) -> Expr:
    # TVM's generator of C has no absolute values of floats.
    return T.max(value, -value)
