"""Conversion of the graphs inside a node, where the builder stands: what control flow needs of the importer."""

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
    """A private function that repeats the body of a loop, before names and devices are written into it.

    Attributes
    ----------
    gv : tvm.ir.GlobalVar
        Variable by which it is called.
    params : list of relax.Var
        Its own parameters.
    captured : list of relax.Var
        Variables around the loop that its body reads: further parameters, behind its own.
    sizes : list of tvm.tirx.Var
        Symbolic sizes around the loop that its body mentions: its last parameter is a shape of them.
    bindings : list of relax.Binding
        In program order.
    result : relax.Expr
        A tuple.
    """

    gv: tvm.ir.GlobalVar
    params: list[relax.Var]
    captured: list[relax.Var]
    sizes: list[tvm.tirx.Var]
    bindings: list[relax.Binding]
    result: relax.Expr


class Importer(Protocol):
    """The walk over a model's nodes, as far as loops and branches need it.

    Attributes
    ----------
    loops : list of ImportedLoop
        The functions that loops became, inner ones first.
    known : dict of relax.Var to relax.Binding
        The bindings of variables that are computed from constants only, in program order.
    """

    bb: relax.BlockBuilder
    loops: list[ImportedLoop]
    known: dict[relax.Var, relax.Binding]

    def block(self, info: NodeInfo) -> AbstractContextManager[list[relax.Binding]]:
        """Collect what is emitted inside into the list this yields, complete once the block is left.

        A node owns the bindings, unless a node inside it does.
        """

    def adopt(self, bindings: list[relax.Binding], info: NodeInfo) -> None:
        """Emit collected bindings where the builder stands; a node owns them unless an inner node does."""

    def trial(self) -> AbstractContextManager[Callable[[], None]]:
        """Forget, when left, the loops and owners of bindings made inside, unless what it yields was called."""

    def as_tensor(self, value: Any) -> Any:
        """A shape or a symbolic number as the int64 tensor it stands for; other values as they are."""


class OnnxImporter(Importer, Protocol):
    """The walk over the nodes of ONNX graphs, which have graphs in them."""

    def graph_values(self, graph: onnx.GraphProto, nodes: list[NodeInfo], given: Mapping[str, Any]) -> list[Any]:
        """Convert a graph inside a node; values around it stay visible, and it is given those of its inputs."""

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """The nodes of the model that read a value of that name; none if it is an output of a graph, too."""

    def value(self, name: str) -> Any:
        """The value of that name where the walk stands; None if there is none."""


def inner_graph(node: onnx.NodeProto, name: str, info: NodeInfo) -> onnx.GraphProto:
    """The graph in an attribute; FrontendError where the node has none."""
    for attribute in node.attribute:
        if attribute.name == name and attribute.HasField("g"):
            return attribute.g
    raise FrontendError(f"node {info} has no graph {name!r}")


def readers_of(graph: onnx.GraphProto, functions: Iterable[onnx.FunctionProto]) -> dict[str, list[onnx.NodeProto]]:
    """The nodes that read each value, in all graphs and functions of a model; no outputs of graphs are among them."""
    found: dict[str, list[onnx.NodeProto]] = {}
    outputs: set[str] = set()

    def look(nodes: Iterable[onnx.NodeProto], results: Iterable[str]) -> None:
        outputs.update(results)
        for node in nodes:
            for name in node.input:
                found.setdefault(name, []).append(node)
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    look(attribute.g.node, (value.name for value in attribute.g.output))

    look(graph.node, (value.name for value in graph.output))
    for function in functions:
        look(function.node, function.output)
    return {name: nodes for name, nodes in found.items() if name not in outputs}


def attribute_of(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """An attribute's value, or `default` if it is not given."""
    for attribute in node.attribute:
        if attribute.name == name:
            return onnx.helper.get_attribute_value(attribute)
    return default


def known_number(value: Any) -> int | None:
    """The value of an integer or a truth value that is known at import, else None; also of a tensor of one element."""
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
    """A value of one element as a scalar tensor.

    Raises
    ------
    FrontendError
        Beginning with `what`: it is no tensor, of another element type, or of more elements.
    """
    value = importer.as_tensor(value)
    if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
        raise FrontendError(f"{what} is no tensor, expected a scalar of {dtype}")
    if str(value.ty.dtype) != dtype:
        raise FrontendError(f"{what} is of {value.ty.dtype}, expected {dtype}")
    known = known_number(value)
    if known is not None:
        return number(known, dtype)
    if value.ty.ndim == 0:
        return value
    dims = value.ty.shape.values if isinstance(value.ty.shape, relax.ShapeExpr) else None
    if dims is not None and any(isinstance(dim, tvm.tirx.IntImm) and int(dim) != 1 for dim in dims):
        shown = ", ".join(str(as_dim(dim)) for dim in dims)
        raise FrontendError(f"{what} has the shape [{shown}], expected one element")
    return importer.bb.emit(relax.op.reshape(value, ()))


def tensor_of(importer: Importer, value: Any, title: str) -> relax.Expr:
    """A value as a tensor; FrontendError for sequences and optionals."""
    value = importer.as_tensor(value)
    if not isinstance(value, relax.Expr) or not isinstance(value.ty, relax.TensorType):
        raise FrontendError(f"{title} hands on a sequence or an optional where a tensor is expected")
    return value


def sizes_in(types: Any) -> set[tvm.tirx.Var]:
    """The symbolic sizes that tensor types mention."""
    shapes = [ty.shape for ty in types if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr)]
    shapes += [ty.values for ty in types if isinstance(ty, relax.ShapeType) and ty.values is not None]
    found: set[tvm.tirx.Var] = set()
    for shape in shapes:
        for dim in shape if not isinstance(shape, relax.ShapeExpr) else shape.values:
            found |= set(tvm.tirx.analysis.undefined_vars(tvm.tirx.Evaluate(dim), []))
    return found
