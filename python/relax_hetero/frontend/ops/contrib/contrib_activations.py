"""Activations fused with a bias by ONNX Runtime's optimizer."""

from __future__ import annotations

from tvm import relax

from ..elementwise import cast, widened
from ..node import Node, const, dtype_of
from ..required_sizes import require_broadcast, require_shape
from ..slicing import slice_axes
from ..table import MICROSOFT, convert_node, converts


def _with_bias(node: Node, index: int) -> relax.Expr:
    """Add input `index`, if present, along the last axis of input 0; half precision becomes float32."""
    data = node.tensor(0)
    wide = widened(node, data)
    if not node.has(index):
        return wide
    bias = require_shape(node, node.tensor(index), [node.shape(data)[-1]], "its bias")
    return node.emit(wide + widened(node, bias))


@converts("Gelu", "BiasGelu", domain=MICROSOFT)
def gelu(node: Node) -> relax.Expr:
    """x / 2 * (1 + erf(x / sqrt(2))) of x + bias."""
    return cast(node, node.emit(relax.op.nn.gelu(_with_bias(node, 1))), dtype_of(node.tensor(0)))


@converts("FastGelu", domain=MICROSOFT)
def fast_gelu(node: Node) -> relax.Expr:
    """Tanh approximation of GELU of x + bias."""
    return cast(node, node.emit(relax.op.nn.gelu_tanh(_with_bias(node, 1))), dtype_of(node.tensor(0)))


@converts("QuickGelu", domain=MICROSOFT)
def quick_gelu(node: Node) -> relax.Expr:
    """x * sigmoid(alpha * x)."""
    data = node.tensor(0)
    wide = widened(node, data)
    alpha = node.attribute("alpha", 1.702)
    scaled = wide if alpha == 1.0 else node.emit(wide * const(alpha, dtype_of(wide)))
    return cast(node, node.emit(wide * relax.op.sigmoid(scaled)), dtype_of(data))


