"""Mixtures of experts, ``com.microsoft.MoE`` and ``QMoE``: each row goes through a few of many feed-forward networks.

Where all devices multiply rows by matrices that an index chooses, experts of a few bits compute the rows that chose
them. Elsewhere every expert computes every row, and a row's sum takes those that its router chose. Weights of a few
bits stay in their bits wherever the device has a kernel for products with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import relax, te, tirx

from ....encoding.block_weights import GROUP, bytes_of_row, middle_of
from ....op import dequantize_blocks
from ...import_devices import gathers_experts
from ..block_weights import as_four_bits, numbers_of_bytes
from ..elementwise import cast, widened
from ..node import Dim, Node, Position, const, dtype_of
from ..products import matmul
from ..required_sizes import require_shape, shown
from ..slicing import cut
from ..table import MICROSOFT, converts

_JITTER = 0.01
"""How much less than the largest a logit may be, for the sparse mixer to weigh it, by parts of its size."""


@dataclass(frozen=True)
class _Layer:
    """A layer of all experts.

    Attributes
    ----------
    weights : list of relax.Expr
        (depth, columns) of each expert, or (experts, depth, columns) of all; none where there is a table.
    bias : relax.Expr or None
        (experts, columns).
    columns : int
    table : relax.Expr or None
        (experts, columns, depth), of which rows take the matrices that they choose.
    """

    weights: list[relax.Expr]
    bias: relax.Expr | None
    columns: int
    table: relax.Expr | None = None


@converts("MoE", domain=MICROSOFT)
def mixture_of_experts(node: Node) -> relax.Expr:
    """Experts whose weights are floats."""
    width = _width(node)
    first = _float_layer(node, 2, 3, width)
    inner = first.columns // _fused_parts(node)
    third = _float_layer(node, 6, 7, width) if node.has(6) else None
    return _mixture(node, first, _float_layer(node, 4, 5, inner), third)


@converts("QMoE", domain=MICROSOFT)
def quantized_mixture_of_experts(node: Node) -> relax.Expr:
    """Experts whose weights have 2, 4 or 8 bits, with scales by columns or by blocks."""
    if node.attribute("quant_type", "int") != "int":
        raise node.refusal(f"found weights of quant_type {node.attribute('quant_type')!r}, expected 'int'")
    if node.attribute("weights_prepacked", -1) == 1:
        raise node.refusal("found weights in the order of a GPU's kernel (weights_prepacked=1), expected rows of bytes")
    width = _width(node)
    first = _bits_layer(node, 1, (2, 3, 4, 11), width)
    inner = first.columns // _fused_parts(node)
    third = _bits_layer(node, 3, (8, 9, 10, 13), width) if node.has(8) else None
    return _mixture(node, first, _bits_layer(node, 2, (5, 6, 7, 12), inner), third, 14)


def _width(node: Node) -> int:
    data = node.tensor(0)
    width = node.shape(data)[-1]
    if node.rank(data) not in (2, 3) or not isinstance(width, int):
        raise node.refusal(f"found an input of shape {shown(node.shape(data))}, expected 2 or 3 axes, the last known")
    return width


def _fused_parts(node: Node) -> int:
    """Into how many parts the columns of the first layer fall: gate and linear part, or none."""
    is_gated = node.attribute("activation_type", "relu") in ("swiglu", "geglu")
    return 2 if is_gated and node.attribute("swiglu_fusion", 0) else 1


def _float_layer(node: Node, weight: int, bias: int, depth: int) -> _Layer:
    data = widened(node, node.tensor(weight))
    experts, columns, found = node.static_shape(data)
    if found != depth:
        raise node.refusal(f"input {weight} has the shape {[experts, columns, found]}, expected rows of {depth}")
    return _Layer([node.emit(relax.op.permute_dims(data, [0, 2, 1]))], _bias(node, bias, experts, columns), columns)


def _bias(node: Node, index: int, experts: int, columns: int) -> relax.Expr | None:
    if not node.has(index):
        return None
    return widened(node, require_shape(node, node.tensor(index), [experts, columns], f"input {index}, a bias,"))


def _bits_layer(node: Node, number: int, places: tuple[int, int, int, int], depth: int) -> _Layer:
    """A layer whose inputs (weights, scales, bias, zero points) have these numbers."""
    weight, scale, bias, point = places
    bits = int(node.attribute(f"fc{number}_expert_weight_bits", node.attribute("expert_weight_bits", 4)))
    block = int(node.attribute("block_size", 0))
    if bits not in (2, 4, 8) or (block > 0 and (block < 16 or block & (block - 1))):
        raise node.refusal(f"found weights of {bits} bits in blocks of {block}, expected 2, 4 or 8, and 16 or more")
    codes, scales = _known(node, weight, "weights"), _known(node, scale, "scales").astype("float32", copy=False)
    experts, columns = codes.shape[:2]
    blocks = -(-depth // block) if block > 0 else 1
    if codes.shape[2:] != (bytes_of_row(depth, bits),) or scales.size != experts * columns * blocks:
        raise node.refusal(
            f"found weights of shape {list(codes.shape)} and {scales.size} scales, expected rows of "
            f"{bytes_of_row(depth, bits)} bytes and {experts * columns * blocks} scales"
        )
    points = _points(node, point, (experts, columns, blocks), bits, block > 0)
    if bits == 2:
        codes = as_four_bits(codes.reshape(experts * columns, -1)).reshape(experts, columns, -1)
        points = np.full((experts, columns, blocks), 2, "uint8") if points is None else points
    share = block if block > 0 else -(-depth // GROUP) * GROUP
    if gathers_experts():
        if points is not None and (points == middle_of(max(bits, 4))).all():
            points = None
        numbers = dequantize_blocks(
            const(np.ascontiguousarray(codes.reshape(experts * columns, -1))),
            const(np.ascontiguousarray(scales.reshape(experts * columns, blocks))),
            None if points is None else const(np.ascontiguousarray(points.reshape(experts * columns, blocks))),
            depth=depth,
            block=share,
            bits=max(bits, 4),
        )
        table = node.emit(relax.op.reshape(node.emit(numbers), [experts, columns, depth]))
        return _Layer([], _bias(node, bias, experts, columns), columns, table)
    node.check_ops(8 * experts)
    weights = []
    for expert in range(experts):
        zeros = None if points is None or (points == middle_of(max(bits, 4))).all() else points[expert]
        numbers = dequantize_blocks(
            const(np.ascontiguousarray(codes[expert])),
            const(np.ascontiguousarray(scales.reshape(experts, columns, blocks)[expert])),
            None if zeros is None else const(np.ascontiguousarray(zeros)),
            depth=depth,
            block=share,
            bits=max(bits, 4),
        )
        weights.append(node.emit(relax.op.permute_dims(node.emit(numbers), [1, 0])))
    return _Layer(weights, _bias(node, bias, experts, columns), columns)


def _known(node: Node, index: int, what: str) -> np.ndarray:
    array = node.constant(index)
    if array is None:
        raise node.refusal(f"its {what}, input {index}, are missing or no constant")
    return array


def _points(node: Node, index: int, shape: tuple[int, int, int], bits: int, is_blocked: bool) -> np.ndarray | None:
    """Zero points of every block, or of every column; columns share bytes where there are no blocks."""
    if not node.has(index):
        return None
    experts, columns, blocks = shape
    packed = _known(node, index, "zero points")
    rows, count = (experts * columns, blocks) if is_blocked else (experts, columns)
    if packed.size != rows * bytes_of_row(count, bits):
        raise node.refusal(f"found {packed.size} bytes of zero points, expected {rows * bytes_of_row(count, bits)}")
    return numbers_of_bytes(packed.reshape(rows, -1), bits)[:, :count].reshape(shape)


def _mixture(node: Node, first: _Layer, second: _Layer, third: _Layer | None, mixing: int = -1) -> relax.Expr:
    """The sum over the chosen experts of what each makes of a row, by the router's weights."""
    data = node.tensor(0)
    dims = node.shape(data)
    rows: Dim = dims[0] if len(dims) == 2 else dims[0] * dims[1]
    flat = widened(node, node.emit(relax.op.reshape(data, [rows, dims[-1]])))
    logits = node.tensor(1)
    experts = node.shape(logits)[-1]
    if not isinstance(experts, int):
        raise node.refusal(f"found {experts} experts, expected a known number")
    shares = _shares(node, rows, experts, mixing)
    _require_width(node, second, dims[-1])
    if second.table is not None:
        total = _gathered(node, flat, shares, (first, second, third))
        return cast(node, node.emit(relax.op.reshape(total, dims)), dtype_of(data))

    def product(layer: _Layer, expert: int, x: relax.Expr) -> relax.Expr:
        """Product of one expert, or of all of them where its number is -1."""
        found = matmul(node, x, layer.weights[expert])
        if layer.bias is None:
            return found
        if expert < 0:
            return node.emit(relax.op.add(found, relax.op.expand_dims(layer.bias, [1])))
        bias = node.emit(relax.op.squeeze(cut(node, layer.bias, {0: (expert, 1, 1)}), [0]))
        return node.emit(relax.op.add(found, bias))

    def made(expert: int) -> relax.Expr:
        """Output of an expert for all rows."""
        gate = product(first, expert, flat)
        linear = None if third is None else product(third, expert, flat)
        return product(second, expert, _activated(node, gate, linear))

    if len(first.weights) == 1 and experts > 1:  # products of all experts at once
        by_expert = node.emit(relax.op.expand_dims(relax.op.permute_dims(shares, [1, 0]), [2]))
        total = node.emit(relax.op.sum(relax.op.multiply(made(-1), by_expert), [0]))
    else:
        parts = [node.emit(relax.op.multiply(made(e), cut(node, shares, {1: (e, 1, 1)}))) for e in range(experts)]
        total = parts[0]
        for part in parts[1:]:
            total = node.emit(relax.op.add(total, part))
    return cast(node, node.emit(relax.op.reshape(total, dims)), dtype_of(data))


