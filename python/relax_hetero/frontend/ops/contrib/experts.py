"""Mixtures of experts, ``com.microsoft.MoE`` and ``QMoE``: each row goes through a few of many feed-forward networks.

If all devices have kernels that multiply rows by indexed matrices, quantized experts compute only the rows that chose
them. Otherwise every expert computes every row, and the sum is weighted by the router. Quantized weights are kept if
the device has a kernel for products with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

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
from ..slicing import slice_axes
from ..table import MICROSOFT, converts

_SPARSE_MIXER_JITTER = 0.01
"""The sparse mixer masks logits that are less than the largest by more than twice this fraction of their magnitude."""


@dataclass(frozen=True)
class _Layer:
    """A layer of all experts."""

    # (depth, columns) of each expert, or (experts, depth, columns) of all; empty if there is a table.
    weights: list[relax.Expr]
    bias: relax.Expr | None  # (experts, columns)
    columns: int
    table: relax.Expr | None = None  # (experts, columns, depth), from which rows gather their matrices


@converts("MoE", domain=MICROSOFT)
def mixture_of_experts(node: Node) -> relax.Expr:
    """Experts with float weights."""
    width = _width(node)
    first = _float_layer(node, 2, 3, width)
    inner = first.columns // _num_fused_parts(node)
    third = _float_layer(node, 6, 7, width) if node.has(6) else None
    return _mix(node, first, _float_layer(node, 4, 5, inner), third)


@converts("QMoE", domain=MICROSOFT)
def quantized_mixture_of_experts(node: Node) -> relax.Expr:
    """Experts with weights of 2, 4 or 8 bits, with scales per column or block."""
    if node.attribute("quant_type", "int") != "int":
        raise node.refusal(f"found weights of quant_type {node.attribute('quant_type')!r}, expected 'int'")
    if node.attribute("weights_prepacked", -1) == 1:
        raise node.refusal("found weights in the order of a GPU's kernel (weights_prepacked=1), expected rows of bytes")
    width = _width(node)
    first = _quantized_layer(node, 1, (2, 3, 4, 11), width)
    inner = first.columns // _num_fused_parts(node)
    third = _quantized_layer(node, 3, (8, 9, 10, 13), width) if node.has(8) else None
    return _mix(node, first, _quantized_layer(node, 2, (5, 6, 7, 12), inner), third, 14)


def _width(node: Node) -> int:
    data = node.tensor(0)
    width = node.shape(data)[-1]
    if node.rank(data) not in (2, 3) or not isinstance(width, int):
        raise node.refusal(f"found an input of shape {shown(node.shape(data))}, expected 2 or 3 axes, the last known")
    return width


def _num_fused_parts(node: Node) -> int:
    """2 if the columns of the first layer contain gate and linear part, else 1."""
    is_gated = node.attribute("activation_type", "relu") in ("swiglu", "geglu")
    return 2 if is_gated and node.attribute("swiglu_fusion", 0) else 1


def _float_layer(node: Node, weight: int, bias: int, depth: int) -> _Layer:
    data = widened(node, node.tensor(weight))
    experts, columns, actual_depth = node.static_shape(data)
    if actual_depth != depth:
        raise node.refusal(f"input {weight} has the shape {[experts, columns, actual_depth]}, expected rows of {depth}")
    return _Layer([node.emit(relax.op.permute_dims(data, [0, 2, 1]))], _bias(node, bias, experts, columns), columns)


def _bias(node: Node, index: int, experts: int, columns: int) -> relax.Expr | None:
    if not node.has(index):
        return None
    return widened(node, require_shape(node, node.tensor(index), [experts, columns], f"input {index}, a bias,"))


def _quantized_layer(node: Node, number: int, indices: tuple[int, int, int, int], depth: int) -> _Layer:
    """A quantized layer; `indices` are those of the inputs weights, scales, bias and zero points."""
    weight, scale, bias, point = indices
    bits = int(node.attribute(f"fc{number}_expert_weight_bits", node.attribute("expert_weight_bits", 4)))
    block = int(node.attribute("block_size", 0))
    if bits not in (2, 4, 8) or (block > 0 and (block < 16 or block & (block - 1))):
        raise node.refusal(f"found weights of {bits} bits in blocks of {block}, expected 2, 4 or 8, and 16 or more")
    codes = _constant(node, weight, "weights")
    scales = _constant(node, scale, "scales").astype("float32", copy=False)
    experts, columns = codes.shape[:2]
    blocks = -(-depth // block) if block > 0 else 1
    if codes.shape[2:] != (bytes_of_row(depth, bits),) or scales.size != experts * columns * blocks:
        raise node.refusal(
            f"found weights of shape {list(codes.shape)} and {scales.size} scales, expected rows of "
            f"{bytes_of_row(depth, bits)} bytes and {experts * columns * blocks} scales"
        )
    points = _zero_points(node, point, (experts, columns, blocks), bits, block > 0)
    if bits == 2:
        codes = as_four_bits(codes.reshape(experts * columns, -1)).reshape(experts, columns, -1)
        points = np.full((experts, columns, blocks), 2, "uint8") if points is None else points
    block_size = block if block > 0 else -(-depth // GROUP) * GROUP
    if gathers_experts():
        if points is not None and (points == middle_of(max(bits, 4))).all():
            points = None
        numbers = dequantize_blocks(
            const(np.ascontiguousarray(codes.reshape(experts * columns, -1))),
            const(np.ascontiguousarray(scales.reshape(experts * columns, blocks))),
            None if points is None else const(np.ascontiguousarray(points.reshape(experts * columns, blocks))),
            depth=depth,
            block=block_size,
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
            block=block_size,
            bits=max(bits, 4),
        )
        weights.append(node.emit(relax.op.permute_dims(node.emit(numbers), [1, 0])))
    return _Layer(weights, _bias(node, bias, experts, columns), columns)


def _constant(node: Node, index: int, what: str) -> np.ndarray:
    array = node.constant(index)
    if array is None:
        raise node.refusal(f"its {what}, input {index}, are missing or not constant")
    return array


def _zero_points(node: Node, index: int, shape: tuple[int, int, int], bits: int, is_blocked: bool) -> np.ndarray | None:
    """Zero points per block, or per column, which share bytes without blocks."""
    if not node.has(index):
        return None
    experts, columns, blocks = shape
    packed = _constant(node, index, "zero points")
    rows, count = (experts * columns, blocks) if is_blocked else (experts, columns)
    if packed.size != rows * bytes_of_row(count, bits):
        raise node.refusal(f"found {packed.size} bytes of zero points, expected {rows * bytes_of_row(count, bits)}")
    return numbers_of_bytes(packed.reshape(rows, -1), bits)[:, :count].reshape(shape)


def _mix(node: Node, first: _Layer, second: _Layer, third: _Layer | None, mixing: int = -1) -> relax.Expr:
    """Weighted sum of the chosen experts' outputs."""
    data = node.tensor(0)
    dims = node.shape(data)
    rows: Dim = dims[0] if len(dims) == 2 else dims[0] * dims[1]
    flat = widened(node, node.emit(relax.op.reshape(data, [rows, dims[-1]])))
    experts = node.shape(node.tensor(1))[-1]
    if not isinstance(experts, int):
        raise node.refusal(f"found {experts} experts, expected a known number")
    router_weights = _router_weights(node, rows, experts, mixing)
    _require_width(node, second, dims[-1])
    if second.table is not None:
        total = _mix_gathered(node, flat, router_weights, (first, second, third))
        return cast(node, node.emit(relax.op.reshape(total, dims)), dtype_of(data))

    def product(layer: _Layer, expert: int, x: relax.Expr) -> relax.Expr:
        """Product with one expert, or with all of them for -1."""
        result = matmul(node, x, layer.weights[expert])
        if layer.bias is None:
            return result
        if expert < 0:
            return node.emit(result + relax.op.expand_dims(layer.bias, [1]))
        bias = node.emit(relax.op.squeeze(slice_axes(node, layer.bias, {0: (expert, 1, 1)}), [0]))
        return node.emit(result + bias)

    def expert_output(expert: int) -> relax.Expr:
        """Output of an expert (-1: of all experts) for all rows."""
        gate = product(first, expert, flat)
        linear = None if third is None else product(third, expert, flat)
        return product(second, expert, _activate(node, gate, linear))

    if len(first.weights) == 1 and experts > 1:  # products of all experts at once
        by_expert = node.emit(relax.op.expand_dims(relax.op.permute_dims(router_weights, [1, 0]), [2]))
        total = node.emit(relax.op.sum(expert_output(-1) * by_expert, [0]))
    else:
        parts = [node.emit(expert_output(e) * slice_axes(node, router_weights, {1: (e, 1, 1)})) for e in range(experts)]
        total = reduce(lambda total, part: node.emit(total + part), parts)
    return cast(node, node.emit(relax.op.reshape(total, dims)), dtype_of(data))


