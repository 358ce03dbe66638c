"""Convolutional networks with published layers, as exporters write them, with random weights."""

from __future__ import annotations

import onnx

from .graph import Graph

_IMAGE = (1, 3, 224, 224)


def mobilenet_v2() -> onnx.ModelProto:
    """Inverted residuals: depthwise convolutions and clips at 6."""
    graph = Graph("mobilenet_v2", opset=13)

    def relu6(x: str) -> str:
        return graph.node("Clip", x, graph.constant(0.0), graph.constant(6.0))

    x = relu6(graph.conv(graph.input("image", _IMAGE), 32, 3, stride=2, norm=True))
    settings = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for expand, channels, repeats, stride in settings:
        for index in range(repeats):
            y, wide = x, expand * graph.channels[x]
            if expand > 1:
                y = relu6(graph.conv(y, wide, 1, norm=True))
            y = relu6(graph.conv(y, wide, 3, stride=stride if index == 0 else 1, groups=wide, norm=True))
            y = graph.conv(y, channels, 1, norm=True)
            x = graph.node("Add", x, y) if index else y
    return graph.model(graph.classifier(relu6(graph.conv(x, 1280, 1, norm=True))))


def _squeeze(graph: Graph, x: str, inner: int, activate: str, gate: str) -> str:
    """Scale channels by a function of their means (squeeze and excitation)."""
    channels = graph.channels[x]
    mean = graph.node("GlobalAveragePool", x)
    hidden = graph.conv(mean, inner, 1)
    hidden = _swish(graph, hidden) if activate == "Swish" else graph.node(activate, hidden)
    attributes = {"alpha": 1 / 6, "beta": 0.5} if gate == "HardSigmoid" else {}
    return graph.node("Mul", x, graph.node(gate, graph.conv(hidden, channels, 1), **attributes))


def _swish(graph: Graph, x: str) -> str:
    return graph.node("Mul", x, graph.node("Sigmoid", x))


