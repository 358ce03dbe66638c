"""Inverses of matrices and distances between rows."""
# mypy: disable-error-code="valid-type, no-untyped-def"

from __future__ import annotations

import math

from tvm import relax, tirx
from tvm.script import tirx as T

from ..elementwise import cast
from ..node import Node, dtype_of
from ..products import squared_distances
from ..required_sizes import require_shape
from ..table import MICROSOFT, converts


@converts("Inverse", domain=MICROSOFT)
def inverse(node: Node) -> relax.Expr:
    """Inverses of square matrices, in float64; infinities or NaN for singular ones."""
    data = node.tensor(0)
    dims, dtype = node.shape(data), dtype_of(data)
    if len(dims) < 2 or not isinstance(dims[-1], int) or dims[-1] != dims[-2]:
        raise node.refusal(f"found an input of shape {dims}, expected square matrices of known size")
    size = dims[-1]
    batches = math.prod(dims[:-2]) if all(isinstance(dim, int) for dim in dims[:-2]) else None
    count = batches if batches is not None else node.shape(node.emit(relax.op.reshape(data, [-1, size, size])))[0]
    flat = node.emit(relax.op.reshape(cast(node, data, "float64"), [count, size, size]))
    symbol = node.builder.add_func(_inverse_kernel(size), "inverse")
    types = [relax.TensorType((count, size, size), "float64")] * 2 + [relax.TensorType((count, 2), "float64")]
    inverses = node.emit(relax.TupleGetItem(node.emit(relax.op.call_tir(symbol, [flat], types)), 0))
    return cast(node, node.emit(relax.op.reshape(inverses, dims)), dtype)


def _inverse_kernel(size: int) -> tirx.PrimFunc:
    """Gauss-Jordan elimination with partial pivoting; the other results are work space."""

    @T.prim_func(private=True, s_tir=True)
    def inverse(data: T.handle, found: T.handle, copy: T.handle, numbers: T.handle):
        T.func_attr({"tirx.noalias": True})
        count = T.int64()
        x = T.match_buffer(data, (count, size, size), "float64")
        y = T.match_buffer(found, (count, size, size), "float64")
        a = T.match_buffer(copy, (count, size, size), "float64")
        state = T.match_buffer(numbers, (count, 2), "float64")
        for n in T.parallel(count):
            for i in T.serial(size):
                for j in T.serial(size):
                    a[n, i, j] = x[n, i, j]
                    y[n, i, j] = T.if_then_else(i == j, T.float64(1), T.float64(0))
            for column in T.serial(size):
                for i in T.serial(size - column - 1):
                    # Swap rows to move the largest pivot so far to the top.
                    state[n, 0] = T.abs(a[n, column, column])
                    if T.abs(a[n, column + 1 + i, column]) > state[n, 0]:
                        for j in T.serial(size):
                            state[n, 1] = a[n, column, j]
                            a[n, column, j] = a[n, column + 1 + i, j]
                            a[n, column + 1 + i, j] = state[n, 1]
                            state[n, 1] = y[n, column, j]
                            y[n, column, j] = y[n, column + 1 + i, j]
                            y[n, column + 1 + i, j] = state[n, 1]
                state[n, 0] = a[n, column, column]
                for j in T.serial(size):
                    a[n, column, j] = a[n, column, j] / state[n, 0]
                    y[n, column, j] = y[n, column, j] / state[n, 0]
                for i in T.serial(size):
                    if i != column:
                        state[n, 1] = a[n, i, column]
                        for j in T.serial(size):
                            a[n, i, j] = a[n, i, j] - state[n, 1] * a[n, column, j]
                            y[n, i, j] = y[n, i, j] - state[n, 1] * y[n, column, j]

    return inverse


@converts("CDist", domain=MICROSOFT)
def distances(node: Node) -> relax.Expr:
    """Distances, or squared distances, between the rows of two matrices, (M, K)."""
    metric = node.attribute("metric", "sqeuclidean")
    if metric not in ("sqeuclidean", "euclidean"):
        raise node.refusal(f"metric {metric!r} cannot be imported; expected sqeuclidean or euclidean")
    a, b = node.tensor(0), node.tensor(1)
    if node.rank(a) != 2 or node.rank(b) != 2:
        raise node.refusal(f"found inputs of rank {node.rank(a)} and {node.rank(b)}, expected 2")
    a = require_shape(node, a, [node.shape(a)[0], node.shape(b)[1]], "its first input")
    b = require_shape(node, b, [node.shape(b)[0], node.shape(a)[1]], "its second input")
    squares = squared_distances(node, a, node.emit(relax.op.permute_dims(b, [1, 0])))
    return squares if metric == "sqeuclidean" else node.emit(relax.op.sqrt(squares))
