"""Inputs that a caller may leave out: ONNX writes their defaults as initializers of the same names."""

from __future__ import annotations

import onnx

from ..import_limits import MAX_RANK
from ..ops.table import takes_size
from .control_flow.subgraphs import readers_of
from .model import OnnxModel

_FIRST_IR_VERSION = 4
"""Earlier versions required every weight to be an input, too."""


def default_inputs(model: OnnxModel) -> list[str]:
    """The inputs with a default.

    An initializer that nodes read only as sizes or axes is not a default: kernels are compiled for these.
    """
    if model.proto.ir_version < _FIRST_IR_VERSION:
        return []
    graph = model.proto.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    listed = [weights[info.name] for info in graph.input if info.name in weights]
    if not listed:
        return []
    readers = readers_of(graph, model.proto.functions)
    return [tensor.name for tensor in listed if not _is_of_sizes(tensor, readers.get(tensor.name, []))]


def _is_of_sizes(tensor: onnx.TensorProto, readers: list[onnx.NodeProto]) -> bool:
    uses = [(node, place) for node in readers for place, name in enumerate(node.input) if name == tensor.name]
    is_short = len(tensor.dims) <= 1 and all(size <= 2 * MAX_RANK for size in tensor.dims)
    return is_short and bool(uses) and all(takes_size(node.op_type, place) for node, place in uses)