def mobilenet_v3() -> onnx.ModelProto:
    """The large variant: hard swish, squeeze and excitation, 5 × 5 filters."""
    graph = Graph("mobilenet_v3")
    x = graph.node("HardSwish", graph.conv(graph.input("image", _IMAGE), 16, 3, stride=2))
    settings = (
        (3, 16, 16, False, "Relu", 1),
        (3, 64, 24, False, "Relu", 2),
        (3, 72, 24, False, "Relu", 1),
        (5, 72, 40, True, "Relu", 2),
        (5, 120, 40, True, "Relu", 1),
        (5, 120, 40, True, "Relu", 1),
        (3, 240, 80, False, "HardSwish", 2),
        (3, 200, 80, False, "HardSwish", 1),
        (3, 184, 80, False, "HardSwish", 1),
        (3, 184, 80, False, "HardSwish", 1),
        (3, 480, 112, True, "HardSwish", 1),
        (3, 672, 112, True, "HardSwish", 1),
        (5, 672, 160, True, "HardSwish", 2),
        (5, 960, 160, True, "HardSwish", 1),
        (5, 960, 160, True, "HardSwish", 1),
    )
    for kernel, wide, channels, squeeze, activation, stride in settings:
        y = x if wide == graph.channels[x] else graph.node(activation, graph.conv(x, wide, 1))
        y = graph.node(activation, graph.conv(y, wide, kernel, stride=stride, groups=wide))
        y = _squeeze(graph, y, wide // 4, "Relu", "HardSigmoid") if squeeze else y
        y = graph.conv(y, channels, 1)
        x = graph.node("Add", x, y) if stride == 1 and graph.channels[x] == channels else y
    x = graph.node("HardSwish", graph.conv(x, 960, 1))
    x = graph.node("HardSwish", graph.conv(graph.node("GlobalAveragePool", x), 1280, 1))
    return graph.model(graph.classifier(x))


def efficientnet_b0() -> onnx.ModelProto:
    """Squeeze and excitation with swish, which exporters write as Sigmoid and Mul."""
    graph = Graph("efficientnet_b0")
    x = _swish(graph, graph.conv(graph.input("image", _IMAGE), 32, 3, stride=2))
    settings = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 40, 2, 2, 5),
        (6, 80, 3, 2, 3),
        (6, 112, 3, 1, 5),
        (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )
    for expand, channels, repeats, stride, kernel in settings:
        for index in range(repeats):
            narrow = graph.channels[x]
            y = x if expand == 1 else _swish(graph, graph.conv(x, expand * narrow, 1))
            wide = expand * narrow
            y = _swish(graph, graph.conv(y, wide, kernel, stride=1 if index else stride, groups=wide))
            y = graph.conv(_squeeze(graph, y, max(1, narrow // 4), "Swish", "Sigmoid"), channels, 1)
            x = graph.node("Add", x, y) if index else y
    return graph.model(graph.classifier(_swish(graph, graph.conv(x, 1280, 1))))


def shufflenet_v2() -> onnx.ModelProto:
    """Channels are split, concatenated and shuffled."""
    graph = Graph("shufflenet_v2", opset=13)

    def relu(x: str) -> str:
        return graph.node("Relu", x)

    def branch(x: str, channels: int, stride: int) -> str:
        y = relu(graph.conv(x, channels, 1, norm=True))
        y = graph.conv(y, channels, 3, stride=stride, groups=channels, norm=True)
        return relu(graph.conv(y, channels, 1, norm=True))

    x = relu(graph.conv(graph.input("image", _IMAGE), 24, 3, stride=2, norm=True))
    x = graph.pool("MaxPool", x, 3, 2, 1)
    extent = 56
    for channels, repeats in ((116, 4), (232, 8), (464, 4)):
        extent //= 2
        for index in range(repeats):
            half = channels // 2
            if index == 0:
                left = graph.conv(x, graph.channels[x], 3, stride=2, groups=graph.channels[x], norm=True)
                left, right = relu(graph.conv(left, half, 1, norm=True)), branch(x, half, 2)
            else:
                left, right = graph.node("Split", x, graph.shape(half, half), outputs=2, axis=1, channels=half)
                right = branch(right, half, 1)
            joined = graph.concat(left, right)
            parts = graph.node("Reshape", joined, graph.shape(1, 2, half, extent, extent))
            swapped = graph.node("Transpose", parts, perm=[0, 2, 1, 3, 4])
            x = graph.node("Reshape", swapped, graph.shape(1, channels, extent, extent))
    return graph.model(graph.classifier(relu(graph.conv(x, 1024, 1, norm=True))))


def resnext50() -> onnx.ModelProto:
    """Bottlenecks with 32 groups."""
    graph = Graph("resnext50", opset=13)

    def relu(x: str) -> str:
        return graph.node("Relu", x)

    x = graph.pool("MaxPool", relu(graph.conv(graph.input("image", _IMAGE), 64, 7, stride=2)), 3, 2, 1)
    for stage, repeats in enumerate((3, 4, 6, 3)):
        wide, channels = 128 << stage, 256 << stage
        for index in range(repeats):
            stride = 2 if stage and not index else 1
            y = relu(graph.conv(x, wide, 1))
            y = graph.conv(relu(graph.conv(y, wide, 3, stride=stride, groups=32)), channels, 1)
            x = relu(graph.node("Add", y, x if index else graph.conv(x, channels, 1, stride=stride)))
    return graph.model(graph.classifier(x))


def inception_v3() -> onnx.ModelProto:
    """Filters of 1 × 7 and 7 × 1, branches of many sizes, images of 299 pixels."""
    graph = Graph("inception_v3", opset=13)

    def conv(x: str, channels: int, kernel: int | tuple[int, int], stride: int = 1, pad: int | None = None) -> str:
        return graph.node("Relu", graph.conv(x, channels, kernel, stride=stride, pad=pad))

    def average(x: str) -> str:
        return graph.pool("AveragePool", x, 3, 1, 1, count_include_pad=1)

    x = conv(graph.input("image", (1, 3, 299, 299)), 32, 3, stride=2, pad=0)
    x = graph.pool("MaxPool", conv(conv(x, 32, 3, pad=0), 64, 3), 3, 2)
    x = graph.pool("MaxPool", conv(conv(x, 80, 1), 192, 3, pad=0), 3, 2)
    for pooled in (32, 64, 64):
        double = conv(conv(conv(x, 64, 1), 96, 3), 96, 3)
        x = graph.concat(conv(x, 64, 1), conv(conv(x, 48, 1), 64, 5), double, conv(average(x), pooled, 1))
    double = conv(conv(conv(x, 64, 1), 96, 3), 96, 3, stride=2, pad=0)
    x = graph.concat(conv(x, 384, 3, stride=2, pad=0), double, graph.pool("MaxPool", x, 3, 2))
    for c in (128, 160, 160, 192):
        seven = conv(conv(conv(x, c, 1), c, (1, 7)), 192, (7, 1))
        double = conv(conv(conv(conv(conv(x, c, 1), c, (7, 1)), c, (1, 7)), c, (7, 1)), 192, (1, 7))
        x = graph.concat(conv(x, 192, 1), seven, double, conv(average(x), 192, 1))
    three = conv(conv(x, 192, 1), 320, 3, stride=2, pad=0)
    seven = conv(conv(conv(conv(x, 192, 1), 192, (1, 7)), 192, (7, 1)), 192, 3, stride=2, pad=0)
    x = graph.concat(three, seven, graph.pool("MaxPool", x, 3, 2))
    for _ in range(2):
        three = conv(x, 384, 1)
        double = conv(conv(x, 448, 1), 384, 3)
        parts = [conv(value, 384, size) for value in (three, double) for size in ((1, 3), (3, 1))]
        x = graph.concat(conv(x, 320, 1), *parts, conv(average(x), 192, 1))
    return graph.model(graph.classifier(x))


def unet() -> onnx.ModelProto:
    """Down and up with skips: half of the steps up are transposed convolutions, half are resizings."""
    graph = Graph("unet", opset=13)

    def twice(x: str, channels: int) -> str:
        for _ in range(2):
            x = graph.node("Relu", graph.conv(x, channels, 3, norm=True))
        return x

    x = twice(graph.input("image", (1, 3, 256, 256)), 32)
    skips = []
    for channels in (64, 128, 256, 512):
        skips.append(x)
        x = twice(graph.pool("MaxPool", x, 2, 2), channels)
    for level, channels in enumerate((256, 128, 64, 32)):
        if level % 2:
            scales = graph.constant([1, 1, 2, 2])
            x = graph.node("Resize", x, "", scales, mode="linear", coordinate_transformation_mode="half_pixel")
            x = graph.conv(x, channels, 3)
        else:
            inner = graph.channels[x]
            weight = graph.weight(inner, channels, 2, 2, deviation=(2 / inner) ** 0.5)
            bias = graph.weight(channels, deviation=0.1)
            x = graph.node("ConvTranspose", x, weight, bias, channels=channels, kernel_shape=[2, 2], strides=[2, 2])
        x = twice(graph.concat(skips.pop(), x), channels)
    # A sigmoid of large sums would mostly show float16's rounding where they cancel.
    return graph.model(graph.node("Sigmoid", graph.conv(x, 1, 1, gain=1 / 32)))


def convnext_tiny() -> onnx.ModelProto:
    """Depthwise 7 × 7 filters, layer norms over channels between transposes, and GELU."""
    graph = Graph("convnext_tiny")

    def norm(x: str) -> str:
        channels = graph.channels[x]
        last = graph.layer_norm(graph.node("Transpose", x, perm=[0, 2, 3, 1]), channels)
        return graph.node("Transpose", last, perm=[0, 3, 1, 2])

    x = norm(graph.conv(graph.input("image", _IMAGE), 96, 4, stride=4, pad=0))
    for stage, repeats in enumerate((3, 3, 9, 3)):
        channels = 96 << stage
        if stage:
            x = graph.conv(norm(x), channels, 2, stride=2, pad=0)
        for _ in range(repeats):
            y = graph.node("Transpose", graph.conv(x, channels, 7, groups=channels), perm=[0, 2, 3, 1])
            y = graph.linear(graph.layer_norm(y, channels), channels, 4 * channels)
            y = graph.linear(graph.gelu(y), 4 * channels, channels)
            y = graph.node("Mul", y, graph.weight(channels, deviation=0.5))
            x = graph.node("Add", x, graph.node("Transpose", y, perm=[0, 3, 1, 2]))
    return graph.model(graph.classifier(x))


NETWORKS = {
    make.__name__: make
    for make in (
        mobilenet_v2,
        mobilenet_v3,
        efficientnet_b0,
        shufflenet_v2,
        resnext50,
        inception_v3,
        unet,
        convnext_tiny,
    )
}
