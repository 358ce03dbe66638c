"""Whole models for the tests: ONNX's light models, with weights that matter, and all-MiniLM-L6-v2."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

ROOT = Path(__file__).resolve().parents[3]
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def light_model(name: str) -> onnx.ModelProto:
    """A model of the onnx package as it is: every weight is a ConstantOfShape, so every filter is the same."""
    return onnx.load(str(LIGHT / f"light_{name}.onnx"))


def random_model(name: str, seed: int = 0) -> onnx.ModelProto:
    """The same network with random weights, and what enters its last softmax as a second output, ``logits``.

    Constant weights hide mistakes (channels swapped or read from the wrong place give the same numbers), and so does
    a softmax that saturates.
    """
    model = light_model(name)
    generator = np.random.default_rng(seed)
    shapes = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    roles = {value: (node.op_type, index) for node in model.graph.node for index, value in enumerate(node.input)}
    chosen, weights = [], []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in shapes:
            chosen.append(node)
            continue
        shape = tuple(int(extent) for extent in shapes[node.input[0]])
        array = _weight(shape, *roles.get(node.output[0], ("", 0)), generator)
        weights.append(numpy_helper.from_array(array.astype("float32"), node.output[0]))
    used = {value for node in chosen for value in node.input}
    initializers = [each for each in model.graph.initializer if each.name in used] + weights
    names = {each.name for each in initializers}
    inputs = [each for each in model.graph.input if each.name in used - names]
    outputs = [*model.graph.output, _expose_logits(chosen)]
    graph = onnx.helper.make_graph(chosen, name, inputs, outputs, initializers)
    result = onnx.helper.make_model(graph, opset_imports=model.opset_import)
    result.ir_version = 8
    return result


def _expose_logits(nodes: list[onnx.NodeProto]) -> onnx.ValueInfoProto:
    softmax = next(node for node in reversed(nodes) if node.op_type == "Softmax")
    inner = softmax.input[0]
    for node in nodes:
        for names in (node.input, node.output):
            names[:] = ["logits" if name == inner else name for name in names]
    return onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, None)


def _weight(shape: tuple[int, ...], op_type: str, index: int, generator: np.random.Generator) -> np.ndarray:
    if op_type == "BatchNormalization" and index in (1, 4):  # scale and variance
        return generator.uniform(0.5, 1.5, shape)
    if len(shape) == 1:
        return 0.1 * generator.standard_normal(shape)
    return generator.standard_normal(shape) * np.sqrt(2.0 / np.prod(shape[1:]))


def minilm(batch: int, seq: int) -> onnx.ModelProto:
    """all-MiniLM-L6-v2 with its real weights, as the example builds it."""
    folder = str(ROOT / "apps" / "sentence_similarity")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from minilm import default_cache, onnx_path

    return onnx.load(str(onnx_path(default_cache(), batch, seq)))


def inputs_of(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Random arguments: standard normal floats, small non-negative integers, masks with a tail of padding."""
    generator = np.random.default_rng(seed)
    weights = {each.name for each in model.graph.initializer}
    inputs = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if value.name == "attention_mask":
            tokens = np.arange(shape[-1]) < max(1, shape[-1] * 3 // 4)
            inputs[value.name] = np.broadcast_to(tokens, shape).astype("int64")
        elif value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            inputs[value.name] = generator.integers(0, 30000, shape)
        else:
            inputs[value.name] = generator.standard_normal(shape).astype("float32")
    return inputs


def node_names(model: onnx.ModelProto) -> list[str]:
    """The names of the nodes that compute, in order, as placement patterns know them."""
    names = [node.name or f"{node.op_type}_{index}" for index, node in enumerate(model.graph.node)]
    return [name for name, node in zip(names, model.graph.node, strict=True) if node.op_type != "ConstantOfShape"]
