"""Ops of ONNX Runtime's domain that mean the same as a standard op, which some of them became later."""

from __future__ import annotations

from tvm import relax

from ..node import Node
from ..table import MICROSOFT, convert_node, converts

# Op type and the standard opset that defines it as ONNX Runtime does.
_OPSETS = {"DequantizeLinear": 21, "GatherND": 13, "GridSample": 16, "QuantizeLinear": 21, "Range": 11, "Trilu": 14}


@converts(*_OPSETS, domain=MICROSOFT)
def same_as_standard(node: Node) -> relax.Expr:
    """As the standard op of that name, of an opset that has it."""
    attributes = {name: value for name, value in node.attributes.items() if name != "tvm_custom"}
    opset = max(node.opset, _OPSETS[node.op_type])
    return convert_node(node.as_op(node.op_type, node.inputs, opset, **attributes))
