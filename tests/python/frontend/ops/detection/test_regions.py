"""Ops on regions of images, against onnxruntime."""

import numpy as np
import pytest

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
