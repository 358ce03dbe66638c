"""Ops of ONNX's preview domain, imported by their function bodies."""

from __future__ import annotations

import onnx
from tvm import relax

from .function_body import expand
from .node import Node
from .required_sizes import as_expr, require_shape
from .table import convert_node, converts

PREVIEW = "ai.onnx.preview"  # domain of experimental ops
_OLDEST = 15  # first opset whose `Shape` has the attributes that the bodies use


@converts("FlexAttention", domain=PREVIEW)
def flex_attention(node: Node) -> relax.Expr:
    """Attention with graphs that modify its scores and probabilities; they may not read outer values."""
    if node.opset < _OLDEST:
        raise node.refusal(f"the model is of opset {node.opset}, expected at least {_OLDEST}")
    for name in ("score_mod", "prob_mod"):
        graph = node.attributes.get(name)
        if graph is not None:
            _check_closed(node, name, graph)
    query, key, value = (node.tensor(index) for index in range(3))
    dims, key_dims = node.shape(query), node.shape(key)
    if len(dims) != 4 or len(key_dims) != 4:
        raise node.refusal(f"its queries and keys have rank {len(dims)} and {len(key_dims)}, expected 4")
    key = require_shape(node, key, [dims[0], key_dims[1], key_dims[2], dims[3]], "its keys")
    require_shape(node, value, [dims[0], key_dims[1], key_dims[2], node.shape(value)[-1]], "its values")
    if not isinstance(dims[1], int) or not isinstance(key_dims[1], int) or key_dims[1] < 1 or dims[1] % key_dims[1]:
        raise node.refusal(f"has {dims[1]} heads of queries and {key_dims[1]} of keys, expected a known multiple")
    node.require(as_expr(dims[3]) >= 1, f"its heads have {dims[3]} elements")
    return expand(node, convert_node)


def _check_closed(node: Node, name: str, graph: onnx.GraphProto) -> None:
    """Refuse a graph that reads outer values, which are not available in the op's body."""
    defined = {"", *(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)}
    for inner in graph.node:
        for value in inner.input:
            if value not in defined:
                raise node.refusal(f"its {name} reads {value!r} from outside, expected its own input only")
        if any(attribute.HasField("g") for attribute in inner.attribute):
            raise node.refusal(f"its {name} has a {inner.op_type}, whose graphs cannot be imported there")
        defined.update(inner.output)
