"""Survey of a model: an import that continues after refused nodes.

An output of a refused node becomes a parameter of its type, so that later nodes can be examined. If ONNX's shape
inference does not know the type, nodes that read it cannot be examined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import onnx
from onnx import helper, shape_inference
from tvm import relax, tirx

from ...errors import FrontendError
from ..import_limits import MAX_RANK
from ..joined_sizes import Bounds, SizeIsBounded
from ..ops.custom import registration
from ..ops.node import STANDARD_DOMAINS
from .external_data import is_external
from .importer import GraphImporter, ImportedGraph, import_graph
from .inputs import dim_name, dtype_name
from .node_names import NodeInfo, subgraphs_of, variable_name, walk_nodes
from .onnx_model import OnnxModel
from .support import has_converter

_MAX_SIZE_ELEMENTS = 1024  # constants up to this number of elements may hold sizes, axes or pads


def known_types(proto: onnx.ModelProto, inputs: Mapping[str, relax.Var]) -> dict[str, onnx.TypeProto]:
    """The types of values in the main graph that the model states or ONNX infers.

    Inference runs on a copy without large weights, which become inputs: it needs their shapes only, and a model of many
    gigabytes must not be serialized. `inputs`: ONNX name -> parameter, which may have sizes that the model leaves
    unknown.
    """
    light = _without_weights(proto, inputs)
    try:
        inferred = shape_inference.infer_shapes(light, data_prop=True)
    except Exception:  # inference refuses some models that the importer takes
        inferred = light
    values = (*inferred.graph.value_info, *inferred.graph.output)
    return {value.name: value.type for value in values if value.HasField("type")}


def _without_weights(proto: onnx.ModelProto, inputs: Mapping[str, relax.Var]) -> onnx.ModelProto:
    graph = proto.graph
    light = onnx.ModelProto(ir_version=max(proto.ir_version, 4))  # weights need not be inputs since version 4
    light.opset_import.extend(proto.opset_import)
    light.functions.extend(proto.functions)
    light.graph.name = graph.name
    light.graph.input.extend(_with_sizes(value, inputs.get(value.name)) for value in graph.input)
    listed = {value.name for value in graph.input}
    for tensor in graph.initializer:
        if _is_small(tensor):
            light.graph.initializer.append(tensor)
        elif tensor.name not in listed:
            light.graph.input.append(_value_info(tensor.name, tensor))
    for node in graph.node:
        large = next((tensor for tensor in _constant_of(node) if not _is_small(tensor)), None)
        if large is None:
            light.graph.node.append(node)
        else:
            light.graph.input.append(_value_info(node.output[0], large))
    light.graph.value_info.extend(graph.value_info)
    light.graph.output.extend(graph.output)
    return light


def _with_sizes(value: onnx.ValueInfoProto, param: relax.Var | None) -> onnx.ValueInfoProto:
    shape = _shape_of(param)
    if shape is None or not value.type.HasField("tensor_type"):
        return value
    dims = [_size_or_name(dim) for dim in shape]
    return helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, dims)


def _size_or_name(dim: tirx.PrimExpr) -> int | str | None:
    if isinstance(dim, tirx.IntImm):
        return int(dim)
    return str(dim.name) if isinstance(dim, tirx.Var) else None


def _constant_of(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    if node.op_type == "Constant" and node.domain in STANDARD_DOMAINS and node.output:
        yield from (attribute.t for attribute in node.attribute if attribute.HasField("t"))


def _is_small(tensor: onnx.TensorProto) -> bool:
    return prod(tensor.dims) <= _MAX_SIZE_ELEMENTS and not is_external(tensor)


def _value_info(name: str, tensor: onnx.TensorProto) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))


def sizes_by_name(graph: onnx.GraphProto, inputs: Mapping[str, relax.Var]) -> dict[str, tirx.PrimExpr]:
    """Sizes of parameters by the model's names of dimensions and by the names of symbolic variables."""
    sizes: dict[str, tirx.PrimExpr] = {}
    for value in graph.input:
        shape = _shape_of(inputs.get(value.name))
        if shape is None or not value.type.HasField("tensor_type"):
            continue
        sizes.update((str(dim.name), dim) for dim in shape if isinstance(dim, tirx.Var))
        sizes.update(
            (dim_name(dim), size)
            for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=False)
            if dim_name(dim)
        )
    return sizes


def _shape_of(param: relax.Var | None) -> list[tirx.PrimExpr] | None:
    shape = param.ty.shape if param is not None and isinstance(param.ty, relax.TensorType) else None
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None


NO_CONVERTER = "no converter takes this op"  # beginning of the reason for nodes whose op cannot be imported in any form


def no_converter(node: NodeInfo) -> str:
    """The reason for a node whose op cannot be imported in any form."""
    return f"{NO_CONVERTER}; {registration(node.domain, node.op_type)} adds one"


