"""Functions that a model defines itself. The importer inlines their bodies, so that nodes keep the call's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import onnx

# (domain, name, overload) -> definition
FunctionTable: TypeAlias = "Mapping[tuple[str, str, str], onnx.FunctionProto]"


class Callee(Protocol):
    """Fields of a `NodeProto` or `NodeInfo` that identify the called function."""

    @property
    def domain(self) -> str: ...  # noqa: D102
    @property
    def op_type(self) -> str: ...  # noqa: D102
    @property
    def overload(self) -> str: ...  # noqa: D102


def function_table(proto: onnx.ModelProto) -> dict[tuple[str, str, str], onnx.FunctionProto]:
    """The functions of a model by domain, name and overload."""
    return {(function.domain, function.name, function.overload): function for function in proto.functions}


def function_of(node: Callee, functions: FunctionTable) -> onnx.FunctionProto | None:
    """The definition that a node calls, or None if it is an op."""
    return functions.get((node.domain, node.op_type, node.overload))


def body_of_call(function: onnx.FunctionProto, call: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The function's nodes with attribute references replaced by the call's values or defaults."""
    attributes = {attribute.name: attribute for attribute in (*function.attribute_proto, *call.attribute)}
    return [_bind_attributes(node, attributes) for node in function.node]


def _bind_attributes(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    result = onnx.NodeProto()
    result.CopyFrom(node)
    del result.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            result.attribute.append(_bind_graphs(attribute, attributes))
        elif attribute.ref_attr_name in attributes:
            value = onnx.AttributeProto()
            value.CopyFrom(attributes[attribute.ref_attr_name])
            value.name = attribute.name
            result.attribute.append(value)
    return result


def _bind_graphs(attribute: onnx.AttributeProto, attributes: Mapping[str, onnx.AttributeProto]) -> onnx.AttributeProto:
    if not attribute.HasField("g"):
        return attribute
    result = onnx.AttributeProto()
    result.CopyFrom(attribute)
    del result.g.node[:]
    result.g.node.extend(_bind_attributes(node, attributes) for node in attribute.g.node)
    return result