def _gathered(
    node: Node, flat: relax.Expr, shares: relax.Expr, layers: tuple[_Layer, _Layer, _Layer | None]
) -> relax.Expr:
    """The sum over the experts that a row chose, each of which computes that row: (rows, width)."""
    (rows, width), used = node.shape(flat), 2 if node.attribute("use_sparse_mixer", 0) else int(node.attribute("k", 1))
    best = node.emit(relax.op.topk(shares, used, axis=-1, ret_type="both", dtype="int32"))
    chosen, ids = (node.emit(relax.TupleGetItem(best, index)) for index in (0, 1))

    def product(layer: _Layer, x: relax.Expr) -> relax.Expr:
        """Multiply the rows by the matrices of their experts: (rows, used, 1, columns)."""
        taken = node.emit(relax.op.take(layer.table, ids, axis=0))
        found = node.emit(relax.op.matmul(x, node.emit(relax.op.permute_dims(taken, [0, 1, 3, 2]))))
        if layer.bias is None:
            return found
        bias = node.emit(relax.op.take(layer.bias, ids, axis=0))
        return _sum_of(node, found, node.emit(relax.op.reshape(bias, [rows, used, 1, layer.columns])))

    first, second, third = layers
    x = node.emit(relax.op.reshape(flat, [rows, 1, 1, width]))
    made = product(second, _activated(node, product(first, x), None if third is None else product(third, x)))
    weights = node.emit(relax.op.reshape(chosen, [rows, used, 1, 1]))
    return node.emit(relax.op.sum(_product_of(node, made, weights), [1, 2]))


