"""Recurrent layers whose number of steps only a call knows, as kernels and as loops; values as ONNX Runtime's."""

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import relax_hetero as rh
from frontend.onnx.control_flow.against_onnxruntime import compare, dealt_out
from gpu_interpreter.models import InterpretedModel

HIDDEN, WIDTH = 4, 3
_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def layers(kinds, steps="t"):
    """A model of layers of x [t, b, 3] and lengths [b], all weights of it constants; the outputs of all of them."""
    random = np.random.default_rng(0)
    nodes, tensors, outputs = [], [], []
    for i, (op, direction, options) in enumerate(kinds):
        ways, rows = 2 if direction == "bidirectional" else 1, _GATES[op] * HIDDEN
        weights = {"W": (ways, rows, WIDTH), "R": (ways, rows, HIDDEN), "B": (ways, 2 * rows)}
        for name, shape in weights.items():
            tensors.append(numpy_helper.from_array(random.uniform(-1, 1, shape).astype("float32"), f"{name}{i}"))
        results = [f"{kind}{i}" for kind in ("y", "h", "c")[: 3 if op == "LSTM" else 2]]
        inputs = ["x", f"W{i}", f"R{i}", f"B{i}", "lengths"]
        attributes = {"hidden_size": HIDDEN, "direction": direction, **options}
        nodes.append(helper.make_node(op, inputs, results, name=f"layer{i}", **attributes))
        outputs += [helper.make_tensor_value_info(name, 1, [None] * (4 if name[0] == "y" else 3)) for name in results]
    x = helper.make_tensor_value_info("x", 1, [steps, "b", WIDTH])
    lengths = helper.make_tensor_value_info("lengths", 6, ["b"])
    graph = helper.make_graph(nodes, "g", [x, lengths], outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def compare_calls(model, mod, *calls):
    reference = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    machine = rh.vm.VirtualMachine(rh.compile(mod))
    for steps, lengths in calls:
        x = np.random.default_rng(steps).normal(size=(steps, len(lengths), WIDTH)).astype("float32")
        feeds = {"x": x, "lengths": np.array(lengths, "int32")}
        compare(machine["main"](**feeds), reference.run(None, feeds))


@pytest.fixture(params=[True, False], ids=["kernel", "loop"])
def has_kernels(request, monkeypatch):
    """Whether devices have kernels of whole layers."""
    monkeypatch.setattr("relax_hetero.frontend.ops.recurrent.has_recurrent_kernels", lambda: request.param)
    return request.param


def test_steps_that_a_call_knows(has_kernels):
    """Few, one and none; sequences that end before others."""
    model = layers([("GRU", "reverse", {})])
    mod = rh.from_onnx(model)
    assert ("gru" in [gv.name_hint for gv in mod.functions]) == has_kernels
    compare_calls(model, mod, (5, [5, 2]), (1, [1]), (0, [0]))


@pytest.mark.slow
def test_all_ops_and_directions_on_two_devices(has_kernels):
    model = layers(
        [
            ("LSTM", "bidirectional", {"clip": 1.5}),
            ("GRU", "forward", {"linear_before_reset": 1}),
            ("RNN", "reverse", {}),
        ]
    )
    compare_calls(model, dealt_out(model), (5, [5, 2]), (1, [1]), (9, [3, 9, 1]))


@pytest.mark.slow
def test_a_long_sequence_is_a_loop(has_kernels):
    model = layers([("GRU", "reverse", {})], steps=1500)
    mod = rh.from_onnx(model)
    assert ("loop_layer0" in [gv.name_hint for gv in mod.functions]) == (not has_kernels)
    compare_calls(model, mod, (1500, [1500, 700]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "options"), [("LSTM", {}), ("GRU", {}), ("GRU", {"linear_before_reset": 1}), ("RNN", {})]
)
def test_a_layer_that_is_placed_on_a_gpu_after_the_import(op, options):
    model, gpu = layers([(op, "bidirectional", options)]), {"kind": "cuda", "arch": "sm_90a"}
    mod = rh.from_onnx(model)
    x, lengths = np.random.default_rng(0).normal(size=(3, 2, WIDTH)).astype("float32"), np.array([3, 1], "int32")
    expected = rh.vm.VirtualMachine(rh.compile(mod))["main"](x, lengths)
    found = InterpretedModel(rh.place(mod, {"*": "cuda:0"}, vdevices=[gpu]))(x, lengths)
    for value, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(value), want.numpy(), rtol=1e-5, atol=1e-6)


def test_inputs_of_a_loop_fit_each_other():
    model = layers([("GRU", "forward", {})])
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((1, 12, 5), "float32"), "W0"))
    with pytest.raises(rh.HeteroError, match="layer0"):
        rh.from_onnx(model)
