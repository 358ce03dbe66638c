"""Networks of other kinds than the rest of the zoo: windows, scans, recurrences, caches, resized maps, top-k.

They are small, and run only by name: ``python apps/bench/gpu_models.py swin mamba``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto

from .graph import Graph


def _silu(graph: Graph, x: str) -> str:
    return graph.node("Mul", x, graph.node("Sigmoid", x))


def _rms_norm(graph: Graph, x: str, width: int) -> str:
    mean = graph.node("ReduceMean", graph.node("Mul", x, x), axes=[-1], keepdims=1)
    root = graph.node("Sqrt", graph.node("Add", mean, graph.constant(1e-6)))
    return graph.node("Mul", graph.node("Div", x, root), graph.uniform(width))


def _plain(graph: Graph, x: str, inputs: int, outputs: int) -> str:
    return graph.node("MatMul", x, graph.weight(inputs, outputs, deviation=inputs**-0.5))


def _slice(graph: Graph, x: str, axis: int, begin: int, end: int) -> str:
    return graph.node("Slice", x, graph.shape(begin), graph.shape(end), graph.shape(axis))


def swin(size: int = 56) -> onnx.ModelProto:
    """Two stages of a Swin transformer: attention in windows, every second time shifted and masked."""
    graph, width, window = Graph("swin"), 96, 7
    x = graph.conv(graph.input("image", (1, 3, 4 * size, 4 * size)), width, 4, stride=4, pad=0)
    x = graph.node("Reshape", x, graph.shape(1, width, size * size))
    x = graph.node("Reshape", graph.node("Transpose", x, perm=[0, 2, 1]), graph.shape(1, size, size, width))
    for stage, heads in enumerate((3, 6)):
        if stage:
            corners = [
                graph.node("Slice", x, graph.shape(i, j), graph.shape(size, size), graph.shape(1, 2), graph.shape(2, 2))
                for j in (0, 1)
                for i in (0, 1)
            ]
            size //= 2
            x = graph.layer_norm(graph.node("Concat", *corners, axis=-1), 4 * width)
            x, width = _plain(graph, x, 4 * width, 2 * width), 2 * width
        for shift in (0, window // 2):
            x = graph.node("Add", x, _window_attention(graph, graph.layer_norm(x, width), size, width, heads, shift))
            y = graph.linear(graph.layer_norm(x, width), width, 4 * width)
            x = graph.node("Add", x, graph.linear(graph.gelu(y), 4 * width, width))
    return graph.model(graph.linear(graph.node("ReduceMean", x, axes=[1, 2], keepdims=0), width, 100))


def _window_attention(graph: Graph, x: str, size: int, width: int, heads: int, shift: int) -> str:
    window, count = 7, size // 7
    tokens = window * window
    if shift:
        x = _rolled(graph, x, shift, size)
    x = graph.node("Reshape", x, graph.shape(count, window, count, window, width))
    x = graph.node("Reshape", graph.node("Transpose", x, perm=[0, 2, 1, 3, 4]), graph.shape(-1, tokens, width))
    joined = graph.node("Reshape", graph.linear(x, width, 3 * width), graph.shape(-1, tokens, 3, heads, width // heads))
    joined = graph.node("Transpose", joined, perm=[2, 0, 3, 1, 4])
    q, k, v = (graph.node("Gather", joined, graph.constant(index, "int64"), axis=0) for index in range(3))
    q = graph.node("Mul", q, graph.constant((width // heads) ** -0.5))
    scores = graph.node("MatMul", q, graph.node("Transpose", k, perm=[0, 1, 3, 2]))
    scores = graph.node("Add", scores, graph.weight(1, heads, tokens, tokens, deviation=0.5))
    if shift:
        region = np.zeros((size, size), "int64")
        for row, low in enumerate((0, size - window, size - shift)):
            for column, left in enumerate((0, size - window, size - shift)):
                region[low:, left:] = 3 * row + column
        parts = region.reshape(count, window, count, window).transpose(0, 2, 1, 3).reshape(-1, 1, tokens)
        mask = np.where(parts != parts.transpose(0, 2, 1), -100.0, 0.0)[:, None]
        scores = graph.node("Add", scores, graph.constant(mask))
    context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
    context = graph.node("Transpose", context, perm=[0, 2, 1, 3])
    out = graph.linear(graph.node("Reshape", context, graph.shape(-1, tokens, width)), width, width)
    out = graph.node("Reshape", out, graph.shape(count, count, window, window, width))
    out = graph.node("Reshape", graph.node("Transpose", out, perm=[0, 2, 1, 3, 4]), graph.shape(1, size, size, width))
    return _rolled(graph, out, size - shift, size) if shift else out


def _rolled(graph: Graph, x: str, shift: int, size: int) -> str:
    for axis in (1, 2):
        ends = _slice(graph, x, axis, shift, size), _slice(graph, x, axis, 0, shift)
        x = graph.node("Concat", *ends, axis=axis)
    return x


def mamba(steps: int = 16) -> onnx.ModelProto:
    """Two blocks of a selective state space model: a causal convolution, and a scan written out step by step."""
    graph, width, inner, state = Graph("mamba"), 128, 256, 16
    x = graph.input("x", (1, steps, width))
    for _ in range(2):
        joined = _plain(graph, _rms_norm(graph, x, width), width, 2 * inner)
        u, gate = graph.node("Split", joined, graph.shape(inner, inner), outputs=2, axis=-1)
        u = graph.node("Transpose", u, perm=[0, 2, 1])
        taps, bias = graph.weight(inner, 1, 4, deviation=0.5), graph.weight(inner, deviation=0.1)
        u = graph.node("Conv", u, taps, bias, kernel_shape=[4], pads=[3, 0], group=inner)
        u = _silu(graph, graph.node("Transpose", u, perm=[0, 2, 1]))
        delta = graph.node("Softplus", graph.linear(u, inner, inner))
        sources, sinks = _plain(graph, u, inner, state), _plain(graph, u, inner, state)
        decay = graph.constant(-np.linspace(0.5, 2.0, inner * state).reshape(inner, state))
        memory = graph.constant(np.zeros((1, inner, state)))
        outputs = []
        for step in range(steps):
            operands = [_slice(graph, value, 1, step, step + 1) for value in (delta, u, sources, sinks)]
            change, value = (graph.node("Reshape", each, graph.shape(1, inner, 1)) for each in operands[:2])
            decayed = graph.node("Mul", memory, graph.node("Exp", graph.node("Mul", change, decay)))
            memory = graph.node("Add", decayed, graph.node("Mul", graph.node("Mul", change, operands[2]), value))
            outputs.append(graph.node("ReduceSum", graph.node("Mul", memory, operands[3]), graph.shape(2), keepdims=0))
        y = graph.node("Concat", *(graph.node("Unsqueeze", y, graph.shape(1)) for y in outputs), axis=1)
        y = graph.node("Add", y, graph.node("Mul", u, graph.weight(inner, deviation=1.0)))
        y = graph.node("Mul", y, _silu(graph, gate))
        x = graph.node("Add", x, _plain(graph, y, inner, width))
    return graph.model(_rms_norm(graph, x, width))


def t5_encoder() -> onnx.ModelProto:
    """Four layers: RMS norms, a bias by relative positions, unscaled scores, gated GELU."""
    graph, sequence, width, heads = Graph("t5_encoder"), 96, 512, 8
    ids = graph.input("input_ids", (1, sequence), TensorProto.INT64)
    x = graph.node("Gather", graph.weight(4000, width, deviation=1.0), ids)
    distance = np.arange(sequence)[None] - np.arange(sequence)[:, None]
    far = np.log(np.maximum(np.abs(distance), 1) / 8.0) / np.log(128 / 8.0) * 8
    bucket = np.where(np.abs(distance) < 8, np.abs(distance), np.minimum(8 + far.astype("int64"), 15))
    bucket = bucket + 16 * (distance > 0)
    bias = graph.node("Gather", graph.weight(32, heads, deviation=1.0), graph.constant(bucket, "int64"))
    bias = graph.node("Unsqueeze", graph.node("Transpose", bias, perm=[2, 0, 1]), graph.shape(0))
    for _ in range(4):
        y = _rms_norm(graph, x, width)
        q, k, v = (
            graph.node(
                "Transpose",
                graph.node("Reshape", _plain(graph, y, width, width), graph.shape(1, sequence, heads, 64)),
                perm=perm,
            )
            for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
        )
        q = graph.node("Mul", q, graph.constant(0.2))
        scores = graph.node("Add", graph.node("MatMul", q, k), bias)
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
        context = graph.node("Transpose", context, perm=[0, 2, 1, 3])
        merged = graph.node("Reshape", context, graph.shape(1, sequence, width))
        x = graph.node("Add", x, _plain(graph, merged, width, width))
        y = _rms_norm(graph, x, width)
        gated = graph.node("Mul", graph.gelu(_plain(graph, y, width, 1024)), _plain(graph, y, width, 1024))
        x = graph.node("Add", x, _plain(graph, gated, 1024, width))
    return graph.model(_rms_norm(graph, x, width))


def llama_step() -> onnx.ModelProto:
    """One token through two layers with a cache: rotary embedding, eight query heads, two key heads, gated SiLU."""
    graph, past, width, heads, shared, size = Graph("llama_step"), 47, 512, 8, 2, 64
    x = graph.input("x", (1, 1, width))
    angles = np.outer([past], 10000.0 ** (-np.arange(0, size, 2) / size))
    turn = [graph.constant(np.tile(wave(angles), (1, 1, 1, 2))) for wave in (np.cos, np.sin)]
    caches = []
    for layer in range(2):
        y = _rms_norm(graph, x, width)
        q, k, v = (
            graph.node(
                "Transpose",
                graph.node("Reshape", _plain(graph, y, width, count * size), graph.shape(1, 1, count, size)),
                perm=[0, 2, 1, 3],
            )
            for count in (heads, shared, shared)
        )
        q, k = (_rotated(graph, value, size, *turn) for value in (q, k))
        for name, new in ((f"keys_{layer}", k), (f"values_{layer}", v)):
            caches.append(graph.node("Concat", graph.input(name, (1, shared, past, size)), new, axis=2))
        k, v = (_repeated(graph, cache, shared, heads // shared, past + 1, size) for cache in caches[-2:])
        scores = graph.node("MatMul", q, graph.node("Transpose", k, perm=[0, 1, 3, 2]))
        scores = graph.node("Mul", scores, graph.constant(size**-0.5))
        context = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)
        context = graph.node("Reshape", graph.node("Transpose", context, perm=[0, 2, 1, 3]), graph.shape(1, 1, width))
        x = graph.node("Add", x, _plain(graph, context, width, width))
        y = _rms_norm(graph, x, width)
        gated = graph.node("Mul", _silu(graph, _plain(graph, y, width, 1408)), _plain(graph, y, width, 1408))
        x = graph.node("Add", x, _plain(graph, gated, 1408, width))
    return graph.model(_plain(graph, _rms_norm(graph, x, width), width, 2000), *caches)


def _rotated(graph: Graph, x: str, size: int, cosine: str, sine: str) -> str:
    low, high = _slice(graph, x, 3, 0, size // 2), _slice(graph, x, 3, size // 2, size)
    turned = graph.node("Concat", graph.node("Neg", high), low, axis=3)
    return graph.node("Add", graph.node("Mul", x, cosine), graph.node("Mul", turned, sine))


def _repeated(graph: Graph, x: str, shared: int, times: int, length: int, size: int) -> str:
    wide = graph.node("Unsqueeze", x, graph.shape(2))
    wide = graph.node("Expand", wide, graph.shape(1, shared, times, length, size))
    return graph.node("Reshape", wide, graph.shape(1, shared * times, length, size))


def diffusion_unet() -> onnx.ModelProto:
    """A step of a denoiser: group norms, a time embedding, attention between pixels, resized and joined maps."""
    graph, width = Graph("diffusion_unet"), 64
    image, time = graph.input("image", (1, 4, 32, 32)), graph.input("time", (1, 1))
    angles = graph.node("Mul", time, graph.constant(np.exp(-np.arange(32) / 8.0)[None]))
    embedded = graph.node("Concat", graph.node("Sin", angles), graph.node("Cos", angles), axis=1)
    embedded = _silu(graph, graph.linear(embedded, 64, 256))
    first = graph.conv(image, width, 3)
    down = _residual(graph, first, width, embedded)
    low = _residual(graph, graph.conv(down, 2 * width, 3, stride=2), 2 * width, embedded)
    middle = _residual(graph, _pixel_attention(graph, low, 2 * width, 16), 2 * width, embedded)
    joined = graph.concat(middle, low)
    up = graph.node("Resize", joined, "", graph.constant([1, 1, 2, 2]), mode="nearest")
    up = _residual(graph, graph.concat(graph.conv(up, width, 3), down, first), width, embedded)
    return graph.model(graph.conv(_silu(graph, _group_norm(graph, up)), 4, 3))


def _group_norm(graph: Graph, x: str, groups: int = 8) -> str:
    channels = graph.channels[x]
    flat = graph.node("Reshape", x, graph.shape(0, groups, -1))
    ones, zeros = graph.constant(np.ones(groups)), graph.constant(np.zeros(groups))
    flat = graph.node("InstanceNormalization", flat, ones, zeros, epsilon=1e-5)
    back = graph.node("Reshape", flat, graph.node("Shape", x), channels=channels)
    scaled = graph.node("Mul", back, graph.node("Reshape", graph.uniform(channels), graph.shape(channels, 1, 1)))
    return graph.node("Add", scaled, graph.weight(channels, 1, 1, deviation=0.1), channels=channels)


def _residual(graph: Graph, x: str, width: int, embedded: str) -> str:
    y = graph.conv(_silu(graph, _group_norm(graph, x)), width, 3)
    shift = graph.node("Reshape", graph.linear(embedded, 256, width), graph.shape(1, width, 1, 1))
    y = graph.node("Add", y, shift, channels=width)
    y = graph.conv(_silu(graph, _group_norm(graph, y)), width, 3)
    return graph.node("Add", y, x if graph.channels[x] == width else graph.conv(x, width, 1), channels=width)


def _pixel_attention(graph: Graph, x: str, width: int, size: int) -> str:
    flat = graph.node("Reshape", _group_norm(graph, x), graph.shape(1, width, size * size))
    tokens = graph.node("Transpose", flat, perm=[0, 2, 1])
    q, k, v = (graph.linear(tokens, width, width) for _ in range(3))
    scores = graph.node("MatMul", q, graph.node("Transpose", k, perm=[0, 2, 1]))
    scores = graph.node("Mul", scores, graph.constant(width**-0.5))
    context = graph.linear(graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v), width, width)
    back = graph.node("Reshape", graph.node("Transpose", context, perm=[0, 2, 1]), graph.shape(1, width, size, size))
    return graph.node("Add", x, back, channels=width)


def detector() -> onnx.ModelProto:
    """A small detector: strided and transposed convolutions, two scales, the best hundred boxes by top-k."""
    graph, best = Graph("detector"), 100
    x = graph.node("Relu", graph.conv(graph.input("image", (1, 3, 128, 128)), 16, 3, stride=2, norm=True))
    fine = graph.node("LeakyRelu", graph.conv(x, 32, 3, stride=2, norm=True), alpha=0.1)
    coarse = graph.node("HardSwish", graph.conv(fine, 64, 3, stride=2, norm=True))
    up = graph.node(
        "ConvTranspose",
        coarse,
        graph.weight(64, 32, 2, 2, deviation=0.1),
        channels=32,
        kernel_shape=[2, 2],
        strides=[2, 2],
    )
    pooled = graph.pool("MaxPool", graph.concat(fine, up), 5, 1, 2)
    boxes, scores = [], []
    for value in (graph.concat(pooled, fine), coarse):
        head = graph.node("Transpose", graph.conv(value, 5, 1), perm=[0, 2, 3, 1])
        head = graph.node("Reshape", head, graph.shape(1, -1, 5))
        boxes.append(
            graph.node(
                "Exp", graph.node("Clip", _slice(graph, head, 2, 0, 4), graph.constant(-4.0), graph.constant(4.0))
            )
        )
        scores.append(graph.node("Sigmoid", _slice(graph, head, 2, 4, 5)))
    score = graph.node("Squeeze", graph.node("Concat", *scores, axis=1), graph.shape(2))
    top, where = graph.node("TopK", score, graph.shape(best), outputs=2, axis=1)
    places = graph.node("Expand", graph.node("Unsqueeze", where, graph.shape(2)), graph.shape(1, best, 4))
    return graph.model(graph.node("GatherElements", graph.node("Concat", *boxes, axis=1), places, axis=1), top)


def tagger() -> onnx.ModelProto:
    """Words to tags: a bidirectional LSTM, then a GRU, and probabilities of each word's tag."""
    graph, words, width, hidden = Graph("tagger"), 24, 64, 48
    ids = graph.input("input_ids", (words, 1), TensorProto.INT64)
    x = graph.node("Gather", graph.weight(1000, width, deviation=1.0), ids)
    size = hidden**-0.5
    weights = graph.weight(2, 4 * hidden, width, deviation=size), graph.weight(2, 4 * hidden, hidden, deviation=size)
    x = graph.node(
        "LSTM", x, *weights, graph.weight(2, 8 * hidden, deviation=0.1), hidden_size=hidden, direction="bidirectional"
    )
    x = graph.node("Reshape", graph.node("Transpose", x, perm=[0, 2, 1, 3]), graph.shape(words, 1, 2 * hidden))
    weights = (
        graph.weight(1, 3 * hidden, 2 * hidden, deviation=size),
        graph.weight(1, 3 * hidden, hidden, deviation=size),
    )
    x = graph.node("GRU", x, *weights, graph.weight(1, 6 * hidden, deviation=0.1), hidden_size=hidden)
    x = graph.linear(graph.node("Squeeze", x, graph.shape(1)), hidden, 17)
    return graph.model(graph.node("Softmax", x, axis=-1))


def recurrent(op: str, gates: int, hidden: int = 256) -> onnx.ModelProto:
    """A recurrent layer over a sequence of any length, ``(steps, batch, hidden)``."""
    graph, size = Graph(op.lower()), hidden**-0.5
    x = graph.input("x", ("steps", "batch", hidden))
    weights = [graph.weight(1, gates * hidden, hidden, deviation=size) for _ in range(2)]
    outputs = graph.node(
        op, x, *weights, graph.weight(1, 2 * gates * hidden, deviation=0.1), outputs=2, hidden_size=hidden
    )
    return graph.model(*outputs)


_MADE: tuple[Callable[[], onnx.ModelProto], ...] = (
    swin, mamba, t5_encoder, llama_step, diffusion_unet, detector, tagger
)  # fmt: skip
NEWER: dict[str, Callable[[], onnx.ModelProto]] = {
    **{make.__name__: make for make in _MADE},
    "lstm": lambda: recurrent("LSTM", 4),
    "gru": lambda: recurrent("GRU", 3),
}
