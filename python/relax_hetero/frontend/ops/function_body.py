"""Conversion of a node by the function body that defines its op in ONNX.

The inner nodes have the name of the outer node, so that it stays one node for placement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from tvm import relax, tirx

from ...target.element_types import numpy_dtype
from .node import STANDARD, Node, dtype_of
from .required_sizes import computed_sizes

ConvertNode = Callable[[Node], Any]


def has_body(op_type: str, opset: int) -> bool:
    """Return whether ONNX defines the op in this opset by a function body."""
    schema = _schema(op_type, opset)
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def expand(node: Node, convert: ConvertNode) -> relax.Expr:
    """Convert every node of the body with `convert` and return the outer node's outputs.

    Raises FrontendError if the body needs something that cannot be converted.
    """
    body = _body(node)
    opset = next((entry.version for entry in body.opset_import if entry.domain in ("", "ai.onnx")), node.opset)
    values: dict[str, Any] = {"": None}
    for index, name in enumerate(body.input):
        values[name] = node.inputs[index] if node.has(index) else None
    attribute_values = {name: value for name, value in node.attributes.items() if name != "tvm_custom"}
    for name, attribute in _schema(node.op_type, node.opset, node.domain).attributes.items():
        if attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            attribute_values.setdefault(name, _value(attribute.default_value))
    for inner in body.node:
        attributes = {}
        for attribute in inner.attribute:
            if not attribute.ref_attr_name:
                attributes[attribute.name] = _value(attribute)
            elif attribute.ref_attr_name in attribute_values:
                attributes[attribute.name] = attribute_values[attribute.ref_attr_name]
        inputs = [values[name] for name in inner.input]
        inner_node = Node(inner.op_type, node.name, opset, node.builder, inputs, attributes, len(inner.output))
        sizes = computed_sizes(
            inner_node, onnx.helper.make_node(inner.op_type, inner.input, inner.output, **attributes)
        )
        if sizes is not None:
            values[inner.output[0]] = sizes
            continue
        result = convert(inner_node)
        if len(inner.output) == 1:
            values[inner.output[0]] = result
            continue
        for index, name in enumerate(inner.output):
            values[name] = _item(node, result, index)
    outputs = [values[name] for name in body.output[: node.num_outputs]]
    return outputs[0] if len(outputs) == 1 else relax.Tuple([node.builder.normalize(value) for value in outputs])


def body_with_graphs(node: Node) -> tuple[onnx.FunctionProto, onnx.NodeProto] | None:
    """The body of an op, and its call with all attributes, if nodes of the body have subgraphs; else None.

    Only the importer converts such nodes.
    """
    if not has_body(node.op_type, node.opset):
        return None
    body, call = _body(node), node.proto()
    if not any(attribute.HasField("g") for inner in body.node for attribute in inner.attribute):
        return None
    names = {attribute.name for attribute in call.attribute}
    for name, attribute in _schema(node.op_type, node.opset, node.domain).attributes.items():
        if name not in names and attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            call.attribute.append(attribute.default_value)
            call.attribute[-1].name = name
    return body, call


def _item(node: Node, result: relax.Expr, index: int) -> relax.Expr:
    if isinstance(result, relax.Tuple):
        return result.fields[index]
    return node.emit(relax.TupleGetItem(node.builder.normalize(result), index))


def _schema(op_type: str, opset: int, domain: str = STANDARD) -> Any:
    try:
        return onnx.defs.get_schema(op_type, opset if domain == STANDARD else 1, domain)
    except onnx.defs.SchemaError:
        return None


def _value(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return tuple(value) if isinstance(value, list) else value


def _body(node: Node) -> onnx.FunctionProto:
    schema = _schema(node.op_type, node.opset, node.domain)
    proto = node.proto()
    if schema.has_context_dependent_function:
        types = [_type(value).SerializeToString() for value in node.inputs]
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= node.opset]
        if versions:
            text = schema.get_context_dependent_function_with_opset_version(
                max(versions), proto.SerializeToString(), types
            )
            return _parse(node, text)
    versions = [v for v in schema.function_opset_versions if v <= node.opset]
    if not versions:
        raise node.refusal(f"its definition in opset {node.opset} has no body to convert")
    return _parse(node, schema.get_function_with_opset_version(max(versions)))


def _parse(node: Node, text: bytes) -> onnx.FunctionProto:
    if not text:
        raise node.refusal(f"its definition in opset {node.opset} has no body for these inputs")
    body = onnx.FunctionProto()
    body.ParseFromString(text)
    return body


def _type(value: Any) -> onnx.TypeProto:
    """Type of an input as ONNX writes it; an absent input has the empty type."""
    if value is None:
        return onnx.TypeProto()
    if isinstance(value, relax.ShapeExpr):
        return onnx.helper.make_tensor_type_proto(onnx.TensorProto.INT64, [len(value.values)])
    if not isinstance(value.ty, relax.TensorType):
        return onnx.helper.make_tensor_type_proto(onnx.TensorProto.INT64, [])
    dtype = onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype_of(value)))
    shape = value.ty.shape
    if shape is None or not isinstance(shape, relax.ShapeExpr):
        return onnx.helper.make_tensor_type_proto(dtype, None)
    dims = [int(dim) if isinstance(dim, tirx.IntImm) else None for dim in shape.values]
    return onnx.helper.make_tensor_type_proto(dtype, dims)
