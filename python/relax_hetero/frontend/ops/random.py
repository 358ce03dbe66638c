"""Random numbers: uniform, normal, Bernoulli and multinomial.

Each number is a function of its position and the node's seed (Philox, Salmon et al. 2011), so that kernels are parallel
and every call and every device computes the same numbers. Nodes without a seed get one that is the same in each import.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from tvm import relax, te, tirx

from .elementwise import cast
from .node import Dim, Node, Position, const, dtype_of, is_float, onnx_dtype
from .required_sizes import as_expr
from .table import converts

_MULTIPLIER = 0xD256D193
_KEY_STEP = 0x9E3779B9
_ROUNDS = 10

Words = tuple[tirx.Expr, tirx.Expr]  # two independent uniform 32-bit integers, in uint64


def _word(value: tirx.Expr) -> tirx.Expr:
    return tirx.bitwise_and(value, tirx.const(0xFFFFFFFF, "uint64"))


def _philox(position: tirx.Expr, seed: tirx.Expr) -> Words:
    """Random bits of a position by Philox2x32-10."""
    low, high = _word(position), tirx.shift_right(position, tirx.const(32, "uint64"))
    for number in range(_ROUNDS):
        key = _word(seed + tirx.const(number * _KEY_STEP & 0xFFFFFFFF, "uint64"))
        product = low * tirx.const(_MULTIPLIER, "uint64")
        low, high = (
            tirx.bitwise_xor(tirx.bitwise_xor(tirx.shift_right(product, tirx.const(32, "uint64")), key), _word(high)),
            _word(product),
        )
    return low, high


def _fraction(word: tirx.Expr) -> tirx.Expr:
    """Convert a random word to a number in (0, 1)."""
    return (word.astype("float64") + tirx.const(0.5, "float64")) * tirx.const(2.0**-32, "float64")


def _uniform(words: Words) -> tirx.Expr:
    return _fraction(words[0])


def _normal(words: Words) -> tirx.Expr:
    """Normal distribution by the Box-Muller transform."""
    radius = tirx.sqrt(tirx.const(-2.0, "float64") * tirx.log(_fraction(words[0])))
    return radius * tirx.cos(tirx.const(2 * np.pi, "float64") * _fraction(words[1]))


def _seed(node: Node) -> relax.Expr:
    """32-bit seed from the attribute, or from a unique name."""
    attribute = node.attribute("seed")
    name = node.builder.get_unique_name("random_seed") if attribute is None else ""
    return const([zlib.crc32(name.encode() or np.float32(attribute).tobytes())], "uint64")


def _random_tensor(
    node: Node, dims: list[Dim], draw: Callable[[Words], tirx.Expr], scale: float, offset: float, dtype: str
) -> relax.Expr:
    """A tensor of ``draw * scale + offset``; positions are row-major indices."""
    if not is_float(dtype):
        raise node.refusal(f"gives numbers of type {dtype}, expected a float")

    def element(i: Position, seed: te.Tensor) -> tirx.Expr:
        position = as_expr(0)
        for index, size in zip(i, dims, strict=True):
            position = position * as_expr(size) + index.astype("int64")
        value = draw(_philox(position.astype("uint64"), seed(0)))
        return (value * tirx.const(scale, "float64") + tirx.const(offset, "float64")).astype(dtype)

    return node.kernel("random", element, _seed(node), shape=dims)


def _type(node: Node, default: str) -> str:
    attribute = node.attribute("dtype")
    return default if attribute is None else onnx_dtype(attribute)


def _input_shape_and_type(node: Node) -> tuple[list[Dim], str]:
    """Shape and element type from the input; float32 for integer inputs."""
    dims, input_dtype = node.shape(node.tensor(0)), dtype_of(node.tensor(0))
    return dims, _type(node, input_dtype if is_float(input_dtype) else "float32")


def _shape_and_type(node: Node) -> tuple[list[Dim], str]:
    dims: list[Dim] = [int(size) for size in node.attribute("shape")]
    return dims, _type(node, "float32")


@converts("RandomUniform", "RandomUniformLike")
def random_uniform(node: Node) -> relax.Expr:
    """Uniform numbers between `low` and `high`."""
    dims, dtype = _input_shape_and_type(node) if node.op_type.endswith("Like") else _shape_and_type(node)
    low, high = node.attribute("low", 0.0), node.attribute("high", 1.0)
    return _random_tensor(node, dims, _uniform, high - low, low, dtype)


@converts("RandomNormal", "RandomNormalLike")
def random_normal(node: Node) -> relax.Expr:
    """Normal numbers with this `mean` and standard deviation `scale`."""
    dims, dtype = _input_shape_and_type(node) if node.op_type.endswith("Like") else _shape_and_type(node)
    return _random_tensor(node, dims, _normal, node.attribute("scale", 1.0), node.attribute("mean", 0.0), dtype)


@converts("Bernoulli")
def bernoulli(node: Node) -> relax.Expr:
    """1 with the probability in the input, else 0."""
    data = cast(node, node.tensor(0), "float64")
    uniform = _random_tensor(node, node.shape(data), _uniform, 1.0, 0.0, "float64")
    return cast(node, node.emit(uniform < data), _type(node, dtype_of(node.tensor(0))))


@converts("Multinomial")
def multinomial(node: Node) -> relax.Expr:
    """Classes drawn by unnormalized log-probabilities, [batch, samples]."""
    data = cast(node, node.tensor(0), "float64")
    if node.rank(data) != 2:
        raise node.refusal(f"its input has rank {node.rank(data)}, expected 2")
    batch, classes = node.shape(data)
    node.require(as_expr(classes) >= 1, "draws from 0 classes")
    weights = node.emit(relax.op.exp(data - relax.op.max(data, axis=1, keepdims=True)))
    ends = node.emit(relax.op.cumsum(weights, axis=1))
    samples = int(node.attribute("sample_size", 1))
    uniform = _random_tensor(node, [batch, samples], _uniform, 1.0, 0.0, "float64")
    along = te.reduce_axis((0, as_expr(classes) - 1), name="class")

    def element(i: Position, end: te.Tensor, share: te.Tensor) -> tirx.Expr:
        is_before = end(i[0], along) <= share(i[0], i[1]) * end(i[0], end.shape[1] - 1)
        return te.sum(tirx.Select(is_before, as_expr(1), as_expr(0)), axis=along)

    samples_drawn = node.kernel("draw", element, ends, uniform, shape=[batch, samples])
    return cast(node, samples_drawn, _type(node, "int32"))