@converts("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(node: Node) -> relax.Expr:
    """First half of the channels of x + bias, times the GELU of the second half."""
    wide = _with_bias(node, 1)
    channels = node.shape(wide)[-1]
    if not isinstance(channels, int) or channels % 2:
        raise node.refusal(f"found {channels} channels, expected a known, even number")
    axis = node.rank(wide) - 1
    left, right = (slice_axes(node, wide, {axis: (start, channels // 2, 1)}) for start in (0, channels // 2))
    return cast(node, node.emit(left * relax.op.nn.gelu(right)), dtype_of(node.tensor(0)))


@converts("BiasAdd", domain=MICROSOFT)
def bias_add(node: Node) -> relax.Expr:
    """x + bias along the last axis + skip."""
    wide = _with_bias(node, 1)
    skip = require_shape(node, node.tensor(2), node.shape(wide), "its skip input")
    return cast(node, node.emit(wide + widened(node, skip)), dtype_of(node.tensor(0)))


@converts("ScaledSiLU", domain=MICROSOFT)
def scaled_silu(node: Node) -> relax.Expr:
    """z * sigmoid(z) of z = scale * x, each step rounded to x's type."""
    data = node.tensor(0)
    dtype = dtype_of(data)
    scale = const(node.attribute("alpha", 1.0), "float32") if not node.has(1) else cast(node, node.tensor(1), "float32")
    scale = node.emit(relax.op.reshape(scale, ()))
    scaled = cast(node, node.emit(cast(node, data, "float32") * scale), dtype)
    gate = cast(node, node.emit(relax.op.sigmoid(cast(node, scaled, "float32"))), dtype)
    return node.emit(scaled * gate)


@converts("SwiGLU", domain=MICROSOFT)
def swiglu(node: Node) -> relax.Expr:
    """g * sigmoid(alpha * g) * (u + beta), with both clamped if the limit is above 0."""
    gate, dtype = node.tensor(0), dtype_of(node.tensor(0))
    if node.has(1):
        up = require_shape(node, node.tensor(1), node.shape(gate), "its second half")
    else:
        axis, width = node.rank(gate) - 1, node.shape(gate)[-1]
        if not isinstance(width, int) or width % 2:
            raise node.refusal(f"found {width} channels, expected a known, even number")
        gate, up = (slice_axes(node, gate, {axis: (start, width // 2, 1)}) for start in (0, width // 2))
    gate, up = (cast(node, value, "float32") for value in (gate, up))
    limit = node.attribute("limit", 0.0)
    if limit > 0:
        gate = node.emit(relax.op.minimum(gate, const(limit, "float32")))
        up = node.emit(relax.op.clip(up, -limit, limit))
    alpha = const(node.attribute("activation_alpha", 1.0), "float32")
    beta = const(node.attribute("activation_beta", 0.0), "float32")
    active = node.emit(gate * relax.op.sigmoid(gate * alpha))
    if node.attribute("round_activation", 0):
        active = cast(node, cast(node, active, dtype), "float32")
    return cast(node, node.emit(active * (up + beta)), dtype)


@converts("GatedAdd", domain=MICROSOFT)
def gated_add(node: Node) -> relax.Expr:
    """x + y * gate, with a gate per row."""
    data = node.tensor(0)
    dims = node.shape(data)
    if node.has(3):
        raise node.refusal("found a gate_weight, expected a gate for each row")
    other = require_shape(node, node.tensor(1), dims, "its second input")
    gate = require_shape(node, node.tensor(2), [*dims[:-1], 1], "its gate")
    return node.emit(data + other * gate)


@converts("BiasDropout", "BitmaskBiasDropout", "BitmaskDropout", domain=MICROSOFT)
def bias_dropout(node: Node) -> relax.Expr:
    """x + bias + residual, without dropout."""
    has_bias = node.op_type != "BitmaskDropout"
    training = 4 if has_bias else 2
    training_value = node.constant(training)
    if node.has(training) and (training_value is None or training_value.any()):
        raise node.refusal("asks for training (training_mode), expected false")
    data = node.tensor(0)
    if has_bias:
        data = node.emit(data + require_broadcast(node, node.tensor(1), node.shape(data), "its bias"))
    if has_bias and node.has(2):
        data = node.emit(data + require_shape(node, node.tensor(2), node.shape(data), "its residual"))
    if node.num_outputs == 1:
        return data
    if node.op_type != "BiasDropout":
        raise node.refusal("asks for its mask as bits, which only training reads")
    return node.outputs([data, node.filled(node.shape(data), True, "bool")])


@converts("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(node: Node) -> relax.Expr:
    """softmax(x + bias) over all axes from `axis` on."""
    data = node.tensor(0)
    wide = widened(node, data)
    bias = require_broadcast(node, widened(node, node.tensor(1)), node.shape(data), "its bias")
    total = node.emit(wide + bias)
    axis = node.axis(node.attribute("axis", 1), node.rank(data))
    value = convert_node(node.as_op("Softmax", [total], 11, axis=axis))
    return cast(node, node.builder.normalize(value), dtype_of(data))


@converts("IsAllFinite", domain=MICROSOFT)
def is_all_finite(node: Node) -> relax.Expr:
    """Return whether all elements of all inputs are finite, or not NaN, or not infinite."""
    ops = {"isnan_only": relax.op.isnan, "isinf_only": relax.op.isinf}
    tests = [op for name, op in ops.items() if node.attribute(name, 0)] or list(ops.values())
    maximum_so_far: relax.Expr | None = None
    for index in range(len(node.inputs)):
        for op in tests:
            flags = cast(node, node.emit(op(widened(node, node.tensor(index)))), "int32")
            maximum = node.emit(relax.op.max(relax.op.reshape(flags, (-1,))))
            maximum_so_far = maximum if maximum_so_far is None else node.emit(relax.op.maximum(maximum_so_far, maximum))
    if maximum_so_far is None:
        raise node.refusal("has no inputs")
    return node.emit(relax.op.equal(maximum_so_far, const(0, "int32")))


@converts("ComplexMul", "ComplexMulConj", domain=MICROSOFT)
def complex_product(node: Node) -> relax.Expr:
    """Product of complex numbers with parts on the last axis, optionally with the second conjugated."""
    parts = []
    for index in (0, 1):
        value = node.tensor(index)
        axis = node.rank(value) - 1
        if axis < 0 or node.shape(value)[-1] != 2:
            raise node.refusal(f"found an input of shape {node.shape(value)}, expected pairs on the last axis")
        parts += [slice_axes(node, value, {axis: (place, 1, 1)}) for place in (0, 1)]
    a, b, c, d = parts
    if node.op_type == "ComplexMulConj":
        d = node.emit(-d)
    real = a * c - b * d
    imaginary = a * d + b * c
    return node.emit(relax.op.concat([node.emit(real), node.emit(imaginary)], axis=-1))
