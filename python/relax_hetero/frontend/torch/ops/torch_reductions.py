"""Reductions, cumulative sums and softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax

from ...ops.node import const
from ..torch_node import TorchNode, converts


def _reduce(node: TorchNode, kind: str, x: relax.Expr, axes: Any, keepdim: bool) -> relax.Expr:
    """Reduce by ONNX's converter; without axes, over all of them."""
    rank = len(node.dims(x))
    if rank == 0:
        return x
    axes = range(rank) if axes is None or (isinstance(axes, Sequence) and not axes) else axes
    axes = [axes] if isinstance(axes, int) else [node.axis(axis, rank) for axis in axes]
    return node.onnx(kind, x, const(list(axes), "int64"), keepdims=int(keepdim))


@converts("sum", "mean")
def total(node: TorchNode, x: relax.Expr, *arguments: Any) -> relax.Expr:
    """Sum or mean over axes, in the type of the result."""
    kind = "ReduceSum" if node.op.startswith("sum") else "ReduceMean"
    if kind == "ReduceMean" and any(node.sizes_equal(size, 0) for size in node.dims(x)):
        return node.filled(math.nan)
    x = node.tensor(x)
    if node.op.endswith("default"):
        return _reduce(node, kind, x, None, False)
    return _reduce(node, kind, x, arguments[0], len(arguments) > 1 and arguments[1])


@converts("prod")
def product(node: TorchNode, x: relax.Expr, *options: Any) -> relax.Expr:
    """Product over all axes or one."""
    axes, keepdim = (None, False) if node.op.endswith("default") else (options[0], len(options) > 1 and options[1])
    return _reduce(node, "ReduceProd", node.tensor(x), axes, keepdim)


@converts("amax", "amin")
def extreme(node: TorchNode, x: relax.Expr, axes: Any = (), keepdim: bool = False) -> relax.Expr:
    """Maximum or minimum over axes."""
    return _extreme(node, node.op.startswith("amax"), x, axes, keepdim)


def _extreme(node: TorchNode, is_max: bool, x: relax.Expr, axes: Any, keepdim: bool) -> relax.Expr:
    is_bool = str(x.ty.dtype) == "bool"
    result = _reduce(
        node, "ReduceMax" if is_max else "ReduceMin", node.cast(x, "int32") if is_bool else x, axes, keepdim
    )
    return node.cast(result, "bool") if is_bool else result


@converts("max", "min")
def extreme_and_place(node: TorchNode, x: relax.Expr, dim: Any = None, keepdim: bool = False) -> Any:
    """Maximum or minimum; along an axis, also its index."""
    is_max = node.op.startswith("max")
    if isinstance(dim, relax.Expr):
        return node.onnx("Max" if is_max else "Min", node.tensor(x), node.tensor(dim))
    if dim is None:
        return _extreme(node, is_max, x, None, False)
    index = node.onnx("ArgMax" if is_max else "ArgMin", x, axis=dim, keepdims=int(keepdim))
    return [_extreme(node, is_max, x, [dim], keepdim), index]


@converts("argmax", "argmin")
def arg_extreme(node: TorchNode, x: relax.Expr, dim: Any = None, keepdim: bool = False) -> relax.Expr:
    """Index of the maximum or minimum."""
    if dim is None:
        x, dim = node.reshape(x, [-1]), 0
    index = node.onnx("ArgMax" if node.op.startswith("argmax") else "ArgMin", x, axis=dim, keepdims=int(keepdim))
    return node.reshape(index, node.shape)


@converts("any", "all", "_is_any_true", "_is_all_true")
def quantifier(node: TorchNode, x: relax.Expr, axes: Any = None, keepdim: bool = False) -> relax.Expr:
    """Return whether any or every element is nonzero."""
    result = _extreme(node, "any" in node.op, node.cast(node.cast(x, "bool"), "int32"), axes, keepdim)
    return node.tensor(node.emit(result > const(0, "int32")))  # empty: minimum or maximum of int32


@converts("var", "std", "var_mean")
def variance(node: TorchNode, x: relax.Expr, axes: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Variance or standard deviation over axes."""
    if not node.op.endswith(".correction"):
        raise node.refusal("expected the form with a correction")
    rank = len(node.dims(x))
    axes = list(range(rank)) if not axes else [node.axis(axis, rank) for axis in axes]
    dtype = str(x.ty.dtype)
    count = math.prod(node.dims(x)[axis] for axis in axes)
    correction = 1 if correction is None else correction
    mean = _reduce(node, "ReduceMean", x, axes, True)
    squares = _reduce(node, "ReduceMean", node.emit(relax.op.square(x - mean)), axes, keepdim)
    if correction:
        num_elements = node.tensor(count, dtype)
        denominator = node.emit(num_elements - const(correction, dtype))
        squares = node.emit(squares * (num_elements / relax.op.maximum(denominator, const(0, dtype))))
    if node.op.startswith("var_mean"):
        return [squares, node.reshape(mean, node.sizes.shape(node.value[1].shape))]
    return node.emit(relax.op.sqrt(squares)) if node.op.startswith("std") else squares


@converts("cumsum", "cumprod")
def cumulate(node: TorchNode, x: relax.Expr, dim: int, *_: Any) -> relax.Expr:
    """Cumulative sum or product."""
    if not node.shape:
        return node.tensor(x)
    kind = relax.op.cumsum if node.op.startswith("cumsum") else relax.op.cumprod
    return node.emit(kind(node.tensor(x), node.axis(dim, len(node.shape)), node.dtype))


@converts("softmax", "_softmax", "log_softmax", "_log_softmax")
def softmax(node: TorchNode, x: relax.Expr, dim: int, *_: Any) -> relax.Expr:
    """Softmax or its logarithm along an axis."""
    op = relax.op.nn.log_softmax if "log" in node.op else relax.op.nn.softmax
    x = node.tensor(x)
    if not node.shape:
        return node.reshape(node.emit(op(node.reshape(x, [1]), 0)), [])
    return node.emit(op(x, node.axis(dim, len(node.shape))))


@converts("linalg_vector_norm")
def vector_norm(
    node: TorchNode, x: relax.Expr, order: Any = 2, axes: Any = None, keepdim: bool = False, *_: Any
) -> relax.Expr:
    """Vector norm of an order over axes."""
    x = node.tensor(x)
    size = node.emit(relax.op.abs(x))
    if order in (float("inf"), float("-inf")):
        return _reduce(node, "ReduceMax" if order > 0 else "ReduceMin", size, axes, keepdim)
    if order == 1:
        return _reduce(node, "ReduceSum", size, axes, keepdim)
    if order == 2:
        return node.emit(relax.op.sqrt(_reduce(node, "ReduceSum", node.emit(x * x), axes, keepdim)))
    if order == 0:
        return _reduce(node, "ReduceSum", node.cast(node.cast(x, "bool"), node.dtype), axes, keepdim)
    powers = node.emit(size ** const(order, node.dtype))
    return node.emit(_reduce(node, "ReduceSum", powers, axes, keepdim) ** const(1 / order, node.dtype))
