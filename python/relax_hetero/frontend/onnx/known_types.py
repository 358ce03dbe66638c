"""The types of a model's values as ONNX infers them, from a copy without its weights.

Inference needs the shapes of weights, and the numbers of small ones (the sizes of a reshape). Large ones become inputs
of the copy, which has their shapes and not their data: a model of many gigabytes is never written as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx
from onnx import helper, shape_inference
from tvm import relax, tirx

from .check_model import STANDARD_DOMAINS
from .external_data import is_external
from .inputs import dim_name

# Elements of a constant whose numbers may be sizes, axes or pads.
_MAX_SIZES = 1024


def known_types(proto: onnx.ModelProto, inputs: Mapping[str, relax.Var]) -> dict[str, onnx.TypeProto]:
    """The types of values in the model's own graph, as far as the model states them or ONNX infers them.

    Parameters
    ----------
    inputs : mapping of str to relax.Var
        ONNX name -> parameter, which may have sizes that the model leaves open.
    """
    light = _without_weights(proto, inputs)
    try:
        inferred = shape_inference.infer_shapes(light, data_prop=True)
    except Exception:  # inference refuses some models that the importer takes; theirs are the types that are stated
        inferred = light
    values = (*inferred.graph.value_info, *inferred.graph.output)
    return {value.name: value.type for value in values if value.HasField("type")}


def _without_weights(proto: onnx.ModelProto, inputs: Mapping[str, relax.Var]) -> onnx.ModelProto:
    graph = proto.graph
    light = onnx.ModelProto(ir_version=max(proto.ir_version, 4))  # of these, weights need not be inputs
    light.opset_import.extend(proto.opset_import)
    light.functions.extend(proto.functions)
    light.graph.name = graph.name
    light.graph.input.extend(_with_sizes(value, inputs.get(value.name)) for value in graph.input)
    listed = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if _is_small(tensor):
            light.graph.initializer.append(tensor)
        elif tensor.name not in listed:
            light.graph.input.append(_like(tensor.name, tensor))
    for node in graph.node:
        large = next((tensor for tensor in _constant_of(node) if not _is_small(tensor)), None)
        if large is None:
            light.graph.node.append(node)
        else:
            light.graph.input.append(_like(node.output[0], large))
    light.graph.value_info.extend(graph.value_info)
    light.graph.output.extend(graph.output)
    return light


def _with_sizes(value: onnx.ValueInfoProto, param: relax.Var | None) -> onnx.ValueInfoProto:
    shape = _shape_of(param)
    if shape is None or not value.type.HasField("tensor_type"):
        return value
    dims = [_named(dim) for dim in shape]
    return helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, dims)


def _named(dim: tirx.PrimExpr) -> int | str | None:
    if isinstance(dim, tirx.IntImm):
        return int(dim)
    return str(dim.name) if isinstance(dim, tirx.Var) else None


def _constant_of(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    if node.op_type == "Constant" and node.domain in STANDARD_DOMAINS and node.output:
        yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))


def _is_small(tensor: onnx.TensorProto) -> bool:
    elements = 1
    for dim in tensor.dims:
        elements *= dim
    return elements <= _MAX_SIZES and not is_external(tensor)


def _like(name: str, tensor: onnx.TensorProto) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))


def sizes_by_name(graph: onnx.GraphProto, inputs: Mapping[str, relax.Var]) -> dict[str, tirx.PrimExpr]:
    """The sizes of parameters by the names of dimensions, the model's and their own: symbolic, or given by the user."""
    found: dict[str, tirx.PrimExpr] = {}
    for value in graph.input:
        shape = _shape_of(inputs.get(value.name))
        if shape is None or not value.type.HasField("tensor_type"):
            continue
        found.update((str(dim.name), dim) for dim in shape if isinstance(dim, tirx.Var))
        found.update(
            (dim_name(dim), size)
            for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=False)
            if dim_name(dim)
        )
    return found


def _shape_of(param: relax.Var | None) -> list[tirx.PrimExpr] | None:
    shape = param.ty.shape if param is not None and isinstance(param.ty, relax.TensorType) else None
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None
