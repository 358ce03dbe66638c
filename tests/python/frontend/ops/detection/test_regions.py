"""Ops on regions of images, against onnxruntime."""

import numpy as np
import pytest

import relax_hetero as rh
from frontend.ops.checking import check, node_model, run, uniform

pytestmark = pytest.mark.sampled(4)


@pytest.mark.parametrize("coordinates", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("sampling_ratio", [0, 2])
def test_roi_align(coordinates, sampling_ratio):
    regions = np.array([[0, 1, 12, 9], [3, 3, 8, 14], [1, 0, 2, 2]], "float32")
    options = {"output_height": 2, "output_width": 3, "spatial_scale": 0.5, "sampling_ratio": sampling_ratio}
    operands = [uniform(2, 3, 8, 9), regions, np.array([0, 1, 1])]
    check("RoiAlign", *operands, coordinate_transformation_mode=coordinates, **options)


def test_roi_align_of_regions_without_samples_in_the_image():
    regions = [[1, 1, 1, 1], [2, 2, 1, 1], [0, 0, 4, 0], [-9, -9, -7, -7], [20, 20, 30, 30], [-60, -90, 120, 50]]
    operands = [uniform(1, 2, 5, 4), np.array(regions, "float32"), np.zeros(6, "int64")]
    check("RoiAlign", *operands, output_height=2, output_width=3)


def test_roi_align_of_endless_regions():
    inf, nan = np.inf, np.nan
    regions = [[-1e9, -1e9, 1e9, 1e9], [0, 0, 1e30, 2], [nan, 0, 2, 2], [0, 0, 2, inf]]
    model, feeds = node_model(
        "RoiAlign", [uniform(1, 1, 4, 4), np.array(regions, "float32"), np.zeros(4, "int64")], opset=17
    )
    np.testing.assert_allclose(run(model, feeds)[0].ravel(), [0, 0, nan, nan], atol=1e-9)


@pytest.mark.parametrize("sampling_ratio", [0, 2])
@pytest.mark.parametrize("coordinates", ["half_pixel", "output_half_pixel"])
def test_roi_align_of_largest_products(coordinates, sampling_ratio):
    regions = np.array([[0, 1, 12, 9], [3, 3, 8, 14], [-9, -9, -7, -7]], "float32")
    options = {"output_height": 2, "output_width": 3, "spatial_scale": 0.5, "sampling_ratio": sampling_ratio}
    operands = [uniform(2, 3, 8, 9), regions, np.array([0, 1, 1])]
    check("RoiAlign", *operands, mode="max", coordinate_transformation_mode=coordinates, symbolic=[0, 1], **options)


@pytest.mark.slow
def test_largest_pixels_of_regions():
    regions = [[0, 1, 1, 12, 9], [1, 3, 3, 8, 14], [1, -3, -3, 30, 40], [0, 6, 6, 2, 2], [1, 40, 40, 50, 50]]
    operands = [uniform(2, 3, 8, 9), np.array(regions, "float32")]
    check("MaxRoiPool", *operands, opset=11, symbolic=[0, 1], pooled_shape=[2, 3], spatial_scale=0.5)


def test_a_region_of_a_missing_image_is_an_error():
    model, feeds = node_model("MaxRoiPool", [uniform(1, 1, 4, 4), np.ones((1, 5), "float32")], 11, pooled_shape=[1, 1])
    with pytest.raises(rh.HeteroError, match="index 1 is out of range"):
        run(model, feeds)
