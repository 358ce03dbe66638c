"""Names that programs import from ONNX Runtime's modules."""

import importlib
import sys

import pytest

from relax_hetero import compat

NAMES = {
    "onnxruntime": ["InferenceSession", "SessionOptions", "RunOptions", "OrtValue", "IOBinding", "__version__"],
    "onnxruntime.capi.onnxruntime_pybind11_state": ["InvalidArgument", "Fail", "NoSuchFile", "SessionOptions"],
    "onnxruntime.capi._pybind_state": ["GraphOptimizationLevel", "RuntimeException", "get_available_providers"],
    "onnxruntime.capi.onnxruntime_inference_collection": ["InferenceSession", "OrtValue", "OrtDevice", "IOBinding"],
}


@pytest.fixture
def installed():
    undo = compat.install()
    yield
    undo()
    assert sys.modules.get("onnxruntime") is not compat


@pytest.mark.parametrize("module", NAMES)
def test_modules_have_the_names(installed, module):
    found = importlib.import_module(module)
    for name in NAMES[module]:
        value = getattr(found, name)
        assert name == "__version__" or value is getattr(compat, name, getattr(compat.errors, name, None))


def test_other_modules_of_an_installed_onnxruntime_use_this_package(installed):
    calibrate = pytest.importorskip("onnxruntime.quantization.calibrate")
    assert calibrate.onnxruntime is compat
