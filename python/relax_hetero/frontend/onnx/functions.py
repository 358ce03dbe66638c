"""Functions that a model defines itself: their bodies are converted in place, so that calls keep their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import onnx

# (domain, name, overload) -> definition
FunctionTable: TypeAlias = "Mapping[tuple[str, str, str], onnx.FunctionProto]"


class Callee(Protocol):
    """The fields that a call is looked up by, of a `NodeProto` or of its `NodeInfo`."""

    @property
    def domain(self) -> str: ...  # noqa: D102
    @property
    def op_type(self) -> str: ...  # noqa: D102
    @property
    def overload(self) -> str: ...  # noqa: D102


def function_table(proto: onnx.ModelProto) -> dict[tuple[str, str, str], onnx.FunctionProto]:
    """The functions of a model, by the domain, name and overload that calls give."""
    return {(function.domain, function.name, function.overload): function for function in proto.functions}


def function_of(node: Callee, functions: FunctionTable) -> onnx.FunctionProto | None:
    """The definition that a node calls, or None if it is an op."""
    return functions.get((node.domain, node.op_type, node.overload))


def body_of_call(function: onnx.FunctionProto, call: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The function's nodes with references to its attributes replaced by the call's values, or by defaults."""
    given = {attribute.name: attribute for attribute in (*function.attribute_proto, *call.attribute)}
    return [_bound(node, given) for node in function.node]


def _bound(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    result = onnx.NodeProto()
    result.CopyFrom(node)
    del result.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            result.attribute.append(_with_bound_graphs(attribute, given))
        elif attribute.ref_attr_name in given:
            value = onnx.AttributeProto()
            value.CopyFrom(given[attribute.ref_attr_name])
            value.name = attribute.name
            result.attribute.append(value)
    return result


def _with_bound_graphs(attribute: onnx.AttributeProto, given: Mapping[str, onnx.AttributeProto]) -> onnx.AttributeProto:
    if not attribute.HasField("g"):
        return attribute
    result = onnx.AttributeProto()
    result.CopyFrom(attribute)
    del result.g.node[:]
    result.g.node.extend(_bound(node, given) for node in attribute.g.node)
    return result
