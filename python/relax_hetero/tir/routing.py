"""Routing of a mixture of experts: the experts of each row with the greatest scores, and their shares.

A share is a softmax times a factor: over the scores of all experts, or of the chosen ones. The latter is the same as
dividing probabilities by the sum of the chosen ones, as the others cancel out.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.problem import Dim
from .core.builder import Expr, Function, flat, loop, materialize, when

ROUTING = "relax_hetero.routing"
"""On a PrimFunc for any device that routes rows to experts: its `RoutingProblem` as JSON."""

_MIN_PARALLEL_ROWS = 32


@dataclass(frozen=True)
class RoutingProblem:
    """Routing of rows to experts.

    Parameters of its kernel, in order: scores, (rows, experts) of float32; ids, (rows, used) of int32; shares, (rows,
    used) of float32. The experts of a row are in descending order of their scores, equal ones by number.

    Attributes
    ----------
    rows : int or str
    experts, used : int
        Number of experts, and of those of a row.
    scale : float
        Factor of the shares.
    normalizes : bool
        Whether the shares of a row sum to the factor: the softmax is over the chosen experts, not over all.
    """

    rows: Dim
    experts: int
    used: int
    scale: float = 1.0
    normalizes: bool = True

    @classmethod
    def of(cls, func: tirx.PrimFunc) -> RoutingProblem:
        """Problem of a PrimFunc with the attribute."""
        return cls(**json.loads(str(func.attrs[ROUTING])))


class RoutingTensors:
    """Parameters of a kernel, flat after `open`.

    Parameters
    ----------
    function : Function
        Function whose arguments they become.
    problem : RoutingProblem
    """

    def __init__(self, function: Function, problem: RoutingProblem) -> None:
        self.rows = function.extent(problem.rows)
        self._shapes = (self.rows, problem.experts), (self.rows, problem.used), (self.rows, problem.used)
        named = zip(("scores", "ids", "shares"), self._shapes, ("float32", "int32", "float32"), strict=True)
        self._buffers = [function.argument(name, shape, dtype) for name, shape, dtype in named]

    def open(self) -> None:
        """Declare the elements, within the body of the function."""
        self.scores, self.ids, self.shares = map(flat, self._buffers, self._shapes)


def routing_kernel(problem: RoutingProblem) -> tirx.PrimFunc:
    """The kernel of CPUs, with the attribute `ROUTING`, by which GPUs get one of their own."""
    function = Function("routing")
    with function:
        tensors = RoutingTensors(function, problem)
        with function.body():
            tensors.open()
            is_parallel = not isinstance(tensors.rows, int) or tensors.rows >= _MIN_PARALLEL_ROWS
            with loop(tensors.rows, parallel=is_parallel) as row:
                _route(tensors, problem, row)
    return function.result.with_attr(ROUTING, json.dumps(asdict(problem)))


def _route(tensors: RoutingTensors, problem: RoutingProblem, row: Expr) -> None:
    left = T.alloc_buffer((problem.experts,), "float32", scope="global")
    best, total = (T.alloc_buffer((1,), dtype, scope="global") for dtype in ("int32", "float32"))
    with loop(problem.experts) as expert:
        T.buffer_store(left, tensors.scores[row * problem.experts + expert], [expert])
    T.buffer_store(total, T.float32(0), [0])
    first = materialize(row * problem.used)
    with loop(problem.used) as number:
        T.buffer_store(best, T.int32(0), [0])
        with loop(problem.experts) as expert, when(left[expert] > left[best[0]]):
            T.buffer_store(best, T.Cast("int32", expert), [0])
        T.buffer_store(tensors.ids, best[0], [first + number])
        highest = tensors.scores[row * problem.experts + tensors.ids[first]]
        power = T.bind(T.exp(tensors.scores[row * problem.experts + best[0]] - highest))
        T.buffer_store(tensors.shares, power, [first + number])
        if problem.normalizes:
            T.buffer_store(total, total[0] + power, [0])
        T.buffer_store(left, T.float32(-math.inf), [best[0]])
    if not problem.normalizes:
        with loop(problem.experts) as expert:
            highest = tensors.scores[row * problem.experts + tensors.ids[first]]
            power = T.exp(tensors.scores[row * problem.experts + expert] - highest)
            T.buffer_store(total, total[0] + power, [0])
    with loop(problem.used) as number:
        share = tensors.shares[first + number] / total[0] * T.float32(problem.scale)
        T.buffer_store(tensors.shares, share, [first + number])
