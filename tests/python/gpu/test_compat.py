"""Sessions with ONNX Runtime's interface on a GPU: the provider, values on the device, and memory by its address."""

import numpy as np
import onnx.parser
import pytest
import tvm

from compat.test_binding import MODEL, X
from relax_hetero import compat

GPUS = tvm.runtime.enabled("cuda") and tvm.cuda(0).exist
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no NVIDIA GPU")]


@pytest.fixture(scope="module")
def session():
    return compat.InferenceSession(onnx.parser.parse_model(MODEL), providers=["CUDAExecutionProvider"])


def test_the_provider_names_the_device(session):
    assert session.get_providers() == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert (compat.get_device(), compat.get_available_providers()[0]) == ("GPU", "CUDAExecutionProvider")
    y, best = session.run(None, {"x": X})
    np.testing.assert_array_equal(y, X + X)
    np.testing.assert_array_equal(best, X.argmax(1))


def test_values_stay_on_the_device(session):
    x = compat.OrtValue.ortvalue_from_numpy(X, "cuda", 0)
    (y,) = session.run_with_ort_values(["y"], {"x": x})
    assert (x.device_name(), y.device_name(), y.data_type(), y.shape()) == ("cuda", "cuda", "tensor(float)", [3, 4])
    np.testing.assert_array_equal(y.numpy(), X + X)
    x.update_inplace(X + 1)
    np.testing.assert_array_equal(session.run(["y"], {"x": x})[0], 2 * (X + 1))


def test_addresses_on_the_device(session):
    x = tvm.runtime.tensor(X, device=tvm.cuda(0))
    y = tvm.runtime.empty(X.shape, "float32", tvm.cuda(0))
    binding = session.io_binding()
    binding.bind_input("x", "cuda", 0, np.float32, X.shape, x.data_ptr())
    binding.bind_output("y", "cuda", 0, np.float32, X.shape, y.data_ptr())
    binding.bind_output("best", "cuda")
    session.run_with_iobinding(binding)
    tvm.cuda(0).sync()
    np.testing.assert_array_equal(y.numpy(), X + X)
    assert binding.get_outputs()[1].device_name() == "cuda"
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[1], X.argmax(1))
