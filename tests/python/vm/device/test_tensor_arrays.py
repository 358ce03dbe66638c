"""Results are arrays to numpy, to Python's operators, to copy and to pickle; and tensors to TVM."""

import copy
import gc
import operator
import pickle

import ml_dtypes
import numpy as np
import pytest
import tvm

import relax_hetero as rh

X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
W = np.array([1, 2, 3, 4], "float32")


@pytest.fixture
def result(chain):
    """exp(X) on cpu:0."""
    return rh.vm.VirtualMachine(chain)["main"](X, W)[1]


@pytest.fixture
def scalar(plumbing):
    return rh.vm.VirtualMachine(plumbing)["scalar"](1.25)


def test_functions_of_numpy(result):
    expected = np.exp(X)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert np.argmax(result) == 11 and np.argmin(result, axis=1).tolist() == [0, 0, 0]
    assert np.size(result) == result.size == 12 and result.size(1) == result.size(-1) == 4
    assert np.shape(result) == (3, 4) and np.ndim(result) == 2
    assert np.stack([result, result]).shape == np.array([result, result]).shape == (2, 3, 4)
    assert np.array(result, dtype="float64").dtype == "float64"
    with pytest.raises(IndexError):
        result.size(2)


def test_still_a_tensor(chain, result):
    assert isinstance(result, tvm.runtime.Tensor) and result.device == tvm.cpu(0) and result.dtype == "float32"
    assert result == result and not result != result and {result: 1}[result] == 1
    assert (result == copy.copy(result)) is False  # two tensors: TVM asks for the same object
    copied = tvm.runtime.empty((3, 4), "float32")
    result.copyto(copied)
    np.testing.assert_array_equal(copied, result)
    again, _ = rh.vm.VirtualMachine(chain)["main"](result, W)
    np.testing.assert_allclose(again, np.exp(np.exp(X)) + W, rtol=1e-5)


def test_memory_of_the_host_is_shared(result):
    view = np.asarray(result)
    assert view.ctypes.data == result.data_ptr() and view.flags.writeable
    assert np.asarray(result, dtype="float32", copy=False).ctypes.data == result.data_ptr()
    assert not np.shares_memory(np.array(result), view) and not np.shares_memory(result.numpy(), view)
    with pytest.raises(ValueError, match="cannot be an array as float64 without a copy"):
        np.array(result, dtype="float64", copy=False)
    result[1] = 7
    result[2, 1:3] = [8, 9]
    assert view[1].tolist() == [7] * 4 and view[2, 1:3].tolist() == [8, 9]
    result[:] = X
    np.testing.assert_array_equal(view, X)


def test_views_outlive_the_machine_and_its_later_calls(chain, tmp_path):
    path = tmp_path / "chain.so"
    chain.export_library(path)
    vm = rh.vm.VirtualMachine(rh.load(path))
    views = [np.asarray(vm["main"](X * i, W)[0]) for i in range(5)]
    views.append(np.asarray(vm.submit("main", X * 5, W).result()[0]))
    del vm
    gc.collect()
    other = rh.vm.VirtualMachine(chain)
    results = [other["main"](X * -i, W)[0] for i in range(20)]
    for i, view in enumerate(views):
        np.testing.assert_allclose(view, np.exp(X * i) + W, rtol=1e-5)
    assert len(results) == 20


def test_elements_and_operators(result):
    expected = np.asarray(result).copy()
    assert len(result) == 3 and result[0, 1] == expected[0, 1] and result[-1, ::2].shape == (2,)
    assert [row.tolist() for row in result] == expected.tolist()
    assert result[result > 1].size == (expected > 1).sum() and expected[0, 0] in result
    for apply in (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.lt, operator.ge):
        for other in (2, np.float32(2), expected, result):
            plain = expected if other is result else other
            np.testing.assert_array_equal(apply(result, other), apply(expected, plain))
            np.testing.assert_array_equal(apply(other, result), apply(plain, expected))
    np.testing.assert_array_equal(result @ X.T, expected @ X.T)
    np.testing.assert_array_equal(X.T @ result, X.T @ expected)
    np.testing.assert_array_equal(-result, -expected)
    assert (result == expected).all() and (expected == result).all() and not (result != expected).any()
    assert divmod(5, result)[0].shape == (3, 4)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(result)
    with pytest.raises(TypeError):
        float(result)


def test_scalars(scalar):
    assert (float(scalar), int(scalar), bool(scalar), f"{scalar:.2f}") == (2.5, 2, True, "2.50")
    assert complex(scalar) == 2.5 and scalar[()] == 2.5 and round(float(scalar * 2)) == 5
    for refused in (len, list, operator.index):
        with pytest.raises(TypeError):
            refused(scalar)
    assert operator.index(tvm.runtime.tensor(np.array(3))) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "bool", "uint8", "int64"])
def test_element_types(dtype):
    expected = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.array([[0, 1, 2], [1, 0, 1]]).astype(expected)
    tensor = tvm.runtime.tensor(array)
    assert np.asarray(tensor).dtype == expected and np.asarray(tensor).ctypes.data == tensor.data_ptr()
    for copied in (tensor.numpy(), np.array(tensor), pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
        np.testing.assert_array_equal(np.asarray(copied).astype("float32"), array.astype("float32"))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_copies(duplicate, shape):
    tensor = tvm.runtime.tensor(np.full(shape, 3, "float32"))
    copied = duplicate(tensor)
    assert isinstance(copied, tvm.runtime.Tensor) and copied.shape == shape and copied.device == tensor.device
    np.testing.assert_array_equal(copied, tensor)
    assert not shape or tensor.numel() == 0 or copied.data_ptr() != tensor.data_ptr()


def test_types_of_less_than_a_byte_are_copied():
    tensor = tvm.runtime.empty((2, 4), "int4")
    assert np.asarray(tensor).shape == tensor.numpy().shape == (2, 4)
    with pytest.raises(ValueError, match="int4 tensor on cpu:0 cannot be an array without a copy"):
        np.array(tensor, copy=False)


def test_dlpack(result):
    assert np.from_dlpack(result).ctypes.data == result.data_ptr()
    assert np.from_dlpack(result, device="cpu").ctypes.data == result.data_ptr()
    copied = np.from_dlpack(result, copy=True)
    assert copied.ctypes.data != result.data_ptr()
    np.testing.assert_array_equal(copied, result)
    assert tvm.runtime.from_dlpack(result).data_ptr() == result.data_ptr()
    assert result.__dlpack__(max_version=(0, 8)) is not None
    with pytest.raises(BufferError, match="exported there or to a CPU"):
        result.__dlpack__(dl_device=(2, 0), max_version=(1, 0))
