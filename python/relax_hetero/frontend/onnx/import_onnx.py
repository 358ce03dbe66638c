"""A checked ONNX model as Relax bindings that know their nodes, without names or devices."""

from __future__ import annotations

from .functions import function_table
from .importer import ImportedGraph, import_graph
from .inputs import Shapes, graph_inputs
from .model import ModelSource, OnnxModel, load_model
from .node_names import NodeInfo, name_nodes
from .support import check_supported


def import_onnx(model_or_path: ModelSource, shapes: Shapes | None = None) -> ImportedGraph:
    """An ONNX model as bindings that know their nodes, without names or devices; arguments as in `from_onnx`."""
    model = load_model(model_or_path)
    return import_nodes(model, name_nodes(model.proto), shapes)


def import_nodes(model: OnnxModel, nodes: list[NodeInfo], shapes: Shapes | None) -> ImportedGraph:
    """`import_onnx` of a model that is read, and whose nodes have names."""
    check_supported(nodes, model, function_table(model.proto))
    return import_graph(model, nodes, graph_inputs(model.proto.graph, shapes))
