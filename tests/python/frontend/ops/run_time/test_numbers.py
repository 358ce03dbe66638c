"""Constants that a model joins with computed numbers are sizes at import."""

import numpy as np
import onnx.parser
import pytest

import relax_hetero as rh
from device_pairs import TWO_DEVICES

MODEL = """
    <ir_version: 8, opset_import: ["" : 18]>
    g (float[n, 6] x, int64[1] rows, int64 part)
    => (float[a, 2, 3] reshaped, float[b, 4, 2, 3] expanded, float[c, 6] sliced, float[d, 6] padded, float[e, 5] filled)
    <int64[2] tail = {2, 3}, int64[3] wide = {4, 1, 3}, int64[1] zero = {0}, int64[1] one = {1}, int64[1] five = {5},
     int64[2] none = {0, 0}> {
        target = Concat<axis = 0>(rows, tail)
        reshaped = Reshape(x, target)
        wider = Concat<axis = 0>(rows, wide)
        column = Unsqueeze(reshaped, one)
        expanded = Expand(column, wider)
        end = Reshape(part, one)
        sliced = Slice(x, zero, end, zero)
        before = Concat<axis = 0>(rows, zero)
        pads = Concat<axis = 0>(before, none)
        padded = Pad(x, pads)
        shape = Concat<axis = 0>(rows, five)
        filled = ConstantOfShape(shape)
    }"""


def imported():
    return rh.from_onnx(onnx.parser.parse_model(MODEL), vdevices=TWO_DEVICES, placement={"Reshape*": "vdevice:1"})


def test_constants_joined_with_computed_numbers_are_sizes():
    sizes = [[int(size) for size in field.shape.values[1:]] for field in imported()["main"].body.body.ty.fields]
    assert sizes == [[2, 3], [4, 2, 3], [6], [6], [5]]


@pytest.mark.slow
def test_constants_joined_with_computed_numbers():
    main = rh.vm.VirtualMachine(rh.compile(imported()))["main"]
    x = np.arange(24, dtype="float32").reshape(4, 6)
    reshaped, expanded, sliced, padded, filled = (y.numpy() for y in main(x, np.array([4]), np.array(-1)))
    np.testing.assert_array_equal(reshaped, x.reshape(4, 2, 3))
    np.testing.assert_array_equal(expanded, np.broadcast_to(x.reshape(4, 1, 2, 3), (4, 4, 2, 3)))
    np.testing.assert_array_equal(sliced, x[:-1])
    np.testing.assert_array_equal(padded, np.pad(x, ((4, 0), (0, 0))))
    np.testing.assert_array_equal(filled, np.zeros((4, 5)))
    with pytest.raises(rh.HeteroError, match="Reshape_1"):
        main(x, np.array([3]), np.array(1))
