"""Winograd's transforms: their identity in float64, and layouts of transformed weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from relax_hetero.encoding import Encoding, PackedLayout
from relax_hetero.encoding.packed_layout import unsupported_reason
from relax_hetero.encoding.winograd import POINTS, positions, restore_windows, transform_windows, window_matrix
from relax_hetero.errors import EncodingError
from seeds import fresh_rng

LAYOUT = PackedLayout((0, 2, 3, 1), (0,), (32,), winograd=2)
TEXT = "pack<outer=[0, 2, 3, 1] inner=[0:32] +winograd2>"
CONV = (
    "conv2d[1]<float32 * float32 -> float32; (b, c, x0, x1) * (n, k, w0, w1) -> (b, n, y0, y1); "
    "b=1, c=8, x0=9, x1=9, n=40, k=8, w0=3, w1=3, y0=9, y1=9; "
    "strides=1x1, padding=1x1x1x1, dilation=1x1, groups=1>"
)


@pytest.mark.parametrize("m", POINTS)
def test_transforms_of_windows_data_and_sums_give_the_convolution(m: int) -> None:
    """A^T (G w * B^T d), where A and B follow from interpolation at the points."""
    points = [0.0, *(sign * point for point in POINTS[m] for sign in (1, -1))]
    size = positions(m)
    powers = np.array([[point**power for power in range(size)] for point in points])
    back = np.vstack([powers[:, :m], [0.0] * (m - 1) + [1.0]]).T
    # The transform of data is the transpose of interpolation by a polynomial of degree m + 1.
    scale = np.array([np.prod([p - q for q in points if q != p]) for p in points])
    matrix = np.vstack([powers, [0.0] * (size - 1) + [1.0]])
    forward = np.linalg.inv(matrix).T * np.append(scale, 1.0)[:, None]
    window, data = fresh_rng().standard_normal(3), fresh_rng().standard_normal(size)
    sums = back @ ((window_matrix(m) @ window) * (forward @ data))
    np.testing.assert_allclose(sums, np.correlate(data, window, "valid"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("m", POINTS)
def test_windows_come_back(m: int) -> None:
    windows = fresh_rng().standard_normal((5, 7, 3, 3))
    values = transform_windows(windows, m)
    assert values.shape == (5, 7, m + 2, m + 2)
    np.testing.assert_allclose(restore_windows(values, m), windows, rtol=0, atol=1e-12)


def test_layout_of_transformed_weights() -> None:
    assert str(LAYOUT) == TEXT
    assert PackedLayout.parse(TEXT) == LAYOUT
    assert LAYOUT.packed_shape((40, 8, 3, 3)) == (2, 4, 4, 8, 32)
    assert replace(LAYOUT, winograd=4).storage_bytes((64, 8, 3, 3), "float32") == 2 * 36 * 8 * 32 * 4
    weight = fresh_rng().standard_normal((40, 8, 3, 3)).astype("float32")
    packed = LAYOUT.pack(weight)
    assert packed.shape == (2, 4, 4, 8, 32)
    assert packed.dtype == np.float32
    np.testing.assert_array_equal(packed[1, 0, 0, 3, :8], weight[32:, 3, 0, 0])
    np.testing.assert_array_equal(packed[0, 3, 3, 5], weight[:32, 5, 2, 2])
    assert not packed[1, ..., 8:].any()
    np.testing.assert_allclose(LAYOUT.unpack(packed, weight.shape), weight, rtol=0, atol=1e-6)


def test_a_permuted_weight_has_the_same_bytes() -> None:
    weight = fresh_rng().standard_normal((3, 3, 8, 40)).astype("float32")
    layout = LAYOUT.transposed((2, 3, 1, 0))
    assert layout.window_dims == (0, 1)
    np.testing.assert_array_equal(layout.pack(weight), LAYOUT.pack(weight.transpose(3, 2, 0, 1)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ((0, 2, 3, 1), (0,), (32,), False, False, 3),
            "are transformed for tile sizes \\(2, 4\\), in 4 or 5 dimensions",
        ),
        (((0, 2, 1), (0,), (32,), False, False, 2), "in 4 or 5 dimensions"),
        (((0, 2, 3, 1), (0, 2), (32, 2), False, False, 2), "the dimensions of a transformed window have no tiles"),
    ],
)
def test_no_layout(arguments: tuple, message: str) -> None:
    with pytest.raises(EncodingError, match=message):
        PackedLayout(*arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("conv2d[1]", "conv2d[0]"), "which weights of convolutions have in their two inner dimensions"),
        (("strides=1x1", "strides=1x2"), "stride 1 and no dilation"),
        (("w1=3", "w1=2"), "have 3 x 3 elements"),
        (("<float32 * float32", "<int8 * int8"), "which are floats, not int8"),
    ],
)
def test_convolutions_without_transformed_windows(change: tuple[str, str], message: str) -> None:
    encoding = Encoding.parse(CONV)
    assert unsupported_reason(LAYOUT, encoding) == ""
    # Sizes may contradict the change: only what the layout needs is checked.
    text = CONV.replace(*change)
    changed = {
        "strides=1x2": text.replace("y1=9", "y1=5"),
        "w1=2": text.replace("y1=9", "y1=10"),
    }.get(change[1], text)
    assert message in unsupported_reason(LAYOUT, Encoding.parse(changed))


def test_accuracy_of_an_encoding() -> None:
    text = CONV.replace("groups=1>", "groups=1; accuracy=fast>")
    encoding = Encoding.parse(text)
    assert encoding.accuracy == "fast"
    assert str(encoding) == text
    assert Encoding.parse(CONV).accuracy == "default"
    with pytest.raises(EncodingError, match="found accuracy 'some', expected one of"):
        Encoding.parse(text.replace("=fast", "=some"))
