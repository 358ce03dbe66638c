"""A small sample of mutated models and containers: each is accepted, or refused by an error that names the file."""

import contextlib
import io
import itertools
import random

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm.script import relax as R

import relax_hetero as rh
from fuzz.file_attacks import attacks_of
from modules import ir_module


def small_model():
    weight = numpy_helper.from_array(np.ones((3, 4), "float32"), "w")
    shape = numpy_helper.from_array(np.array([-1, 2], "int64"), "shape")
    body = [helper.make_node("Add", ["a", "b"], ["c"])]
    function = helper.make_function("my", "Sum", ["a", "b"], ["c"], body, [helper.make_opsetid("", 18)])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], name="product"),
        helper.make_node("Reshape", ["p", "shape"], ["r"]),
        helper.make_node("Sum", ["r", "r"], ["s"], domain="my"),
    ]
    inputs = [helper.make_tensor_value_info(*each) for each in (("x", 1, ["n + 1", 3]), ("unused", 1, ["n"]))]
    outputs = [helper.make_tensor_value_info("s", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight, shape])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=10).SerializeToString()


@pytest.mark.parametrize("seed", range(2))
def test_mutated_models(seed):
    rh.from_onnx(small_model())
    for _, data in itertools.islice(attacks_of("onnx", small_model(), random.Random(seed)), 100):
        with contextlib.suppress(rh.FrontendError):
            rh.from_onnx(data)


@ir_module({"kind": "llvm"}, {"kind": "llvm"})
def Small(x: R.Tensor(("n", 16), "float32", "llvm:0"), w: R.Tensor((16, 16), "float32", "llvm:0")):
    R.func_attr({"num_input": 1})
    with R.dataflow():
        a = R.matmul(x, w)
        b = R.to_vdevice(R.exp(a), "llvm:1")
        c = R.tanh(b)
        R.output(c)
    return c


@pytest.fixture(scope="module")
def container(tmp_path_factory):
    mod = relax_bound(np.ones((16, 16), "float32"))
    path = tmp_path_factory.mktemp("attacked") / "model.so"
    rh.compile(mod, cache=False).export_library(path)
    return path.read_bytes()


def relax_bound(weight):
    return tvm.relax.transform.BindParams("main", {"w": weight})(Small)


@pytest.mark.parametrize("seed", range(2))
def test_forged_containers(container, tmp_path, seed):
    path = tmp_path / "model.so"
    accepted = 0
    for name, data in itertools.islice(attacks_of("container header", container, random.Random(seed)), 120):
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        try:
            exe = rh.load(path, verify=True)
        except rh.BuildError as error:
            assert str(path) in str(error), (name, error)
            continue
        accepted += 1
        with contextlib.suppress(rh.HeteroError):
            exe.explain("all", file=io.StringIO())
            str(exe.memory_plan)
    assert accepted  # some fields are for people only