@dataclass
class Survey:
    """Result of a survey."""

    rejected: dict[NodeInfo, str] = field(default_factory=dict)  # node of the main graph -> the reason
    unknown: dict[NodeInfo, str] = field(default_factory=dict)  # node that was not examined -> the reason
    problems: list[str] = field(default_factory=list)  # reasons that do not belong to a node
    graph: ImportedGraph | None = None  # imported graph with an additional parameter for each output of a refused node


def survey_nodes(model: OnnxModel, nodes: list[NodeInfo], inputs: Mapping[str, relax.Var]) -> Survey:
    """Import a graph as far as it goes. `nodes`: the names of its nodes, in order; `inputs`: ONNX name -> parameter."""
    types = known_types(model.proto, inputs)
    survey = Survey()

    def start(model: OnnxModel) -> GraphImporter:
        nonlocal survey
        survey = Survey()
        return _Surveyor(model, types, survey)

    try:
        graph = import_graph(model, nodes, inputs, start)
    except FrontendError as error:  # not of a node: too many restarts of the import
        survey.problems.append(str(error))
        return survey
    return replace(survey, graph=graph)


class _Surveyor(GraphImporter):
    """Importer that continues after refused nodes."""

    def __init__(self, model: OnnxModel, types: Mapping[str, onnx.TypeProto], survey: Survey) -> None:
        super().__init__(model)
        self._types = types
        self._survey = survey
        self._sizes: dict[str, tirx.PrimExpr] = {}
        self._stand_ins: dict[str, relax.Var] = {}
        self._untyped: dict[str, NodeInfo] = {}  # value of unknown type -> the refused node
        self._vague_values: dict[str, NodeInfo] = {}  # value computed from a stand-in of unknown size -> its node

    def run(self, nodes: list[NodeInfo], inputs: Mapping[str, relax.Var], bounds: Bounds) -> ImportedGraph:
        self._sizes = sizes_by_name(self._graph, inputs)
        graph = super().run(nodes, inputs, bounds)
        names = [*graph.input_names, *self._stand_ins]
        return replace(graph, input_names=names, params=[*graph.params, *self._stand_ins.values()])

    def _convert_graph(self, protos: Iterable[onnx.NodeProto], nodes: list[NodeInfo]) -> None:
        for node, info in zip(protos, nodes, strict=True):
            read = set(_names_read(node))
            untyped = next((self._untyped[name] for name in read if name in self._untyped), None)
            vague = next((self._vague_values[name] for name in read if name in self._vague_values), None)
            if untyped is not None:
                self._survey.unknown[info] = f"it reads a value of unknown type from node {untyped.name!r}"
                self._add_stand_ins(node, untyped)
                continue
            if vague is not None:
                self._vague_values.update(dict.fromkeys(node.output, vague))
            refusal = self._missing_converter(node, info) or self._refusal(node, info, vague)
            if refusal:
                self._survey.rejected[info] = refusal
                self._add_stand_ins(node, info)

    def _missing_converter(self, node: onnx.NodeProto, info: NodeInfo) -> str:
        """The reason if a node, or one nested in it, lacks a converter; else an empty string."""
        missing = [inner for inner in walk_nodes([info]) if not has_converter(inner, self._functions)]
        if not missing:
            return ""
        self._producers.update(dict.fromkeys(node.output, info))
        nested = [inner for inner in missing if inner is not info]
        return f"it holds node {nested[0]}, which cannot be imported" if nested else no_converter(info)

    def _refusal(self, node: onnx.NodeProto, info: NodeInfo, vague: NodeInfo | None) -> str:
        """Convert a node; return the reason if its form is refused, else an empty string."""
        try:
            with self.trial() as keep:
                self._convert_nodes([node], [info])
                keep()
        except SizeIsBounded:  # the import restarts
            raise
        except FrontendError as error:
            suffix = f" (after the refused node {vague.name!r}, whose sizes are not known)" if vague else ""
            return f"{error}{suffix}"
        return ""

    def _add_stand_ins(self, node: onnx.NodeProto, refused: NodeInfo) -> None:
        """Add parameters for the outputs of a node whose types are known."""
        for name in filter(None, node.output):
            num_sizes = len(self._sizes)
            ty = self._type_of(name)
            if ty is None:
                self._untyped[name] = refused
                continue
            if len(self._sizes) > num_sizes:
                self._vague_values[name] = refused
            self._stand_ins[name] = self._nodes[name] = relax.Var(variable_name(name), ty)
            # For the sizes in its type; the scope stays open because the builder is discarded.
            self.bb.begin_scope([self._stand_ins[name]])

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
        symbol = dim_name(dim) or name
        return self._sizes.setdefault(symbol, tirx.Var(variable_name(symbol), "int64"))

    def _graph_output(self, name: str) -> relax.Expr:
        if name in self._untyped:
            return relax.Tuple([])
        try:
            return super()._graph_output(name)
        except SizeIsBounded:
            raise
        except FrontendError as error:
            self._survey.problems.append(str(error))
            return relax.Tuple([])


def _names_read(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node and its subgraphs read."""
    yield from node.input
    for _, graph in subgraphs_of(node):
        for inner in graph.node:
            yield from _names_read(inner)
