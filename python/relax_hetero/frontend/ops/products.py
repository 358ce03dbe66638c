"""Matrix products (MatMul, Gemm, MatMulInteger, Einsum), attention, and determinants."""

from __future__ import annotations

import math

from tvm import relax, te, tirx

from ...tir.determinant import determinant_kernel
from ...transform.ir.extents import Symbols
from ...transform.ir.kernels import opaque_kernel
from .elementwise import HALF
from .node import Dim, Node, Position, as_dim, const, dtype_of
from .quantization_parameters import as_type, is_zero, reshaped
from .required_sizes import as_expr, require_broadcast, require_equal, shown, stretched
from .table import convert_by_body, convert_by_stock, converts


def matmul(node: Node, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    """Product in the operands' type; half precision is accumulated in float32."""
    dtype = dtype_of(a)
    if min(node.rank(a), node.rank(b)) > 2:
        a, b = stretched(node, [a, b], kept=2)
    product = node.builder.normalize(relax.op.matmul(a, b))
    if isinstance(a.ty.shape, relax.ShapeExpr) and as_dim(a.ty.shape.values[-1]) == 0:  # empty sums
        return node.filled(node.shape(product), 0, dtype)
    if dtype not in HALF:
        return node.emit(product)
    return node.emit(relax.op.astype(relax.op.matmul(a, b, out_dtype="float32"), dtype))


@converts("MatMul")
def convert_matmul(node: Node) -> relax.Expr:
    """numpy's matmul, with broadcast leading dimensions."""
    return matmul(node, node.tensor(0), node.tensor(1))


@converts("Gemm")
def gemm(node: Node) -> relax.Expr:
    """alpha * A' @ B' + beta * C, scaled after the product; C broadcasts."""
    a, b = node.tensor(0), node.tensor(1)
    dtype = dtype_of(a)
    if node.attribute("transA", 0):
        a = node.emit(relax.op.permute_dims(a, [1, 0]))
    if node.attribute("transB", 0):
        b = node.emit(relax.op.permute_dims(b, [1, 0]))
    result = matmul(node, a, b)
    alpha, beta = node.attribute("alpha", 1.0), node.attribute("beta", 1.0)
    if alpha != 1.0:
        result = node.emit(result * const(alpha, dtype))
    if not node.has(2) or beta == 0.0:
        return result
    addend = require_broadcast(node, node.tensor(2), node.shape(result), "its C")
    if beta != 1.0:
        addend = node.emit(addend * const(beta, dtype))
    return node.emit(result + addend)


def shifted(node: Node, value: relax.Expr, zero_point: relax.Expr | None, along: int | None) -> relax.Expr:
    """`value - zero_point` in int32; a vector of zero points is along axis `along`."""
    wide = node.emit(relax.op.astype(value, "int32"))
    if zero_point is None or is_zero(zero_point):
        return wide
    point = as_type(node, zero_point, "int32")
    if along is not None and node.rank(point) == 1 and node.static_shape(point) != [1]:
        rank = node.rank(value)
        require_equal(node, node.shape(value)[along], node.static_shape(point)[0], f"axis {along % rank} has")
        shape = [1] * rank
        shape[along % rank] = node.static_shape(point)[0]
        point = reshaped(node, point, shape)
    elif node.rank(point) == 1:
        point = reshaped(node, point, ())
    return node.emit(wide - point)


@converts("MatMulInteger")
def matmul_integer(node: Node) -> relax.Expr:
    """(A - a_zero_point) @ (B - b_zero_point) in int32; zero points per tensor, per row of A, per column of B."""
    a, b = node.tensor(0), node.tensor(1)
    a_point = node.tensor(2) if node.has(2) else None
    b_point = node.tensor(3) if node.has(3) else None
    if node.rank(a) == 1 and a_point is not None:
        a_shifted = shifted(node, a, a_point, None)
    else:
        a_shifted = shifted(node, a, a_point, -2)
    b_shifted = shifted(node, b, b_point, -1)
    if min(node.rank(a), node.rank(b)) > 2:
        a_shifted, b_shifted = stretched(node, [a_shifted, b_shifted], kept=2)
    return node.emit(relax.op.matmul(a_shifted, b_shifted, out_dtype="int32"))


def squared_distances(node: Node, rows: relax.Expr, columns: relax.Expr) -> relax.Expr:
    """Squared distances of M rows and N columns, (M, N), as sums of squared differences to avoid cancellation."""

    def element(i: Position, x: te.Tensor, y: te.Tensor) -> tirx.Expr:
        feature = te.reduce_axis((0, x.shape[1]), "feature")
        difference = x(i[0], feature) - y(feature, i[1])
        return te.sum(difference * difference, axis=feature)

    return node.kernel("distances", element, rows, columns, shape=[node.shape(rows)[0], node.shape(columns)[1]])


@converts("Einsum")
def einsum(node: Node) -> relax.Expr:
    """Einsum; axes of one letter must have one size."""
    equation = str(node.attribute("equation")).replace(" ", "")
    operands = [node.tensor(i) for i in range(len(node.inputs))]
    terms = equation.split("->")[0].split(",")
    if len(terms) != len(operands):
        raise node.refusal(f"its equation {equation!r} has {len(terms)} operands, found {len(operands)}")
    sizes: dict[str, Dim] = {}
    for term, operand in zip(terms, operands, strict=True):
        dims = node.shape(operand)
        letters = list(term)
        if "..." in term:
            before, after = term.split("...")
            count = len(dims) - len(before) - len(after)
            letters = [*before, *(f"...{count - position}" for position in range(count)), *after]
        if len(letters) != len(dims):
            raise node.refusal(f"its term {term!r} does not fit an operand of shape {shown(dims)}")
        for letter, dim in zip(letters, dims, strict=True):
            first = sizes.setdefault(letter, dim)
            if not (isinstance(first, int) and isinstance(dim, int)):  # static sizes may be 1, which broadcasts
                require_equal(node, dim, first, f"{letter!r} of its equation {equation!r} has")
    return convert_by_stock(node)


@converts("Attention")
def attention(node: Node) -> relax.Expr:
    """Attention by its function body (stock TVM's converter of this name is for ONNX Runtime's op)."""
    dims, keys, values = (node.shape(node.tensor(i)) for i in range(3))
    if not len(dims) == len(keys) == len(values) or len(dims) not in (3, 4):
        raise node.refusal(f"found queries, keys and values of shapes {shown(dims)}, {shown(keys)} and {shown(values)}")
    require_equal(node, keys[0], dims[0], "axis 0 of its keys, the batches, has")
    require_equal(node, values[0], dims[0], "axis 0 of its values, the batches, has")
    require_equal(node, values[-2], keys[-2], "axis -2 of its values, the positions, has")
    if len(dims) == 4:
        require_equal(node, values[1], keys[1], "axis 1 of its values, the heads, has")
    return convert_by_body(node)


@converts("Det")
def determinant(node: Node) -> relax.Expr:
    """Determinants of the matrices in the last two axes."""
    data = node.tensor(0)
    if node.rank(data) < 2:
        raise node.refusal(f"its input has {node.rank(data)} axes, expected at least 2")
    *front, rows, columns = node.shape(data)
    require_equal(node, columns, rows, "the last axis of its input has")
    batch = as_dim(math.prod(front, start=as_expr(1)))
    data = node.emit(relax.op.reshape(data, [batch, rows, rows]))
    symbols = Symbols()
    kernel = determinant_kernel(symbols.dim(as_expr(batch)), symbols.dim(as_expr(rows)), dtype_of(data))
    symbol = node.builder.add_func(opaque_kernel(kernel), "determinant")
    determinants = node.emit(relax.op.call_tir(symbol, [data], relax.TensorType([batch], dtype_of(data))))
    return node.emit(relax.op.reshape(determinants, front))
