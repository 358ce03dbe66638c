"""`SequenceMap`: a graph is converted once for each element of a sequence, whose length is known at import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import tvm
from tvm import relax

from ....errors import FrontendError
from ...import_limits import budget
from ..node_names import NodeInfo
from .subgraphs import OnnxImporter, inner_graph


def convert_sequence_map(
    importer: OnnxImporter, node: onnx.NodeProto, info: NodeInfo, operands: Sequence[Any]
) -> list[Any]:
    """The outputs of a `SequenceMap`: sequences. Inputs behind the first may be tensors, which every element gets.

    Raises
    ------
    FrontendError
        The first input is no sequence, or sequences differ in length.
    """
    title, body = f"node {info}", inner_graph(node, "body", info)
    inputs = [elements_of(importer, value) for value in operands]
    if not inputs or inputs[0] is None:
        raise FrontendError(f"{title}: its first input is not a sequence whose length is known at import")
    count = len(inputs[0])
    for index, elements in enumerate(inputs):
        if elements is not None and len(elements) != count:
            raise FrontendError(f"{title}: input {index} has {len(elements)} elements, and its first one {count}")
    if len(body.input) != len(operands) or len(body.output) < len(node.output):
        raise FrontendError(
            f"{title} has {len(operands)} inputs and {len(node.output)} outputs, and its body {len(body.input)} and "
            f"{len(body.output)}"
        )
    budget().check_nodes(count * len(body.node), title)
    found: list[list[Any]] = [[] for _ in body.output]
    for index in range(count):
        given = {
            value.name: operand if elements is None else elements[index]
            for value, operand, elements in zip(body.input, operands, inputs, strict=True)
        }
        for values, value in zip(found, importer.graph_values(body, info.subgraphs["body"], given), strict=True):
            values.append(importer.as_tensor(value))
    return [relax.Tuple(values) for values in found]


def elements_of(importer: OnnxImporter, value: Any) -> list[Any] | None:
    """The tensors of a sequence; None for any other value."""
    if isinstance(value, relax.Tuple):
        return list(value.fields)
    if isinstance(value, relax.Expr) and isinstance(value.ty, tvm.ir.TupleType):
        return [importer.bb.emit(relax.TupleGetItem(value, index)) for index in range(len(value.ty.fields))]
    return None
