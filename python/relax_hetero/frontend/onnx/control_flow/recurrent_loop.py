"""`RNN`, `GRU` and `LSTM` over a dynamic or very large number of time steps, as a loop, where devices lack a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, te

from ...ops.contrib.contrib_recurrent import as_lstm
from ...ops.node import Node, as_dim
from ...ops.recurrent import MAX_STEPS, Direction, has_kernel, recurrent_outputs, steps_of
from ..node_names import NodeInfo
from .loop import Loop, Trip
from .loop_nodes import run, slice_at
from .subgraphs import Importer

RECURRENT_OPS = frozenset({"RNN", "GRU", "LSTM", "DynamicQuantizeLSTM"})
_OPS_PER_STEP = 16


def convert_recurrent(importer: Importer, node: Node, info: NodeInfo) -> list[relax.Expr] | None:
    """Convert a recurrent node to a loop over its steps; None if it has a kernel or few steps: see its converter.

    Raises FrontendError if its inputs do not match, or it has an activation that cannot be imported.
    """
    steps = steps_of(node)
    if has_kernel(node) or (isinstance(steps, int) and steps <= MAX_STEPS):
        return None
    node = as_lstm(node) if node.op_type == "DynamicQuantizeLSTM" else node
    return recurrent_outputs(node, lambda make: _run_loop(importer, info, make))


def _run_loop(importer: Importer, info: NodeInfo, make: Callable[[], Direction]) -> tuple[relax.Expr, list[relax.Expr]]:
    """Run one direction as a loop; return all outputs in time order, and the last states."""
    with importer.block(info) as bindings:
        direction = make()
    importer.adopt(bindings, info)  # adopted weights are constants, which the loop's function repeats

    def trip(index: Any, proceeds: Any, states: list[Any]) -> Trip:
        x = slice_at(importer, direction.inputs, 0, index, direction.is_backwards)
        is_active = None if direction.lengths is None else _is_active(importer, direction, index)
        output, states = direction.advance(x, states, is_active)
        return Trip(None, states, [output])

    steps = as_dim(direction.inputs.ty.shape.values[0])
    names = ["hidden state", "cell state"][: len(direction.states)]
    results = run(importer, Loop(info, f"node {info}", _OPS_PER_STEP, steps, None, direction.states, 1, trip, names))
    (outputs,) = results.rows
    if direction.is_backwards:
        outputs = importer.bb.emit(relax.op.flip(outputs, 0))
    return outputs, results.state


def _is_active(importer: Importer, direction: Direction, index: relax.Expr) -> relax.Expr:
    """Mask of sequences that have not ended before a step, [batch, 1]."""

    def compare(lengths: te.Tensor, inputs: te.Tensor, trip: te.Tensor) -> te.Tensor:
        time = inputs.shape[0] - 1 - trip() if direction.is_backwards else trip()
        return te.compute(lengths.shape, lambda *indices: lengths(*indices).astype("int64") > time, name="runs")

    return importer.bb.emit_te(compare, direction.lengths, direction.inputs, index, primfunc_name_hint="runs")
