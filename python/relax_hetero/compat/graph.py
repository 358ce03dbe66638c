"""Facts of a model that programs ask a session for: inputs, outputs, metadata; and changes that options make to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from relax_hetero.compat.errors import InvalidArgument
from relax_hetero.compat.options import SessionOptions
from relax_hetero.compat.values import text_of_type
from relax_hetero.frontend.onnx.onnx_model import ModelSource, read_model

_FIRST_IR_WITH_DEFAULTS = 4


@dataclass(frozen=True)
class NodeArg:
    """An input or output of a model.

    Attributes
    ----------
    name : str
        Name.
    type : str
        Type in ONNX Runtime's words: ``tensor(float)``.
    shape : list of int, str or None
        Extents: numbers, names of symbolic ones, None for others.
    """

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True)
class ModelMetadata:
    """Descriptions that a model carries.

    Attributes
    ----------
    custom_metadata_map : dict of str to str
        The model's own entries.
    description, graph_description : str
        Texts of the model and of its graph.
    domain, graph_name, producer_name : str
        Names.
    version : int
        Version of the model.
    """

    custom_metadata_map: dict[str, str]
    description: str
    domain: str
    graph_description: str
    graph_name: str
    producer_name: str
    version: int


@dataclass(frozen=True)
class Graph:
    """A model, and what a session tells about it."""

    source: ModelSource  # model to import, with the changes of the options
    # Inputs of every call, inputs with defaults, and outputs.
    inputs: list[NodeArg]
    overridable: list[NodeArg]
    outputs: list[NodeArg]
    labels: dict[str, list[Any]]  # labels of the columns of outputs that are lists of dictionaries
    metadata: ModelMetadata  # descriptions

    @property
    def is_dynamic(self) -> bool:
        """True if an input has an extent or a length that only a call knows."""
        return any(
            not arg.type.startswith("tensor") or any(not isinstance(size, int) for size in arg.shape)
            for arg in self.inputs
        )


def read_graph(
    model: ModelSource,  # file, bytes or proto
    options: SessionOptions,  # fixed dimensions, and initializers that replace the model's
) -> Graph:
    """Read a model, and apply the options that change it."""
    proto, _, path, _ = read_model(model)
    labels = _labels(proto.graph)
    if labels or options._dimensions or options._denotations or options._initializers:
        changed = onnx.ModelProto()
        changed.CopyFrom(proto)
        if path is not None:
            onnx.load_external_data_for_model(changed, str(Path(path).parent))
        _fix_dimensions(changed.graph, options._dimensions, options._denotations)
        _replace_initializers(changed.graph, options._initializers)
        proto = model = changed
    graph = proto.graph
    weights = {tensor.name for tensor in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    has_defaults = proto.ir_version >= _FIRST_IR_WITH_DEFAULTS
    facts = Graph(
        model,
        [_node_arg(info) for info in graph.input if info.name not in weights],
        [_node_arg(info) for info in graph.input if info.name in weights and has_defaults],
        [_node_arg(info) for info in graph.output],
        labels,
        ModelMetadata(
            {entry.key: entry.value for entry in proto.metadata_props},
            proto.doc_string,
            proto.domain,
            graph.doc_string,
            graph.name,
            proto.producer_name,
            proto.model_version,
        ),
    )
    _take_columns(graph, labels)
    return facts


def _node_arg(info: onnx.ValueInfoProto) -> NodeArg:
    ty = info.type
    if ty.WhichOneof("value") == "optional_type":
        ty = ty.optional_type.elem_type
    sizes = ty.tensor_type.shape.dim if ty.WhichOneof("value") == "tensor_type" else []
    shape = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in sizes]
    return NodeArg(info.name, text_of_type(info.type), shape)


def _labels(graph: onnx.GraphProto) -> dict[str, list[Any]]:
    """The labels of each ZipMap's dictionaries, by its output."""
    labels: dict[str, list[Any]] = {}
    for node in graph.node:
        if node.op_type == "ZipMap":
            values = [value for attribute in node.attribute for value in (*attribute.ints, *attribute.strings)]
            labels[node.output[0]] = [value.decode() if isinstance(value, bytes) else value for value in values]
    return labels


def _take_columns(graph: onnx.GraphProto, labels: Mapping[str, list[Any]]) -> None:
    """Replace each list of dictionaries by a tensor that has a column for each label."""
    for node in graph.node:
        if node.op_type == "ZipMap":
            node.CopyFrom(onnx.helper.make_node("Identity", node.input, node.output, node.name))
    for info in graph.output:
        if info.name in labels:
            info.CopyFrom(onnx.helper.make_tensor_value_info(info.name, onnx.TensorProto.FLOAT, None))


def _fix_dimensions(graph: onnx.GraphProto, names: Mapping[str, int], denotations: Mapping[str, int]) -> None:
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            size = names.get(dim.dim_param) if dim.dim_param else None
            size = denotations.get(dim.denotation, size) if dim.denotation else size
            if size is not None:
                dim.dim_value = size


def _replace_initializers(graph: onnx.GraphProto, arrays: Mapping[str, np.ndarray]) -> None:
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for name, array in arrays.items():
        if name not in tensors:
            raise InvalidArgument.of(f"add_initializer: {name!r} is not an initializer of the model")
        old, new = tensors[name], numpy_helper.from_array(np.ascontiguousarray(array), name)
        if (old.data_type, list(old.dims)) != (new.data_type, list(new.dims)):
            raise InvalidArgument.of(
                f"add_initializer: {name!r} is {array.dtype}{list(array.shape)}, but the model's has the shape "
                f"{list(old.dims)} and the element type {onnx.TensorProto.DataType.Name(old.data_type)}"
            )
        old.CopyFrom(new)
