"""On a machine with an NVIDIA GPU: a library with an optional one uses it, and runs as well without."""

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

import relax_hetero as rh

GPUS = tvm.runtime.enabled("cuda") and tvm.cuda(0).exist
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no NVIDIA GPU")]


def test_a_library_runs_with_and_without_the_gpu(tmp_path):
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((256, 256)).astype("float32") / 16 for _ in range(3)]
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"], name=f"layer{i}") for i in range(3)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [32, 256]) for name in ("x0", "x3")]
    tensors = [numpy_helper.from_array(weight, f"w{i}") for i, weight in enumerate(weights)]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    mod = rh.from_onnx(model, ["llvm", "cuda"], {"layer0": "llvm:0", "*": "cuda:0"})
    rh.compile(mod, optional=["cuda:0"]).export_library(tmp_path / "model.so")
    x = rng.standard_normal((32, 256)).astype("float32")
    expected = np.linalg.multi_dot([x, *weights])
    loaded = rh.load(tmp_path / "model.so")
    for devices, kinds in ((None, [1, 2]), ({"cuda:0": "cuda:63"}, [1])):
        vm = rh.vm.VirtualMachine(loaded, devices)
        assert [device.dlpack_device_type() for device in vm.devices] == kinds
        np.testing.assert_allclose(vm["main"](x).numpy(), expected, rtol=1e-4, atol=1e-4)
