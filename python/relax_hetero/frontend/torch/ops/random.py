"""Random numbers: functions of the place of an element and of the seed of the import, the same at every call."""

from __future__ import annotations

import zlib
from typing import Any

from tvm import relax

from ...ops.node import const
from ..node import TorchNode, converts


def _drawn(node: TorchNode, kind: str, dims: Any, dtype: str, **attributes: Any) -> relax.Expr:
    """Numbers of a shape, of a seed of this node."""
    like = node.filled(0.0, dims, "float32")
    seed = float(zlib.crc32(node.name.encode()))
    found = node.onnx(kind, like, seed=seed, **attributes)
    return node.cast(found, dtype)


@converts("rand", "rand_like", "randn", "randn_like")
def random(node: TorchNode, *_: Any) -> relax.Expr:
    """Uniform numbers from 0 to 1, or normal ones."""
    return _drawn(
        node, "RandomNormalLike" if node.op.startswith("randn") else "RandomUniformLike", node.shape, node.dtype
    )


@converts("uniform", "normal_functional")
def random_in(node: TorchNode, x: relax.Expr, a: float = 0.0, b: float = 1.0, *_: Any) -> relax.Expr:
    """Uniform numbers between two, or normal ones of a mean and deviation."""
    if node.op.startswith("uniform"):
        return _drawn(node, "RandomUniformLike", node.shape, node.dtype, low=a, high=b)
    return _drawn(node, "RandomNormalLike", node.shape, node.dtype, mean=a, scale=b)


@converts("normal")
def normal(node: TorchNode, mean: Any, deviation: Any = 1.0, *_: Any) -> relax.Expr:
    """Normal numbers, mean and deviation of each element's own."""
    drawn = _drawn(node, "RandomNormalLike", node.shape, node.dtype)
    return node.emit(relax.op.add(relax.op.multiply(drawn, node.tensor(deviation)), node.tensor(mean)))


@converts("randint", "randint_like")
def randint(node: TorchNode, *given: Any) -> relax.Expr:
    """Whole numbers from 0, or a lower bound, below another."""
    bounds = given[1:] if "like" in node.op else given
    has_low = ".low" in node.op
    low, high = bounds[:2] if has_low else (0, bounds[0])
    span = node.tensor(high, "float64")
    if has_low:
        span = node.emit(relax.op.subtract(span, node.tensor(low, "float64")))
    drawn = node.cast(_drawn(node, "RandomUniformLike", node.shape, "float32"), "float64")
    whole = node.cast(node.emit(relax.op.floor(relax.op.multiply(drawn, span))), "int64")
    top = node.emit(relax.op.subtract(node.cast(span, "int64"), const(1, "int64")))
    shifted = node.emit(relax.op.add(relax.op.minimum(whole, top), node.tensor(low, "int64")))
    return node.cast(shifted, node.dtype)


@converts("bernoulli")
def bernoulli(node: TorchNode, x: relax.Expr, p: Any = None, *_: Any) -> relax.Expr:
    """1 with a probability, else 0."""
    drawn = _drawn(node, "RandomUniformLike", node.shape, "float32")
    chance = node.tensor(x if not isinstance(p, (int, float)) else p, "float32")
    return node.cast(node.emit(relax.op.less(drawn, chance)), node.dtype)


@converts("randperm")
def randperm(node: TorchNode, count: Any, *_: Any) -> relax.Expr:
    """The numbers below `count` in a random order."""
    keys = _drawn(node, "RandomUniformLike", [count], "float32")
    _, order = node.onnx("TopK", keys, [count], outputs=2, axis=0)
    return node.cast(order, node.dtype)


@converts("multinomial")
def multinomial(node: TorchNode, x: relax.Expr, count: int, replacement: bool = False, *_: Any) -> relax.Expr:
    """Places drawn with their probabilities; without replacement the largest of Gumbel's numbers."""
    dims = node.dims(x)
    weights = node.onnx("Log", node.cast(x, "float32"))
    if replacement:
        rows = node.reshape(weights, [1, *dims]) if len(dims) == 1 else weights
        seed = float(zlib.crc32(node.name.encode()))
        drawn = node.onnx("Multinomial", rows, sample_size=count, seed=seed, dtype=7)
        return node.reshape(drawn, node.shape)
    drawn = _drawn(node, "RandomUniformLike", dims, "float32", low=1e-7, high=1.0)
    noise = relax.op.negative(relax.op.log(relax.op.negative(relax.op.log(drawn))))
    _, places = node.onnx("TopK", node.emit(relax.op.add(weights, noise)), [count], outputs=2, axis=len(dims) - 1)
    return places


@converts("dropout", "native_dropout", "alpha_dropout", "feature_dropout")
def dropout(node: TorchNode, x: relax.Expr, p: float = 0.5, train: bool | None = True) -> Any:
    """Nothing, once training is over."""
    if train and p:
        raise node.refusal("of a module in training; call module.eval() before it is exported")
    return [x, node.filled(True, node.dims(x), "bool")] if node.op.startswith("native") else x
