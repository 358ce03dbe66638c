"""Resize to sizes that only a call knows, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime
import pytest

import relax_hetero as rh
from device_pairs import TWO_DEVICES

_FORMS = [
    'mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"',
    'mode = "nearest", coordinate_transformation_mode = "half_pixel", nearest_mode = "round_prefer_ceil"',
    'mode = "linear", coordinate_transformation_mode = "pytorch_half_pixel"',
    'mode = "linear", coordinate_transformation_mode = "align_corners"',
    'mode = "cubic", coordinate_transformation_mode = "half_pixel"',
]


def _model(forms: list[str]) -> onnx.ModelProto:
    nodes = "\n".join(f"y{i} = Resize <{form}> (x, none, none, sizes)" for i, form in enumerate(forms))
    outputs = ", ".join(f"float[b, c, k, l] y{i}" for i in range(len(forms)))
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[b, 2, h, w] x, float[k, l] like) => ({outputs}) <float[0] none = {{}}> {{
            front = Shape <start = 0, end = 2> (x)
            back = Shape (like)
            sizes = Concat <axis = 0> (front, back)
            {nodes}
        }}""")


def test_resize_to_the_shape_of_another_tensor() -> None:
    model = _model(_FORMS)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    placement = {"Resize": "vdevice:1", "*": "vdevice:0"}
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, vdevices=TWO_DEVICES, placement=placement)))["main"]
    rng = np.random.default_rng(0)
    for h, w, height, width in [(4, 5, 8, 15), (7, 6, 3, 11), (3, 3, 1, 3)]:
        feed = {
            "x": rng.standard_normal((2, 2, h, w)).astype("float32"),
            "like": np.zeros((height, width), "float32"),
        }
        for form, actual, expected in zip(_FORMS, main(**feed), session.run(None, feed), strict=True):
            np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-4, atol=1e-5, err_msg=f"{form} {feed}")
    with pytest.raises(rh.HeteroError, match="Resize node.*resizes axis 2 of h elements"):
        main(x=np.zeros((1, 2, 0, 3), "float32"), like=np.zeros((2, 2), "float32"))


def test_sizes_that_a_symbolic_resize_needs_are_asked_for() -> None:
    with pytest.raises(rh.HeteroError, match="antialiasing filter"):
        rh.from_onnx(_model(['mode = "cubic", antialias = 1']))
