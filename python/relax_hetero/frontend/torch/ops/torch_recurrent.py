"""LSTM, GRU and RNN layers by ONNX's ops: short sequences are unrolled, others become a loop."""

from __future__ import annotations

from typing import Any

from tvm import relax

from ...onnx.control_flow.recurrent_loop import convert_recurrent
from ...ops.table import convert_node
from ..torch_node import TorchNode, converts

# Op -> ONNX's op, and the indices of torch's gates in ONNX's order.
_ONNX_OPS = {
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
    """Outputs in time order, and the last states of every layer and direction."""
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
        layer_params = [params[count * (first + i) : count * (first + i + 1)] for i in range(directions)]
        start = [node.emit(relax.op.strided_slice(state, [0], [first], [first + directions])) for state in initial]
        x, final_states = _layer(node, op, x, layer_params, start)
        for collected, state in zip(finals, final_states, strict=True):
            collected.append(state)
    x = node.emit(relax.op.permute_dims(x, [1, 0, 2])) if batch_first else x
    ends = [collected[0] if layers == 1 else node.emit(relax.op.concat(collected, 0)) for collected in finals]
    return [x, *ends]


def _layer(
    node: TorchNode, op: str, x: relax.Expr, params: list[list[relax.Expr]], start: list[relax.Expr]
) -> tuple[relax.Expr, list[relax.Expr]]:
    """Outputs of one layer, [time, batch, directions * hidden], and its last states."""
    kind, order = _ONNX_OPS[op]
    hidden = node.dims(params[0][1])[1]
    weights, recurrences = (_stack_gates(node, [direction[i] for direction in params], order, hidden) for i in (0, 1))
    biases = None
    if len(params[0]) == 4:
        parts = [_stack_gates(node, [direction[i] for direction in params], order, hidden) for i in (2, 3)]
        biases = node.emit(relax.op.concat(parts, 1))
    attributes: dict[str, Any] = {"hidden_size": hidden, "linear_before_reset": 1} if op == "gru" else {}
    attributes |= {"hidden_size": hidden, "direction": "bidirectional" if len(params) == 2 else "forward"}
    if op == "rnn_relu":
        attributes["activations"] = ("Relu",) * len(params)
    inputs = [x, weights, recurrences, biases, None, *start]
    onnx_node = node.onnx_node(kind, inputs, 1 + len(start), **attributes)
    outputs = convert_recurrent(node.walk, onnx_node, node.info)
    if outputs is None:
        result = node.emit(convert_node(onnx_node))
        outputs = [node.emit(relax.TupleGetItem(result, index)) for index in range(1 + len(start))]
    time, directions, batch, size = node.dims(outputs[0])
    rows = node.emit(relax.op.permute_dims(outputs[0], [0, 2, 1, 3]))
    return node.reshape(rows, [time, batch, directions * size]), list(outputs[1:])


def _stack_gates(node: TorchNode, weights: list[relax.Expr], order: tuple[int, ...], hidden: int) -> relax.Expr:
    """Weights of all directions along a new first axis, with gates in ONNX's order."""
    rows = []
    for weight in weights:
        gates = [node.emit(relax.op.strided_slice(weight, [0], [i * hidden], [(i + 1) * hidden])) for i in order]
        joined = gates[0] if len(gates) == 1 else node.emit(relax.op.concat(gates, 0))
        rows.append(node.emit(relax.op.expand_dims(joined, 0)))
    return rows[0] if len(rows) == 1 else node.emit(relax.op.concat(rows, 0))
