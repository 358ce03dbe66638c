"""Networks of the onnx package's ``light`` graphs, whose constant weights are replaced by random ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

_FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
LIGHT = {
    "resnet50": "light_resnet50",
    "squeezenet": "light_squeezenet",
    "vgg19": "light_vgg19",
    "inception_v1": "light_inception_v1",
    "inception_v2": "light_inception_v2",
    "densenet121": "light_densenet121",
    "shufflenet": "light_shufflenet",
    "bvlc_alexnet": "light_bvlc_alexnet",
    "zfnet512": "light_zfnet512",
}


def light_model(graph: str) -> onnx.ModelProto:
    """The graph with an initializer in place of each ``ConstantOfShape``, so that no library computes with constants.

    Weights are normal with a variance of 2 over the fan-in (He), scales and variances of batch norms are between 0.5
    and 1.5, other vectors are normal with a deviation of 0.1.
    """
    model = onnx.load(str(_FOLDER / f"{graph}.onnx"))
    shapes = {initializer.name: numpy_helper.to_array(initializer) for initializer in model.graph.initializer}
    first_use: dict[str, tuple[str, int]] = {}
    for node in model.graph.node:
        for position, name in enumerate(node.input):
            first_use.setdefault(name, (node.op_type, position))
    generator = np.random.default_rng(0)
    nodes, weights = [], []
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in shapes:
            shape = tuple(int(extent) for extent in shapes[node.input[0]])
            array = _weight(shape, *first_use.get(node.output[0], ("", 0)), generator)
            weights.append(numpy_helper.from_array(array.astype("float32"), node.output[0]))
        else:
            nodes.append(node)
    used = {name for node in nodes for name in node.input}
    weights = [weight for weight in [*model.graph.initializer, *weights] if weight.name in used]
    initialized = {weight.name for weight in weights}
    inputs = [value for value in model.graph.input if value.name in used - initialized]
    for field, values in (("node", nodes), ("initializer", weights), ("input", inputs)):
        model.graph.ClearField(field)
        getattr(model.graph, field).extend(values)
    model.ir_version = 8
    _damp(model)
    _calm(model, generator)
    onnx.checker.check_model(model)
    return model


def _damp(model: onnx.ModelProto) -> None:
    """Quarter the scales of batch norms that a residual sum adds.

    A trained norm divides by the deviation of its input. With a random one, numbers grow with each sum, and exceed the
    range of float16 at the end of ResNet-50.
    """
    weights = {weight.name: weight for weight in model.graph.initializer}
    summed = {name for node in model.graph.node if node.op_type in ("Add", "Sum") for name in node.input}
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and node.output[0] in summed:
            scale = weights[node.input[1]]
            scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(0.25), scale.name))


def _calm(model: onnx.ModelProto, generator: np.random.Generator) -> None:
    """Scale the last layer with weights to a deviation of at most 2.

    A softmax of larger numbers is 1 for one class and 0 for all others: wrong results would look right.
    """
    import onnxruntime

    weights = {weight.name: weight for weight in model.graph.initializer}
    last = [node for node in model.graph.node if node.op_type in ("Gemm", "Conv")][-1]
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    probe.graph.ClearField("output")
    probe.graph.output.append(onnx.helper.make_tensor_value_info(last.output[0], onnx.TensorProto.FLOAT, None))
    (image,) = model.graph.input
    shape = [extent.dim_value for extent in image.type.tensor_type.shape.dim]
    session = onnxruntime.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {image.name: generator.standard_normal(shape, "float32")})
    factor = np.float32(min(1.0, 2.0 / float(output.std())))
    producers = {name: node for node in model.graph.node for name in node.output}
    for name in last.input[1:]:
        while name not in weights:  # newer onnx packages reshape a weight before its layer
            name = producers[name].input[0]
        weights[name].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights[name]) * factor, name))


def _weight(shape: tuple[int, ...], op: str, position: int, generator: np.random.Generator) -> np.ndarray:
    if op == "BatchNormalization" and position in (1, 4):  # its scale and variance
        return generator.uniform(0.5, 1.5, shape)
    if len(shape) <= 1:
        return generator.standard_normal(shape) * 0.1
    return generator.standard_normal(shape) * np.sqrt(2.0 / max(1, np.prod(shape[1:])))