def _sum_of(node: Node, one: relax.Expr, other: relax.Expr) -> relax.Expr:
    return node.emit(relax.op.add(one, other))


def _require_width(node: Node, layer: _Layer, width: Dim) -> None:
    if layer.columns != width:
        raise node.refusal(f"found {layer.columns} columns of the second layer, expected {width}")


def _activated(node: Node, gate: relax.Expr, linear: relax.Expr | None) -> relax.Expr:
    """Input of an expert's second layer, computed from its first and its third."""
    name = node.attribute("activation_type", "relu")
    if name in ("swiglu", "geglu"):
        if linear is None:
            gate, linear = _halves(node, gate)
        return (
            _swiglu(node, gate, linear) if name == "swiglu" else _product_of(node, _ACTIVATIONS["gelu"](gate), linear)
        )
    if name not in _ACTIVATIONS:
        raise node.refusal(f"activation_type {name!r} is unknown, expected one of {[*_ACTIVATIONS, 'swiglu', 'geglu']}")
    active = node.emit(_ACTIVATIONS[name](gate))
    return active if linear is None else _product_of(node, active, linear)


def _product_of(node: Node, one: relax.Expr, other: relax.Expr) -> relax.Expr:
    return node.emit(relax.op.multiply(one, other))


_ACTIVATIONS: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "relu": relax.op.nn.relu,
    "gelu": relax.op.nn.gelu_tanh,
    "silu": relax.op.nn.silu,
    "identity": lambda x: x,
    "relu2": lambda x: relax.op.square(relax.op.nn.relu(x)),
}


