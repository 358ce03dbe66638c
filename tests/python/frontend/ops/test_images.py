"""Convolution, pooling and resizing against onnxruntime over ragged shapes."""

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import parser

import relax_hetero as rh
from frontend.ops.checking import check, expected, refused, run, uniform

pytestmark = pytest.mark.sampled(4)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID", None])
def test_convolution(axes, auto_pad):
    options = {"auto_pad": auto_pad} if auto_pad else {"pads": [1, 0, 2, 1, 0, 1][: 2 * axes]}
    data, weight = uniform(2, 4, *(9, 7, 6)[:axes]), uniform(6, 2, *(3, 2, 3)[:axes])
    check("Conv", data, weight, uniform(6), constant=[1, 2], group=2, strides=[2, 3, 1][:axes], **options)


def test_convolution_of_symbolic_batch_and_size():
    check("Conv", uniform(2, 3, 8, 7), uniform(4, 3, 3, 3), constant=[1], symbolic=[0], pads=[1, 1, 1, 1])


def test_images_of_one_column_are_signals():
    """Padding, strides and groups of the column stay."""
    data, weight = uniform(2, 6, 21, 1), uniform(4, 3, 5, 1)
    options = {"pads": [1, 0, 2, 0], "strides": [2, 3], "dilations": [3, 1], "group": 2}
    check("Conv", data, weight, uniform(4), constant=[1, 2], **options)
    check("Conv", data, uniform(4, 3, 5, 3), constant=[1], group=2, pads=[0, 1, 0, 1])


def test_convolution_in_half_precision():
    data, weight = uniform(1, 64, 5, 5, dtype="float16"), uniform(2, 64, 3, 3, dtype="float16")
    check("Conv", data, weight, opset=22, reference="onnx", rtol=5e-3, atol=5e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"strides": [3, 2], "pads": [1, 0, 0, 1]},
        {"strides": [2, 2], "output_padding": [1, 0]},
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"strides": [2, 2], "auto_pad": "SAME_LOWER"},
        {"strides": [3, 2], "output_shape": [11, 5]},
        {"dilations": [2, 1], "group": 2},
    ],
)
def test_transposed_convolution(options):
    weight = uniform(4, 3, 3, 2)
    check("ConvTranspose", uniform(2, 4, 4, 3), weight, uniform(3 * options.get("group", 1)), **options)


def test_transposed_convolution_with_outputs_beyond_the_computed_ones():
    options = {"strides": [3, 2], "output_shape": [10, 8], "output_padding": [1, 1]}
    check("ConvTranspose", uniform(1, 1, 3, 3), uniform(1, 2, 3, 3), reference="onnx", **options)


@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(
    "options",
    [
        {"strides": [2, 3], "pads": [1, 0, 1, 1]},
        {"strides": [2, 2], "ceil_mode": 1},
        {"strides": [2, 3], "auto_pad": "SAME_LOWER"},
        {"strides": [2, 3], "auto_pad": "SAME_UPPER"},
        {"dilations": [2, 1]},
    ],
)
def test_pooling(op, options):
    extra = {"count_include_pad": 1} if op == "AveragePool" else {"p": 3} if op == "LpPool" else {}
    check(op, uniform(2, 3, 7, 8), opset=22, kernel_shape=[3, 2], **options, **extra)


def test_windows_with_strides_cover_images_of_any_size():
    """With `auto_pad`, as TensorFlow's exporters write it, the padding follows from the sizes of a call."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[b, 2, h, w] x, float[4, 1, 3, 2] k)
            => (float[b, 4, p, q] c, float[b, 2, r, s] m, float[b, 2, t, u] a) {
            c = Conv <auto_pad = "SAME_UPPER", strides = [2, 3], group = 2> (x, k)
            m = MaxPool <auto_pad = "SAME_LOWER", kernel_shape = [3, 4], strides = [2, 3]> (x)
            a = AveragePool <auto_pad = "SAME_UPPER", kernel_shape = [3, 4], strides = [3, 2]> (x)
        }""")
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for size in ((2, 2, 8, 7), (1, 2, 5, 9), (1, 2, 1, 1), (3, 2, 6, 4)):
        feed = {"x": uniform(*size), "k": uniform(4, 1, 3, 2)}
        for got, want in zip(main(**feed), session.run(None, feed), strict=True):
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-5)