def _mix_gathered(
    node: Node, flat: relax.Expr, shares: relax.Expr, layers: tuple[_Layer, _Layer, _Layer | None]
) -> relax.Expr:
    """Weighted sum of the chosen experts' outputs, computed only for the rows that chose them, (rows, width)."""
    (rows, width), num_chosen = (
        node.shape(flat),
        2 if node.attribute("use_sparse_mixer", 0) else int(node.attribute("k", 1)),
    )
    best = node.emit(relax.op.topk(shares, num_chosen, axis=-1, ret_type="both", dtype="int32"))
    top_weights, ids = (node.emit(relax.TupleGetItem(best, index)) for index in (0, 1))

    def product(layer: _Layer, x: relax.Expr) -> relax.Expr:
        """Multiply the rows by the matrices of their experts, (rows, num_chosen, 1, columns)."""
        matrices = node.emit(relax.op.take(layer.table, ids, axis=0))
        result = node.emit(relax.op.matmul(x, node.emit(relax.op.permute_dims(matrices, [0, 1, 3, 2]))))
        if layer.bias is None:
            return result
        bias = node.emit(relax.op.take(layer.bias, ids, axis=0))
        return node.emit(result + node.emit(relax.op.reshape(bias, [rows, num_chosen, 1, layer.columns])))

    first, second, third = layers
    x = node.emit(relax.op.reshape(flat, [rows, 1, 1, width]))
    outputs = product(second, _activate(node, product(first, x), None if third is None else product(third, x)))
    weights = node.emit(relax.op.reshape(top_weights, [rows, num_chosen, 1, 1]))
    return node.emit(relax.op.sum(_multiply(node, outputs, weights), [1, 2]))


