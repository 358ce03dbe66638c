"""Compare a model with loops or branches with ONNX Runtime, on one CPU device and cut over two."""

import numpy as np
import onnx
import onnxruntime
from onnx import parser

import relax_hetero as rh
from device_pairs import TWO_DEVICES


def parsed(text, opset=17):
    """A model from text, which begins with its graph."""
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}')


def dealt_out(model):
    """The model with its nodes named ``n0``, ``n1`` ... and placed on two devices in turn."""
    named = onnx.ModelProto()
    named.CopyFrom(model)
    pending, names = [named.graph], {}
    while pending:
        for node in pending.pop().node:
            node.name = f"n{len(names)}"
            names[node.name] = f"vdevice:{(len(names) + 1) % 2}"
            pending += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return rh.from_onnx(named, vdevices=TWO_DEVICES, placement=names)


def check(model, *calls, devices=(2,), tolerance=1e-5):
    """Call the model with each of `calls`, lists of arguments; the machines that did, one for each count of devices."""
    reference = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    machines = []
    for count in devices:
        mod = rh.from_onnx(model) if count == 1 else dealt_out(model)
        machines.append(rh.vm.VirtualMachine(rh.compile(mod, cache=False)))
    names = [value.name for value in model.graph.input]
    for args in calls:
        args = [np.asarray(arg, "float32") if isinstance(arg, float) else np.asarray(arg) for arg in args]
        expected = reference.run(None, dict(zip(names, args, strict=True)))
        for machine in machines:
            compare(machine["main"](*args), expected, tolerance)
    return machines


def compare(actual, expected, tolerance=1e-5):
    """Shapes, element types and values of a call's results."""
    actual = [actual] if hasattr(actual, "numpy") else list(actual)
    for one, other in zip(actual, expected, strict=True):
        if isinstance(other, list):
            compare(one, other, tolerance)
            continue
        one = one.numpy()
        if not other.size and not one.size and len(one) == len(other):
            continue  # rows of no trip: ONNX Runtime takes symbolic sizes of a row for 0
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
