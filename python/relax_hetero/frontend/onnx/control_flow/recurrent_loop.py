"""`RNN`, `GRU` and `LSTM` over a number of steps that only a call knows, or over very many, as a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, te

from ...ops.contrib.recurrent import as_lstm
from ...ops.node import Node, as_dim
from ...ops.recurrent import MAX_STEPS, Direction, recurrent_outputs, steps_of
from ..node_names import NodeInfo
from .loop import Loop, Trip
from .loop_nodes import run, slice_at
from .subgraphs import Importer

RECURRENT_OPS = frozenset({"RNN", "GRU", "LSTM", "DynamicQuantizeLSTM"})
_OPS_OF_A_STEP = 16


def convert_recurrent(importer: Importer, node: Node, info: NodeInfo) -> list[relax.Expr] | None:
    """The outputs of a recurrent node as a loop over its steps; None where its few steps are unrolled.

    Raises
    ------
    FrontendError
        Its inputs do not fit each other, or it has an activation that cannot be imported.
    """
    steps = steps_of(node)
    if isinstance(steps, int) and steps <= MAX_STEPS:
        return None
    node = as_lstm(node) if node.op_type == "DynamicQuantizeLSTM" else node
    return recurrent_outputs(node, lambda make: _looped(importer, info, make))


def _looped(importer: Importer, info: NodeInfo, make: Callable[[], Direction]) -> tuple[relax.Expr, list[relax.Expr]]:
    """As the unrolled steps: all outputs in time order, and the last states."""
    with importer.block(info) as bindings:
        direction = make()
    importer.adopt(bindings, info)  # from here on weights are known: the loop has them as constants of its own

    def trip(index: Any, going_on: Any, states: list[Any]) -> Trip:
        x = slice_at(importer, direction.inputs, 0, index, direction.is_backwards)
        runs = None if direction.lengths is None else _runs(importer, direction, index)
        output, states = direction.advance(x, states, runs)
        return Trip(None, states, [output])

    steps = as_dim(direction.inputs.ty.shape.values[0])
    names = ["hidden state", "cell state"][: len(direction.states)]
    found = run(importer, Loop(info, f"node {info}", _OPS_OF_A_STEP, steps, None, direction.states, 1, trip, names))
    (outputs,) = found.rows
    if direction.is_backwards:
        outputs = importer.bb.emit(relax.op.flip(outputs, 0))
    return outputs, found.state


def _runs(importer: Importer, direction: Direction, index: relax.Expr) -> relax.Expr:
    """Which sequences are not over at a trip, [batch, 1]."""

    def compare(lengths: te.Tensor, inputs: te.Tensor, trip: te.Tensor) -> te.Tensor:
        time = inputs.shape[0] - 1 - trip() if direction.is_backwards else trip()
        return te.compute(lengths.shape, lambda *at: lengths(*at).astype("int64") > time, name="runs")

    return importer.bb.emit_te(compare, direction.lengths, direction.inputs, index, primfunc_name_hint="runs")
