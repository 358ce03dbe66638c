"""How many permutations are left of networks whose feature maps lie channels-last: only those that move something.

Blocks of known networks, small; each is also run and compared with ONNX Runtime.
"""

import sys
from pathlib import Path

import numpy as np
import pytest

import relax_hetero as rh
from device_pairs import BASELINE
from models.running import (
    assert_both_devices_hold_ops,
    assert_same,
    cut,
    expected_outputs,
    outputs_of,
)
from modules import ops_of
from relax_hetero import get_pipeline

_BENCH = str(Path(__file__).resolve().parents[3] / "apps" / "bench")
if _BENCH not in sys.path:
    sys.path.insert(0, _BENCH)

from model_zoo.graph import Graph  # noqa: E402


def start(name, channels=16):
    """A graph with an image and its first convolution."""
    graph = Graph(name)
    return graph, graph.node("Relu", graph.conv(graph.input("image", (1, 3, 16, 16)), channels, 3))


def pooled(graph, x):
    """The mean over pixels, flattened: an end that takes no permutation."""
    return graph.model(graph.node("Flatten", graph.node("GlobalAveragePool", x), axis=1))


def squeeze_and_excite():
    graph, x = start("squeeze_and_excite")
    y = graph.node("HardSwish", graph.conv(x, 32, 1, norm=True))
    y = graph.node("HardSwish", graph.conv(y, 32, 5, groups=32, norm=True))
    gate = graph.node("Relu", graph.conv(graph.node("GlobalAveragePool", y), 8, 1))
    y = graph.node("Mul", y, graph.node("HardSigmoid", graph.conv(gate, 32, 1), alpha=1 / 6, beta=0.5))
    return pooled(graph, graph.node("Add", x, graph.conv(y, 16, 1, norm=True)))


def inception():
    graph, x = start("inception")
    x = graph.pool("MaxPool", x, 3, 2, ceil_mode=1)
    mean = graph.conv(graph.pool("AveragePool", x, 3, 1, 1, count_include_pad=1), 8, 1)
    wide = graph.conv(graph.conv(x, 8, (1, 7)), 8, (7, 1))
    return pooled(
        graph, graph.node("Relu", graph.concat(graph.conv(x, 8, 1), wide, mean, graph.pool("MaxPool", x, 3, 1, 1)))
    )


def dense():
    graph, x = start("dense")
    for _ in range(3):
        x = graph.concat(x, graph.conv(graph.node("Relu", graph.batch_norm(x)), 8, 3))
    return pooled(graph, graph.pool("AveragePool", x, 2, 2))


def local_response():
    graph, x = start("local_response")
    return pooled(graph, graph.conv(graph.node("LRN", x, size=5, alpha=1e-2, beta=0.75, bias=1.0), 8, 3))


def shuffle():
    graph, x = start("shuffle")
    for _ in range(2):
        left, right = graph.node("Split", x, graph.shape(8, 8), outputs=2, axis=1, channels=8)
        joined = graph.concat(left, graph.node("Relu", graph.conv(right, 8, 3)))
        parts = graph.node("Reshape", joined, graph.shape(1, 2, 8, 16, 16))
        swapped = graph.node("Transpose", parts, perm=[0, 2, 1, 3, 4])
        x = graph.node("Reshape", swapped, graph.shape(1, 16, 16, 16), channels=16)
    return pooled(graph, graph.conv(x, 8, 1))


def up_and_down():
    graph, x = start("up_and_down")
    y = graph.conv(graph.pool("MaxPool", x, 2, 2), 32, 3, norm=True)
    weight, bias = graph.weight(32, 16, 2, 2, deviation=0.2), graph.weight(16, deviation=0.1)
    up = graph.node("ConvTranspose", y, weight, bias, channels=16, kernel_shape=[2, 2], strides=[2, 2])
    resized = graph.node("Resize", y, "", graph.constant([1, 1, 2, 2]), mode="linear")
    return pooled(graph, graph.conv(graph.concat(x, graph.node("Relu", up), resized), 4, 3))


def detector():
    graph, x = start("detector")
    y = graph.conv(x, 16, 3, stride=2)
    y = graph.concat(y, *(graph.pool("MaxPool", y, size, 1, size // 2) for size in (5, 9)))
    y = graph.node("Resize", graph.conv(y, 16, 1), "", graph.constant([1, 1, 2, 2]), mode="nearest")
    left, right = graph.node("Split", graph.concat(x, y), graph.shape(16, 16), outputs=2, axis=1, channels=16)
    head = graph.conv(graph.node("Mul", left, graph.node("Sigmoid", right)), 3 * 7, 1)
    anchors = graph.node("Reshape", head, graph.shape(1, 3, 7, 256))
    return graph.model(graph.node("Sigmoid", graph.node("Transpose", anchors, perm=[0, 3, 1, 2])))


def style():
    graph, x = start("style")
    padded = graph.node("Pad", x, graph.shape(0, 0, 2, 2, 0, 0, 2, 2), mode="reflect")
    y = graph.conv(padded, 64, 5, pad=0)
    y = graph.node("InstanceNormalization", y, graph.uniform(64), graph.weight(64, deviation=0.1))
    y = graph.node("DepthToSpace", graph.node("Relu", y), blocksize=2, mode="CRD", channels=16)
    return graph.model(graph.node("Tanh", graph.conv(y, 3, 3)))


# The channel shuffles; the interleaved pixels of a transposed convolution; of the last the norm, whose kernel goes
# along the pixels of a channel, depth to space, and the image made.
LEFT = {
    squeeze_and_excite: 0,
    inception: 0,
    dense: 0,
    local_response: 0,
    shuffle: 2,
    up_and_down: 1,
    detector: 0,
    style: 3,
}


def permutes_left(mod):
    """Permutations after MovePermutes."""
    for each in get_pipeline().passes:
        mod = each(mod)
        if each.info.name == "MovePermutes":
            break
    return ops_of(mod).count("relax.permute_dims")


def check(model, permutes, **options):
    mod = rh.from_onnx(model, **options)
    assert permutes_left(mod) == permutes
    image = {"image": np.random.default_rng(1).standard_normal((1, 3, 16, 16)).astype("float32")}
    executable = rh.compile(mod)
    assert_same(outputs_of(executable, image), expected_outputs(model, image))
    return executable


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", LEFT, ids=lambda make: make.__name__)
def test_permutations_left(make):
    check(make(), LEFT[make], vdevices=["llvm"])


@pytest.mark.parametrize("make", [dense, up_and_down], ids=lambda make: make.__name__)
def test_none_for_a_feature_map_that_crosses(make):
    model = make()
    names = [node.name for node in model.graph.node]
    placement = cut(names, [len(names) // 3, 2 * len(names) // 3])
    assert_both_devices_hold_ops(check(model, LEFT[make], vdevices=["llvm", BASELINE], placement=placement))