def _require_width(node: Node, layer: _Layer, width: Dim) -> None:
    if layer.columns != width:
        raise node.refusal(f"found {layer.columns} columns of the second layer, expected {width}")


def _activate(node: Node, gate: relax.Expr, linear: relax.Expr | None) -> relax.Expr:
    """Input of an expert's second layer from the outputs of its first and third."""
    name = node.attribute("activation_type", "relu")
    if name in ("swiglu", "geglu"):
        if linear is None:
            gate, linear = _halves(node, gate)
        return _swiglu(node, gate, linear) if name == "swiglu" else _multiply(node, _ACTIVATIONS["gelu"](gate), linear)
    if name not in _ACTIVATIONS:
        raise node.refusal(f"activation_type {name!r} is unknown, expected one of {[*_ACTIVATIONS, 'swiglu', 'geglu']}")
    active = node.emit(_ACTIVATIONS[name](gate))
    return active if linear is None else _multiply(node, active, linear)


def _multiply(node: Node, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    return node.emit(a * b)


_ACTIVATIONS: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "relu": relax.op.nn.relu,
    "gelu": relax.op.nn.gelu_tanh,
    "silu": relax.op.nn.silu,
    "identity": lambda x: x,
    "relu2": lambda x: relax.op.square(relax.op.nn.relu(x)),
}


