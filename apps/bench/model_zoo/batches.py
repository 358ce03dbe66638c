"""Models of the zoo for more than one image or sentence at a time."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper


def with_batch(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """A model for batch size one, converted to another batch size.

    The batch is the first dimension of inputs. Shapes that reshape or expand to a batch of one, and initializers that
    are concatenated with a batch of one, are converted, too.
    """
    batched = onnx.ModelProto()
    batched.CopyFrom(model)
    graph = batched.graph
    graph.ClearField("value_info")
    arrays = {weight.name: weight for weight in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            arrays[node.output[0]] = node.attribute[0].t
    for value in (*graph.input, *graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.name not in arrays and len(dims) and dims[0].dim_value == 1:
            dims[0].dim_value = batch
    for name in {n.input[1] for n in graph.node if n.op_type in ("Reshape", "Expand") and n.input[1] in arrays}:
        shape = numpy_helper.to_array(arrays[name])
        if shape.size > 1 and shape[0] == 1:
            _replace(arrays[name], np.concatenate([[batch], shape[1:]]).astype("int64"))
    for name in {name for n in graph.node if n.op_type == "Concat" for name in n.input if name in arrays}:
        array = numpy_helper.to_array(arrays[name])
        if array.ndim > 1 and array.shape[0] == 1:
            _replace(arrays[name], np.repeat(array, batch, 0))
    return onnx.shape_inference.infer_shapes(batched)


def _replace(tensor: onnx.TensorProto, array: np.ndarray) -> None:
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
