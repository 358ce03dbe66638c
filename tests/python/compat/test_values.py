"""Values against ONNX Runtime's."""

import numpy as np
import pytest
import tvm_ffi

from relax_hetero import compat
from relax_hetero.compat import values

onnxruntime = pytest.importorskip("onnxruntime")
FACTS = ("shape", "data_type", "element_type", "device_name", "is_tensor", "is_sparse_tensor", "tensor_size_in_bytes")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8", "uint16", "int64", "bool"])
def test_facts_are_those_of_onnxruntime(dtype):
    array = np.ones((2, 3), dtype)
    ours, theirs = (library.OrtValue.ortvalue_from_numpy(array) for library in (compat, onnxruntime))
    for name in FACTS:
        assert getattr(ours, name)() == getattr(theirs, name)(), name
    np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


def test_update_in_place():
    value = compat.OrtValue.ortvalue_from_shape_and_type([2], np.float32)
    address = value.data_ptr()
    value.update_inplace(np.array([1, 2], "float32"))
    assert (value.numpy().tolist(), value.data_ptr()) == ([1.0, 2.0], address)
    for wrong in (np.zeros(3, "float32"), np.zeros(2, "int32")):
        with pytest.raises(compat.errors.InvalidArgument, match="expected tensor"):
            value.update_inplace(wrong)


def test_dlpack_shares_memory():
    array = np.arange(4, dtype="float32")
    value = compat.OrtValue.from_dlpack(compat.OrtValue(array))
    assert value.data_ptr() == array.ctypes.data
    assert compat.OrtValue.from_dlpack(np.ones(2, "uint8"), is_bool_tensor=True).data_type() == "tensor(bool)"


def test_element_types_of_onnx():
    assert compat.OrtValue.ortvalue_from_shape_and_type([2], 10).data_type() == "tensor(float16)"
    value = compat.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(2, "uint16"), 16)
    assert value.data_type() == "tensor(bfloat16)"


def test_memory_by_its_address_is_shared():
    array = np.arange(6, dtype="int64").reshape(2, 3)
    tensor = tvm_ffi.from_dlpack(values._Memory(array.ctypes.data, (1, 0), array.dtype, array.shape))
    assert tensor.data_ptr() == array.ctypes.data
    np.testing.assert_array_equal(tensor.numpy(), array)
    del tensor
    assert not values._in_use
