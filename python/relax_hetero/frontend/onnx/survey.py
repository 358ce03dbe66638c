"""A survey of a model: imported like any other, but that a refused node does not end the import.

What a refused node would make is stood for by a parameter of its type, so that the nodes behind it can be looked at;
where its type is not known, they cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import onnx
from onnx import helper, shape_inference
from tvm import relax, tirx

from ...errors import FrontendError
from ..import_limits import MAX_RANK
from ..joined_sizes import Bounds, SizeIsBounded
from .check_model import STANDARD_DOMAINS
from .external_data import is_external
from .importer import GraphImporter, ImportedGraph, import_graph
from .inputs import dim_name, dtype_name
from .model import OnnxModel
from .node_names import NodeInfo, subgraphs_of, variable_name, walk_nodes
from .support import has_converter

# The types of a model's values as ONNX infers them, from a copy without its weights.
#
# Inference needs the shapes of weights, and the numbers of small ones (the sizes of a reshape). Large ones become
# inputs of the copy, which has their shapes and not their data: a model of many gigabytes is never written as a
# whole.

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


NO_CONVERTER = "no converter takes this op"
"""The reason of nodes whose op cannot be imported in any form."""


@dataclass
class Survey:
    """Result of a survey.

    Attributes
    ----------
    rejected : dict of NodeInfo to str
        Node of the model's own graph -> the reason.
    unknown : dict of NodeInfo to str
        Node that was not looked at -> the reason.
    problems : list of str
        Reasons that belong to no node.
    graph : ImportedGraph or None
        Graph that was imported, with a further parameter for each value that a refused node would make.
    """

    rejected: dict[NodeInfo, str] = field(default_factory=dict)
    unknown: dict[NodeInfo, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    graph: ImportedGraph | None = None


def survey_nodes(model: OnnxModel, nodes: list[NodeInfo], inputs: Mapping[str, relax.Var]) -> Survey:
    """Import a graph as far as it goes.

    Parameters
    ----------
    nodes : list of NodeInfo
        The names of its nodes, in order.
    inputs : mapping of str to relax.Var
        ONNX name -> parameter.
    """
    types = known_types(model.proto, inputs)
    found = Survey()

    def start(model: OnnxModel) -> GraphImporter:
        nonlocal found
        found = Survey()
        return _Surveyor(model, types, found)

    try:
        graph = import_graph(model, nodes, inputs, start)
    except FrontendError as error:  # of no node: more bounds than an import may find
        found.problems.append(str(error))
        return found
    return replace(found, graph=graph)


class _Surveyor(GraphImporter):
    """The importer, going on behind refused nodes."""

    def __init__(self, model: OnnxModel, types: Mapping[str, onnx.TypeProto], found: Survey) -> None:
        super().__init__(model)
        self._types = types
        self._found = found
        self._sizes: dict[str, tirx.PrimExpr] = {}
        self._stand_ins: dict[str, relax.Var] = {}
        self._lacking: dict[str, NodeInfo] = {}  # values of unknown types, with the refused nodes that lack them
        self._vague: dict[str, NodeInfo] = {}  # values that come from stand-ins without known sizes

    def run(self, nodes: list[NodeInfo], inputs: Mapping[str, relax.Var], bounds: Bounds) -> ImportedGraph:
        self._sizes = sizes_by_name(self._graph, inputs)
        graph = super().run(nodes, inputs, bounds)
        names = [*graph.input_names, *self._stand_ins]
        return replace(graph, input_names=names, params=[*graph.params, *self._stand_ins.values()])

    def _convert_graph(self, protos: Iterable[onnx.NodeProto], nodes: list[NodeInfo]) -> None:
        for node, info in zip(protos, nodes, strict=True):
            read = set(_names_read(node))
            lacking = next((self._lacking[name] for name in read if name in self._lacking), None)
            vague = next((self._vague[name] for name in read if name in self._vague), None)
            if lacking is not None:
                self._found.unknown[info] = f"the type of what it reads from node {lacking.name!r} is not known"
                self._stand_for(node, lacking)
                continue
            if vague is not None:
                self._vague.update(dict.fromkeys(node.output, vague))
            why = self._missing_in(node, info) or self._why_refused(node, info, vague)
            if why:
                self._found.rejected[info] = why
                self._stand_for(node, info)

    def _missing_in(self, node: onnx.NodeProto, info: NodeInfo) -> str:
        """The reason where a node, or one inside of it, has no converter in any form."""
        missing = [inner for inner in walk_nodes([info]) if not has_converter(inner, self._functions)]
        if not missing:
            return ""
        self._makers.update(dict.fromkeys(node.output, info))
        inside = [inner for inner in missing if inner is not info]
        return f"it holds node {inside[0]}, which cannot be imported" if inside else NO_CONVERTER

    def _why_refused(self, node: onnx.NodeProto, info: NodeInfo, vague: NodeInfo | None) -> str:
        """Convert one node; the reason where its form is refused, else nothing."""
        try:
            with self.trial() as keep:
                self._convert_nodes([node], [info])
                keep()
        except SizeIsBounded:  # the import starts again
            raise
        except FrontendError as error:
            behind = f" (found behind the refused node {vague.name!r}, whose sizes are not known)" if vague else ""
            return f"{error}{behind}"
        return ""

    def _stand_for(self, node: onnx.NodeProto, refused: NodeInfo) -> None:
        """Parameters in the place of what a node would make, as far as its types are known."""
        for name in filter(None, node.output):
            known = len(self._sizes)
            ty = self._type_of(name)
            if ty is None:
                self._lacking[name] = refused
                continue
            if len(self._sizes) > known:
                self._vague[name] = refused
            self._stand_ins[name] = self._nodes[name] = relax.Var(variable_name(name), ty)
            self.bb.begin_scope([self._stand_ins[name]])  # sizes that it names; nobody uses the builder afterwards

    def _type_of(self, name: str) -> relax.TensorType | None:
        if name not in self._types or not self._types[name].HasField("tensor_type"):
            return None
        tensor = self._types[name].tensor_type
        try:
            dtype = dtype_name(tensor.elem_type, name)
        except FrontendError:
            return None
        if not tensor.HasField("shape") or len(tensor.shape.dim) > MAX_RANK:
            return None
        dims = [self._dim(f"{name}_d{axis}", dim) for axis, dim in enumerate(tensor.shape.dim)]
        return relax.TensorType(dims, dtype)

    def _dim(self, name: str, dim: onnx.TensorShapeProto.Dimension) -> int | tirx.PrimExpr:
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            return int(dim.dim_value)
        wanted = dim_name(dim) or name
        return self._sizes.setdefault(wanted, tirx.Var(variable_name(wanted), "int64"))

    def _graph_output(self, name: str) -> relax.Expr:
        if name in self._lacking:
            return relax.Tuple([])
        try:
            return super()._graph_output(name)
        except SizeIsBounded:
            raise
        except FrontendError as error:
            self._found.problems.append(str(error))
            return relax.Tuple([])


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node reads, those that its graphs read from around them too."""
    yield from node.input
    for _, graph in subgraphs_of(node):
        for inner in graph.node:
            yield from _names_read(inner)
