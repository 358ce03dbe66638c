"""IO binding: values, and memory by its address."""

import numpy as np
import onnx.parser
import pytest

from relax_hetero import compat

MODEL = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[n, 4] x) => (float[n, 4] y, int64[n] best) {
        y = Add(x, x)
        best = ArgMax <axis = 1, keepdims = 0> (y)
    }"""
X = np.random.default_rng(0).random((3, 4), "float32")


@pytest.fixture(scope="module")
def session():
    return compat.InferenceSession(onnx.parser.parse_model(MODEL), providers=["CPUExecutionProvider"])


def test_addresses(session):
    binding, y = session.io_binding(), np.zeros_like(X)
    binding.bind_input("x", "cpu", 0, np.float32, X.shape, X.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(y, X + X)
    assert binding.get_outputs()[0].data_ptr() == y.ctypes.data


def test_values_and_new_memory(session):
    binding = session.io_binding()
    target = compat.OrtValue.ortvalue_from_shape_and_type(X.shape, np.float32)
    binding.bind_cpu_input("x", X)
    binding.bind_output("best")
    binding.bind_ortvalue_output("y", target)
    session.run_with_iobinding(binding)
    best, y = binding.copy_outputs_to_cpu()
    np.testing.assert_array_equal(best, X.argmax(1))
    assert y is target.numpy()
    np.testing.assert_array_equal(y, X + X)
    binding.clear_binding_outputs()
    session.run_with_iobinding(binding)
    assert binding.get_outputs() == []
    binding.clear_binding_inputs()
    with pytest.raises(ValueError, match="missing"):
        binding.bind_output("y")
        session.run_with_iobinding(binding)


def test_empty_memory(session):
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, (0, 4), X.ctypes.data)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].shape == (0, 4)


def test_wrong_bindings_are_refused(session):
    binding, y = session.io_binding(), np.zeros((2, 4), "float32")
    with pytest.raises(compat.errors.InvalidArgument, match="Failed to find input name"):
        binding.bind_cpu_input("z", X)
    with pytest.raises(compat.errors.InvalidArgument, match="Failed to find output name"):
        binding.bind_output("z")
    binding.bind_cpu_input("x", X)
    binding.bind_ortvalue_output("y", compat.OrtValue(y))
    with pytest.raises(compat.errors.InvalidArgument, match=r"\[3, 4\].*\[2, 4\] is bound"):
        session.run_with_iobinding(binding)
    with pytest.raises(ValueError, match="session that created it"):
        session.run_with_iobinding(compat.IOBinding(None))