def _halves(node: Node, both: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
    """Gate and linear part of columns that take turns (swiglu_fusion 1) or follow each other (2)."""
    fusion, axis = node.attribute("swiglu_fusion", 0), node.rank(both) - 1
    if fusion not in (1, 2):
        raise node.refusal(f"found swiglu_fusion {fusion} without a third layer, expected 1 or 2")
    width = node.shape(both)[axis] // 2
    starts, step = ((0, 1), 2) if fusion == 1 else ((0, width), 1)
    one, other = (cut(node, both, {axis: (start, width, step)}) for start in starts)
    return one, other


def _swiglu(node: Node, gate: relax.Expr, linear: relax.Expr) -> relax.Expr:
    """g * sigmoid(alpha * g) * (l + beta), both within the limit."""
    limit = float(node.attribute("swiglu_limit", math.inf))
    alpha, beta = (
        float(node.attribute(f"activation_{name}", value)) for name, value in (("alpha", 1.0), ("beta", 0.0))
    )
    is_late = bool(node.attribute("swiglu_limit_after_activation", 0))

    def below(value: relax.Expr) -> relax.Expr:
        return node.emit(relax.op.minimum(value, const(limit, "float32")))

    if math.isfinite(limit):
        gate = gate if is_late else below(gate)
        linear = node.emit(relax.op.maximum(below(linear), const(-limit, "float32")))
    scaled = gate if alpha == 1 else node.emit(relax.op.multiply(gate, const(alpha, "float32")))
    active = _product_of(node, gate, relax.op.sigmoid(scaled))
    if is_late and math.isfinite(limit):
        active = below(active)
    shifted = linear if beta == 0 else node.emit(relax.op.add(linear, const(beta, "float32")))
    return _product_of(node, active, shifted)


def _shares(node: Node, rows: Dim, experts: int, mixing: int) -> relax.Expr:
    """Every expert's weight in the sum of every row, (rows, experts); 0 for experts that are not chosen."""
    logits = widened(node, require_shape(node, node.tensor(1), [rows, experts], "its router_probs"))
    count = int(node.attribute("k", 1))
    if not 0 < count <= experts:
        raise node.refusal(f"found k {count}, expected 1 to its {experts} experts")
    if node.attribute("use_sparse_mixer", 0):
        if count != 2:
            raise node.refusal(f"found use_sparse_mixer and k {count}, expected k 2")
        return _sparse_mixer(node, logits)
    is_normal = bool(node.attribute("normalize_routing_weights", 0))
    chosen = _chosen(node, logits, count)
    if mixing >= 0 and node.has(mixing):
        weights = widened(node, require_shape(node, node.tensor(mixing), [rows, experts], "its router_weights"))
    else:
        weights = node.emit(relax.op.nn.softmax(logits, axis=-1))
    kept = node.emit(relax.op.where(chosen, weights, const(0, "float32")))
    if not is_normal:
        return kept
    return node.emit(relax.op.divide(kept, relax.op.sum(kept, [1], keepdims=True)))


def _chosen(node: Node, logits: relax.Expr, count: int) -> relax.Expr:
    """True if an expert is among the `count` with the highest logits, the first of equal ones before the others."""
    experts = node.shape(logits)[1]
    other = te.reduce_axis((0, experts), "other")

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        own, its = x(*i), x(i[0], other)
        is_before = tirx.any(its > own, tirx.all(its == own, other < i[1]))
        return te.sum(tirx.Select(is_before, tirx.const(1, "int32"), tirx.const(0, "int32")), axis=other)

    before = node.kernel("experts_before", element, logits)
    return node.emit(relax.op.less(before, const(count, "int32")))


def _sparse_mixer(node: Node, logits: relax.Expr) -> relax.Expr:
    """The two best experts, each weighed among those whose logits come near its own: the first's, then the rest's."""
    lowest = const(-math.inf, "float32")
    rest, total = logits, None
    for _ in range(2):
        best = node.emit(relax.op.max(rest, [1], keepdims=True))
        factor = node.emit(relax.op.maximum(relax.op.abs(logits), best))
        distance = node.emit(relax.op.divide(relax.op.subtract(best, logits), factor))
        is_far = node.emit(relax.op.greater(distance, const(2 * _JITTER, "float32")))
        near = node.emit(relax.op.where(is_far, lowest, rest))
        shares = node.emit(relax.op.nn.softmax(near, axis=-1))
        chosen = _chosen(node, rest, 1)
        share = node.emit(relax.op.where(chosen, shares, const(0, "float32")))
        total = share if total is None else node.emit(relax.op.add(total, share))
        rest = node.emit(relax.op.where(chosen, lowest, rest))
    assert total is not None
    return total
