"""Interfaces of the importer for the conversion of control flow, and helpers for nodes with subgraphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx
import tvm
from tvm import relax

from ....errors import FrontendError
from ...ops.node import array_of, as_dim
from ..node_names import NodeInfo


@dataclass
class ImportedLoop:
    """Private function of a loop, before names and devices are written into it."""

    gv: tvm.ir.GlobalVar  # its global variable
    params: list[relax.Var]  # its own parameters
    captured: list[relax.Var]  # outer variables that its body reads; they become parameters after its own
    sizes: list[tvm.tirx.Var]  # outer symbolic sizes that its body uses; its last parameter is a shape of them
    bindings: list[relax.Binding]  # in program order
    result: relax.Expr  # a tuple


class Importer(Protocol):
    """Importer as loops and branches see it.

    `loops`: the functions of loops, inner ones first; `constant_bindings`: the bindings of variables that are computed
    from constants only, in program order.
    """

    bb: relax.BlockBuilder
    loops: list[ImportedLoop]
    constant_bindings: dict[relax.Var, relax.Binding]

    def block(self, info: NodeInfo) -> AbstractContextManager[list[relax.Binding]]:
        """Collect emitted bindings, owned by `info` or inner nodes, into the yielded list, complete on exit."""

    def adopt(self, bindings: list[relax.Binding], info: NodeInfo) -> None:
        """Emit collected bindings at the builder's position; `info` owns those that no inner node owns."""

    def trial(self) -> AbstractContextManager[Callable[[], None]]:
        """Roll back loops and owners of bindings on exit, unless the yielded function was called."""

    def as_tensor(self, value: Any) -> Any:
        """Convert a shape or symbolic number to an int64 tensor; other values are unchanged."""


class OnnxImporter(Importer, Protocol):
    """Importer of ONNX graphs, with access to subgraphs and values by name."""

    def graph_values(self, graph: onnx.GraphProto, nodes: list[NodeInfo], arguments: Mapping[str, Any]) -> list[Any]:
        """Convert a subgraph with these arguments, the outer values in scope; return its outputs."""

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """The nodes of the model that read a value; an empty list if it is also an output of a graph."""

    def value(self, name: str) -> Any:
        """The value of a name in the current scope, or None."""


def inner_graph(node: onnx.NodeProto, name: str, info: NodeInfo) -> onnx.GraphProto:
    """The graph in an attribute; FrontendError if it is absent."""
    for attribute in node.attribute:
        if attribute.name == name and attribute.HasField("g"):
            return attribute.g
    raise FrontendError(f"node {info} has no graph {name!r}")


def readers_of(graph: onnx.GraphProto, functions: Iterable[onnx.FunctionProto]) -> dict[str, list[onnx.NodeProto]]:
    """Value -> the nodes that read it, in all graphs and functions; outputs of graphs are omitted."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    outputs: set[str] = set()

    def visit(nodes: Iterable[onnx.NodeProto], results: Iterable[str]) -> None:
        outputs.update(results)
        for node in nodes:
            for name in node.input:
                readers.setdefault(name, []).append(node)
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    visit(attribute.g.node, (value.name for value in attribute.g.output))

    visit(graph.node, (value.name for value in graph.output))
    for function in functions:
        visit(function.node, function.output)
    return {name: nodes for name, nodes in readers.items() if name not in outputs}


def attribute_of(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """An attribute's value, or `default` if it is absent."""
    for attribute in node.attribute:
        if attribute.name == name:
            return onnx.helper.get_attribute_value(attribute)
    return default


def known_number(value: Any) -> int | None:
    """The value of a constant integer, boolean or tensor of one element; None for any other value."""
    if isinstance(value, tvm.tirx.IntImm):
        return int(value)
    if isinstance(value, relax.ShapeExpr) and len(value.values) == 1:
        return known_number(value.values[0])
    if isinstance(value, tvm.ir.GenericConst) and isinstance(value.value, tvm.runtime.Tensor):
        array = array_of(value.value)
        return int(array.reshape(())) if array.size == 1 else None
    return None


def number(value: int | bool, dtype: str) -> relax.Expr:
    """A scalar constant."""
    return relax.const(np.array(value, dtype), dtype)


def scalar(importer: Importer, value: Any, dtype: str, what: str) -> relax.Expr:
    """Convert a value of one element to a scalar tensor.

    Raises FrontendError if it is not a tensor, or has another element type or more elements; the text begins with
    `what`.
    """
    value = importer.as_tensor(value)
    if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
        raise FrontendError(f"{what} is not a tensor, expected a scalar of {dtype}")
    if str(value.ty.dtype) != dtype:
        raise FrontendError(f"{what} is of {value.ty.dtype}, expected {dtype}")
    static = known_number(value)
    if static is not None:
        return number(static, dtype)
    if value.ty.ndim == 0:
        return value
    dims = value.ty.shape.values if isinstance(value.ty.shape, relax.ShapeExpr) else None
    if dims is not None and any(isinstance(dim, tvm.tirx.IntImm) and int(dim) != 1 for dim in dims):
        shown = ", ".join(str(as_dim(dim)) for dim in dims)
        raise FrontendError(f"{what} has the shape [{shown}], expected one element")
    return importer.bb.emit(relax.op.reshape(value, ()))


def tensor_of(importer: Importer, value: Any, title: str) -> relax.Expr:
    """Convert a value to a tensor; FrontendError for sequences and optionals."""
    value = importer.as_tensor(value)
    if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
        raise FrontendError(f"{title} hands on a sequence or an optional where a tensor is expected")
    return value


def sizes_in(types: Any) -> set[tvm.tirx.Var]:
    """The symbolic variables in tensor and shape types."""
    shapes = [ty.shape for ty in types if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)]
    shapes += [ty.values for ty in types if isinstance(ty, relax.ShapeType) and ty.values is not None]
    sizes: set[tvm.tirx.Var] = set()
    for shape in shapes:
        for dim in shape if not isinstance(shape, relax.ShapeExpr) else shape.values:
            sizes |= set(tvm.tirx.analysis.undefined_vars(tvm.tirx.Evaluate(dim), []))
    return sizes
