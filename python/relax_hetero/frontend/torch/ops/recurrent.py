"""LSTM, GRU and RNN layers, each layer by ONNX's op: short sequences unrolled, others as a loop."""

from __future__ import annotations

from typing import Any

from tvm import relax

from ...onnx.control_flow.recurrent_loop import convert_recurrent
from ...ops.table import convert_node
from ..node import TorchNode, converts

# Op -> ONNX's op, and the places of torch's gates in ONNX's order.
_KINDS = {
    "lstm": ("LSTM", (0, 3, 1, 2)),
    "gru": ("GRU", (1, 0, 2)),
    "rnn_tanh": ("RNN", (0,)),
    "rnn_relu": ("RNN", (0,)),
}


@converts("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(
    node: TorchNode,
    x: relax.Expr,
    states: Any,
    params: list[relax.Expr],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> list[relax.Expr]:
    """All outputs in time order, and the last states of every layer and direction."""
    if not node.op.endswith(".input"):
        raise node.refusal("of a packed sequence, expected a tensor of padded ones")
    op = node.op.partition(".")[0]
    directions = 2 if bidirectional else 1
    count = 4 if has_biases else 2
    initial = list(states) if isinstance(states, list) else [states]
    x = node.emit(relax.op.permute_dims(x, [1, 0, 2])) if batch_first else x
    finals: list[list[relax.Expr]] = [[] for _ in initial]
    for layer in range(layers):
        first = layer * directions
        own = [params[count * (first + i) : count * (first + i + 1)] for i in range(directions)]
        start = [node.emit(relax.op.strided_slice(state, [0], [first], [first + directions])) for state in initial]
        x, last = _layer(node, op, x, own, start)
        for kept, state in zip(finals, last, strict=True):
            kept.append(state)
    x = node.emit(relax.op.permute_dims(x, [1, 0, 2])) if batch_first else x
    ends = [kept[0] if layers == 1 else node.emit(relax.op.concat(kept, 0)) for kept in finals]
    return [x, *ends]


def _layer(
    node: TorchNode, op: str, x: relax.Expr, params: list[list[relax.Expr]], start: list[relax.Expr]
) -> tuple[relax.Expr, list[relax.Expr]]:
    """A layer of one or two directions: its outputs [time, batch, directions * hidden], and its last states."""
    kind, order = _KINDS[op]
    hidden = node.dims(params[0][1])[1]
    weights, recurrences = (_stacked(node, [given[i] for given in params], order, hidden) for i in (0, 1))
    biases = None
    if len(params[0]) == 4:
        parts = [_stacked(node, [given[i] for given in params], order, hidden) for i in (2, 3)]
        biases = node.emit(relax.op.concat(parts, 1))
    attributes: dict[str, Any] = {"hidden_size": hidden, "linear_before_reset": 1} if op == "gru" else {}
    attributes |= {"hidden_size": hidden, "direction": "bidirectional" if len(params) == 2 else "forward"}
    if op == "rnn_relu":
        attributes["activations"] = ("Relu",) * len(params)
    inputs = [x, weights, recurrences, biases, None, *start]
    onnx_node = node.onnx_node(kind, inputs, 1 + len(start), **attributes)
    found = convert_recurrent(node.walk, onnx_node, node.info)
    if found is None:
        made = node.emit(convert_node(onnx_node))
        found = [node.emit(relax.TupleGetItem(made, index)) for index in range(1 + len(start))]
    time, directions, batch, size = node.dims(found[0])
    rows = node.emit(relax.op.permute_dims(found[0], [0, 2, 1, 3]))
    return node.reshape(rows, [time, batch, directions * size]), list(found[1:])


def _stacked(node: TorchNode, given: list[relax.Expr], order: tuple[int, ...], hidden: int) -> relax.Expr:
    """Weights of each direction with their gates in ONNX's order, directions along a new first axis."""
    rows = []
    for weight in given:
        gates = [node.emit(relax.op.strided_slice(weight, [0], [i * hidden], [(i + 1) * hidden])) for i in order]
        joined = gates[0] if len(gates) == 1 else node.emit(relax.op.concat(gates, 0))
        rows.append(node.emit(relax.op.expand_dims(joined, 0)))
    return rows[0] if len(rows) == 1 else node.emit(relax.op.concat(rows, 0))
