"""Tables of resizing against ONNX's reference, one axis at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator

from relax_hetero.vm.resize_taps import ResizedAxis, ResizeForm, taps

TRANSFORMATIONS = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")


def reference(x: np.ndarray, after: int, form: ResizeForm) -> np.ndarray:
    node = helper.make_node(
        "Resize",
        ["x", "", "", "sizes"],
        ["y"],
        mode=form.mode,
        coordinate_transformation_mode=form.transformation,
        nearest_mode=form.nearest_mode,
        cubic_coeff_a=form.cubic_coeff_a,
        antialias=int(form.antialias),
        exclude_outside=int(form.exclude_outside),
    )
    return ReferenceEvaluator(node).run(None, {"x": x, "sizes": np.array([after])})[0]


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@given(data=st.data())
def test_sums_of_taps_are_the_reference(mode, data):
    before, after = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12))
    form = ResizeForm(
        mode,
        data.draw(st.sampled_from(TRANSFORMATIONS)),
        data.draw(st.sampled_from(("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"))),
        -0.75,
        antialias=mode == "linear" and data.draw(st.booleans()),
        exclude_outside=mode == "cubic" and data.draw(st.booleans()),
        has_scales=False,
    )
    # Of one element, the reference leaves out taps before the tensor; ONNX Runtime repeats its edge, as we do.
    assume(not (form.antialias and form.transformation == "pytorch_half_pixel" and after == 1))
    x = np.random.default_rng(before).random(before).astype("float32")
    actual = taps(ResizedAxis(before, after, after / before), form)
    np.testing.assert_allclose((x[actual.indices] * actual.weights).sum(1), reference(x, after, form), 1e-5, 1e-5)
