"""DeformConv against ONNX's reference."""

import numpy as np

from frontend.ops.checking import check, refused, uniform


def test_groups_masks_and_places_beyond_the_image():
    weight, offsets = uniform(6, 2, 3, 2), uniform(2, 24, 4, 6, low=-3, high=3)
    options = {"group": 2, "offset_group": 2, "strides": [2, 1], "pads": [1, 0, 1, 1], "dilations": [1, 3]}
    operands = [uniform(2, 4, 7, 8), weight, offsets, uniform(6), uniform(2, 12, 4, 6)]
    check("DeformConv", *operands, opset=19, reference="onnx", constant=[1], symbolic=[0, 2, 4], **options)


def test_offsets_of_another_size_are_refused():
    operands = [uniform(1, 1, 4, 4), uniform(1, 1, 2, 2), np.zeros((1, 8, 4, 3), "float32")]
    refused("DeformConv", *operands, opset=19, match="its offsets has shape")