def _halves(node: Node, columns: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
    """Split columns into gate and linear part, interleaved (swiglu_fusion 1) or concatenated (2)."""
    fusion, axis = node.attribute("swiglu_fusion", 0), node.rank(columns) - 1
    if fusion not in (1, 2):
        raise node.refusal(f"found swiglu_fusion {fusion} without a third layer, expected 1 or 2")
    width = node.shape(columns)[axis] // 2
    starts, step = ((0, 1), 2) if fusion == 1 else ((0, width), 1)
    first, second = (slice_axes(node, columns, {axis: (start, width, step)}) for start in starts)
    return first, second


def _swiglu(node: Node, gate: relax.Expr, linear: relax.Expr) -> relax.Expr:
    """g * sigmoid(alpha * g) * (l + beta), both clamped to the limit."""
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
    scaled = gate if alpha == 1 else node.emit(gate * const(alpha, "float32"))
    active = _multiply(node, gate, relax.op.sigmoid(scaled))
    if is_late and math.isfinite(limit):
        active = below(active)
    shifted = linear if beta == 0 else node.emit(linear + const(beta, "float32"))
    return _multiply(node, active, shifted)


def _router_weights(node: Node, rows: Dim, experts: int, mixing: int) -> relax.Expr:
    """Weight of every expert for every row, (rows, experts); 0 for experts that are not chosen."""
    logits = widened(node, require_shape(node, node.tensor(1), [rows, experts], "its router_probs"))
    count = int(node.attribute("k", 1))
    if not 0 < count <= experts:
        raise node.refusal(f"found k {count}, expected 1 to its {experts} experts")
    if node.attribute("use_sparse_mixer", 0):
        if count != 2:
            raise node.refusal(f"found use_sparse_mixer and k {count}, expected k 2")
        return _sparse_mixer(node, logits)
    is_normal = bool(node.attribute("normalize_routing_weights", 0))
    is_chosen = _is_chosen(node, logits, count)
    if mixing >= 0 and node.has(mixing):
        weights = widened(node, require_shape(node, node.tensor(mixing), [rows, experts], "its router_weights"))
    else:
        weights = node.emit(relax.op.nn.softmax(logits, axis=-1))
    chosen_weights = node.emit(relax.op.where(is_chosen, weights, const(0, "float32")))
    if not is_normal:
        return chosen_weights
    return node.emit(chosen_weights / relax.op.sum(chosen_weights, [1], keepdims=True))


def _is_chosen(node: Node, logits: relax.Expr, count: int) -> relax.Expr:
    """Mask of the `count` experts with the highest logits; ties prefer lower indices."""
    other = te.reduce_axis((0, node.shape(logits)[1]), "other")

    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        logit, other_logit = x(*i), x(i[0], other)
        is_before = tirx.any(other_logit > logit, tirx.all(other_logit == logit, other < i[1]))
        return te.sum(tirx.Select(is_before, tirx.const(1, "int32"), tirx.const(0, "int32")), axis=other)

    return node.emit(node.kernel("experts_before", element, logits) < const(count, "int32"))


def _sparse_mixer(node: Node, logits: relax.Expr) -> relax.Expr:
    """Weights of the best two experts, each by a softmax over the remaining experts with logits near its own."""
    lowest = const(-math.inf, "float32")
    remaining, total = logits, None
    for _ in range(2):
        best = node.emit(relax.op.max(remaining, [1], keepdims=True))
        factor = node.emit(relax.op.maximum(relax.op.abs(logits), best))
        is_far = node.emit(node.emit((best - logits) / factor) > const(2 * _SPARSE_MIXER_JITTER, "float32"))
        near = node.emit(relax.op.where(is_far, lowest, remaining))
        weights = node.emit(relax.op.nn.softmax(near, axis=-1))
        is_best = _is_chosen(node, remaining, 1)
        best_weight = node.emit(relax.op.where(is_best, weights, const(0, "float32")))
        total = best_weight if total is None else node.emit(total + best_weight)
        remaining = node.emit(relax.op.where(is_best, lowest, remaining))
    assert total is not None
    return total