def test_average_pooling_leaves_padding_out():
    check("AveragePool", uniform(2, 3, 7), opset=22, kernel_shape=[3], strides=[3], pads=[1, 1], ceil_mode=1)


@pytest.mark.parametrize("storage_order", [0, 1])
def test_max_pooling_with_indices(storage_order):
    options = {"kernel_shape": [2, 3], "strides": [2, 2], "pads": [0, 1, 1, 1], "storage_order": storage_order}
    check("MaxPool", uniform(2, 3, 5, 6), outputs=2, **options)


@pytest.mark.parametrize("op", ["GlobalAveragePool", "GlobalMaxPool"])
def test_global_pooling(op):
    check(op, uniform(2, 3, 4, 5, 2))


def resize(mode, coordinates, *, scales=None, sizes=None, symbolic=(), **options):
    sizing = np.array(sizes) if scales is None else np.array(scales, "float32")
    operands = [uniform(1, 2, 5, 4), None, sizing] if scales is not None else [uniform(1, 2, 5, 4), None, None, sizing]
    options = {"mode": mode, "coordinate_transformation_mode": coordinates, **options}
    check("Resize", *operands, constant=[len(operands) - 1], symbolic=symbolic, opset=19, **options)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
def test_resize_to_sizes(mode, coordinates):
    resize(mode, coordinates, sizes=[1, 2, 8, 3])


@pytest.mark.parametrize("nearest_mode", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
def test_resize_by_scales(nearest_mode):
    resize("nearest", "half_pixel", scales=[1, 1, 0.6, 1.5], nearest_mode=nearest_mode)


def test_resize_with_antialiasing():
    resize("linear", "half_pixel", sizes=[1, 2, 3, 2], antialias=1)
    resize("cubic", "half_pixel", scales=[1, 1, 0.4, 0.5], antialias=1, cubic_coeff_a=-0.5, exclude_outside=1)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_of_a_symbolic_image(mode):
    resize(mode, "half_pixel", scales=[1, 1, 2, 3], symbolic=[0])
    resize(mode, "asymmetric", scales=[1, 1, 3, 1], symbolic=[0], nearest_mode="floor")


def test_resize_that_is_ambiguous_is_refused():
    operands = [uniform(1, 1, 2, 4), None, np.array([1, 1, 0.6, 0.6], "float32")]
    options = {"mode": "linear", "coordinate_transformation_mode": "align_corners"}
    refused("Resize", *operands, constant=[2], match="no whole number", **options)


def test_resize_of_a_normalized_image():
    """One kernel with two tensors of its own, which TVM gives one memory: no element of these is computed twice."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[3, 31, 7] x) => (float[1, 3, 15, 5] y)
        <int64[4] sizes = {1, 3, 15, 5}, int64[1] axes = {0}, float[3, 1, 1] mean = {0.4, 0.5, 0.6},
         float[3, 1, 1] spread = {0.2, 0.3, 0.1}> {
            centered = Sub(x, mean)
            normalized = Div(centered, spread)
            image = Unsqueeze(normalized, axes)
            y = Resize <mode = "linear", coordinate_transformation_mode = "pytorch_half_pixel">(image, , , sizes)
        }""")
    feeds = {"x": uniform(3, 31, 7)}
    np.testing.assert_allclose(run(model, feeds)[0], expected(model, feeds, "onnxruntime")[0], rtol=1e-4, atol=1e-5)


def test_upsample():
    check("Upsample", uniform(1, 2, 3, 4), np.array([1, 1, 2, 3], "float32"), opset=9, constant=[1], mode="linear")


# Sixteen places, each reflected by itself: a large expression, which takes LLVM long.
@pytest.mark.parametrize(
    ("padding_mode", "mode"),
    [
        pytest.param(padding, mode, marks=pytest.mark.slow if (padding, mode) == ("reflection", "cubic") else ())
        for padding in ("zeros", "border", "reflection")
        for mode in ("linear", "nearest", "cubic")
    ],
)
def test_grid_sample(mode, padding_mode):
    grid = uniform(2, 3, 4, 2, low=-1.2, high=1.2)
    check("GridSample", uniform(2, 3, 5, 4), grid, opset=20, mode=mode, padding_mode=padding_mode)


def test_grid_of_another_type_than_the_image():
    image, grid = uniform(1, 2, 5, 4), uniform(1, 3, 4, 2, low=-1, high=1, dtype="float64")
    check("GridSample", image, grid, opset=16, reference="onnx")
