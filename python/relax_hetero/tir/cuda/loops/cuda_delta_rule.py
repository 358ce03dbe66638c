"""The gated delta rule on GPUs: a warp for some columns of a head's matrix, which its lanes hold in registers.

Decode steps have warps for each row. The first row of a sequence computes all rows of it, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARP
from ...core.builder import Expr, Function, ceil_div, either, int64, let, loop, materialize, when
from ...delta_rule import DeltaRuleProblem, DeltaRuleTensors, inverse_length
from ..core.launch import local, unrolled
from ..tile.register_tile import add, reduce_lanes
from .launch import launch, scheduled_as, sync

_THREADS = 256  # threads of a block of the convolution: channels
_ZERO = T.float32(0)


def delta_rule_kernel(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """GPU kernel of a PrimFunc with the attribute `DELTA_RULE`."""
    problem = DeltaRuleProblem.of(func)
    function = Function("delta_rule", registers="local")
    blocks = ceil_div(problem.channels, _THREADS) if problem.is_convolution else problem.tasks
    threads = _THREADS if problem.is_convolution else WARP
    with function:
        tensors = DeltaRuleTensors(function, problem)
        with function.body(), launch(blocks * (1 if problem.is_chunk else problem.rows), threads) as (block, thread):
            tensors.open()
            first = int64(0) if problem.is_chunk else materialize(block // blocks)
            part = block if problem.is_chunk else materialize(block % blocks)
            rows = _Rows(tensors, problem, first)
            emit = _convolve if problem.is_convolution else _update
            with when(rows.are_own):
                emit(tensors, problem, rows, part, thread)
    return scheduled_as(func, function.result)


class _Rows:
    """Rows of the sequence of row `first`.

    Attributes
    ----------
    slot : PrimExpr
        The sequence's slot, negative for rows without one.
    are_own : PrimExpr or bool
        True unless an earlier row has the same sequence.
    """

    def __init__(self, tensors: DeltaRuleTensors, problem: DeltaRuleProblem, first: Expr) -> None:
        self._tensors, self._problem, self._first = tensors, problem, first
        self.slot, self.are_own = tensors.slot(first), True
        if problem.is_chunk:
            return
        earlier = local(1, "int32")
        T.buffer_store(earlier, T.int32(0), [0])
        with loop(problem.rows) as row:
            is_earlier = tirx.all(row < first, tirx.EQ(tensors.slot(row), self.slot))
            T.buffer_store(earlier, earlier[0] + T.Cast("int32", is_earlier), [0])
        self.are_own = tirx.EQ(earlier[0], 0)

    @property
    def is_new(self) -> Expr:
        """True if the first row is its sequence's first."""
        return tirx.EQ(self._tensors.positions[self._first], 0)

    def write(self, compute: Callable[[Expr], None], clear: Callable[[Expr], None]) -> None:
        """Write code for each row in order: `compute`, or `clear` if it has no sequence."""
        with loop(self._problem.rows) as row:
            is_own = tirx.all(row >= self._first, tirx.EQ(self._tensors.slot(row), self.slot))
            with when(True if self._problem.is_chunk else is_own):
                either(self._tensors.sequences[row] >= 0, lambda: compute(row), lambda: clear(row))


def _convolve(tensors: DeltaRuleTensors, problem: DeltaRuleProblem, rows: _Rows, part: Expr, thread: Expr) -> None:
    """Write the results of a channel, whose last inputs are in registers."""
    channels, before = problem.channels, problem.taps - 1
    channel, inputs = materialize(part * _THREADS + thread), local(problem.taps, "float32")
    with when(channel < channels):
        first = materialize(T.max(rows.slot, int64(0)) * problem.elements + channel)
        for tap in range(before):
            T.buffer_store(inputs, T.if_then_else(rows.is_new, _ZERO, tensors.states[first + tap * channels]), [tap])

        def compute(row: Expr) -> None:
            T.buffer_store(inputs, tensors.inputs[row * channels + channel], [before])
            products = [inputs[tap] * tensors.weights[tap * channels + channel] for tap in range(problem.taps)]
            total = let(sum(products[1:], products[0]))
            T.buffer_store(tensors.results, total * T.sigmoid(total), [row * channels + channel])
            for tap in range(before):
                T.buffer_store(inputs, inputs[tap + 1], [tap])

        rows.write(compute, lambda row: T.buffer_store(tensors.results, _ZERO, [row * channels + channel]))
        with when(rows.slot >= 0):
            for tap in range(before):
                T.buffer_store(tensors.states, inputs[tap], [first + tap * channels])


def _update(tensors: DeltaRuleTensors, problem: DeltaRuleProblem, rows: _Rows, task: Expr, lane: Expr) -> None:
    """Write the results of a block of columns, each of which a lane holds."""
    lanes, size, width = problem.lanes, problem.key_size, problem.value_heads * problem.value_size
    head, column = materialize(task // (problem.value_size // lanes)), materialize(T.min(lane, int64(lanes - 1)))
    state, shared = local(size, "float32"), T.alloc_buffer((2 * size,), "float32", scope="shared")
    first = materialize(problem.block_start(T.max(rows.slot, int64(0)), task) + column)
    with unrolled(size) as element:
        old = tensors.states[first + T.Cast("int64", element) * lanes]
        T.buffer_store(state, T.if_then_else(rows.is_new, _ZERO, old), [element])

    def compute(row: Expr) -> None:
        query = tensors.query_start(row, head)
        sync()  # the last row's vectors have been read
        factors = [
            _load_vector(tensors.inputs, materialize(query + i * tensors.key_offset), shared, i * size, size, lane)
            for i in range(2)
        ]
        sync()
        decay, share = tensors.decay(row, head), tensors.share(row, head)
        total = local(1, "float32")
        T.buffer_store(total, _ZERO, [0])
        with unrolled(size) as element:
            T.buffer_store(total, total[0] + state[element] * shared[size + element], [0])
        value = tensors.inputs[problem.value_start(row, task) + column]
        change = let((value - total[0] * decay * factors[1]) * (share * factors[1]))
        T.buffer_store(total, _ZERO, [0])
        with unrolled(size) as element:
            T.buffer_store(state, state[element] * decay + change * shared[size + element], [element])
            T.buffer_store(total, total[0] + state[element] * shared[element], [0])
        _store(
            tensors.results, row * width + task * lanes, total[0] * (factors[0] * T.float32(size**-0.5)), lanes, lane
        )

    rows.write(compute, lambda row: _store(tensors.results, row * width + task * lanes, _ZERO, lanes, lane))
    with when(tirx.all(rows.slot >= 0, lane < lanes)), unrolled(size) as element:
        T.buffer_store(tensors.states, state[element], [first + T.Cast("int64", element) * lanes])


def _load_vector(source: Any, start: Expr, target: Any, offset: int, size: int, lane: Expr) -> Expr:
    """Copy a vector to shared memory, and return the reciprocal of its length."""
    squares = local(1, "float32")
    T.buffer_store(squares, _ZERO, [0])
    with loop(ceil_div(size, WARP)) as i:
        element = materialize(i * WARP + lane)
        with when(element < size):
            value = let(source[start + element])
            T.buffer_store(target, value, [offset + element])
            T.buffer_store(squares, squares[0] + value * value, [0])
    reduce_lanes(squares, 0, add)
    return inverse_length(squares[0])


def _store(target: Any, start: Expr, value: Expr, lanes: int, lane: Expr) -> None:
    with when(lane < lanes if lanes < WARP else True):
        T.buffer_store(target, value, [start + lane])
