"""Routing of a mixture of experts on GPUs: a warp for each row, whose lanes hold the scores in registers."""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import ALL_LANES, WARP
from ...core.builder import Expr, Function, ceil_div, materialize, when
from ...routing import RoutingProblem, RoutingTensors
from ..core import ptx
from ..core.dialect import has_ptx
from ..core.launch import local, unrolled
from ..tile.register_tile import add, reduce_lanes
from .launch import launch, scheduled_as

_LOWEST = tirx.const(-math.inf, "float32")


def routing_kernel(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """GPU kernel of a PrimFunc with the attribute `ROUTING`."""
    problem = RoutingProblem.of(func)
    warps = 4 if has_ptx() else 1  # all threads of a block take part in shuffles
    function = Function("routing", registers="local")
    with function:
        tensors = RoutingTensors(function, problem)
        with function.body(), launch(ceil_div(tensors.rows, warps), warps * WARP) as (block, thread):
            tensors.open()
            row = materialize(block * warps + thread // WARP)
            with when(row < tensors.rows):
                _route(tensors, problem, row, T.bind(T.Cast("int32", thread % WARP)))
    return scheduled_as(func, function.result)


def _route(tensors: RoutingTensors, problem: RoutingProblem, row: Expr, lane: Expr) -> None:
    experts, count = problem.experts, ceil_div(problem.experts, WARP)
    scores, left, chosen = local(count, "float32"), local(count, "float32"), local(problem.used, "float32")
    best, total, highest = _Best(lane, left, experts), local(1, "float32"), local(1, "float32")
    numbers = [lane + i * WARP for i in range(count)]
    for i, expert in enumerate(numbers):
        score = tensors.scores[row * experts + T.min(expert, experts - 1)]
        T.buffer_store(scores, T.Select(expert < experts, score, _LOWEST), [i])
    if problem.is_softmax:
        T.buffer_store(highest, scores[0], [0])
        for i in range(1, count):
            T.buffer_store(highest, T.max(highest[0], scores[i]), [0])
        reduce_lanes(highest, 0, T.max)
    T.buffer_store(total, T.float32(0), [0])
    if problem.needs_total:
        for i in range(count):
            T.buffer_store(total, total[0] + problem.power(scores[i], highest[0]), [0])
        reduce_lanes(total, 0, add)
    for i, expert in enumerate(numbers):
        value = scores[i]
        if problem.needs_probabilities:
            value = problem.power(scores[i], highest[0])
            value = value / total[0] if problem.is_softmax else value
            value = value + tensors.bias[T.min(expert, experts - 1)] if problem.has_bias else value
            value = T.Select(expert < experts, value, _LOWEST)
        T.buffer_store(left, value, [i])
    if problem.has_groups:
        _keep_groups(best, problem, numbers)
    if problem.normalizes:
        T.buffer_store(total, T.float32(0), [0])
    for number in range(problem.used):
        best.find()
        T.buffer_store(chosen, problem.power(tensors.scores[row * experts + best.expert], highest[0]), [number])
        if problem.normalizes:
            T.buffer_store(total, total[0] + chosen[number], [0])
        with when(tirx.EQ(lane, 0)):
            T.buffer_store(tensors.ids, problem.id_of(best.expert), [row * problem.used + number])
            if problem.has_counts:
                with when(tensors.sequences[row] >= 0):
                    ptx.add_global(T.address_of(tensors.counts[best.expert]), T.uint32(1))
        best.drop()
    with when(tirx.EQ(lane, 0)), unrolled(problem.used) as number:
        share = problem.share(chosen[number], total[0])
        T.buffer_store(tensors.shares, share, [row * problem.used + T.Cast("int64", number)])


def _keep_groups(best: _Best, problem: RoutingProblem, numbers: list[Expr]) -> None:
    """Drop all experts of groups that are not among the greatest."""
    groups, size = problem.groups, problem.group_size
    sums, values = local(groups, "float32"), local(len(numbers), "float32")
    of_group = _Best(best.lane, values, problem.experts)
    for group in range(groups):
        for i, expert in enumerate(numbers):
            is_member = tirx.all(expert >= group * size, expert < (group + 1) * size)
            T.buffer_store(values, T.Select(is_member, best.values[i], _LOWEST), [i])
        for number in range(problem.group_best):
            of_group.find()
            T.buffer_store(sums, of_group.value if number == 0 else sums[group] + of_group.value, [group])
            of_group.drop()
    for group in range(groups):
        rank: Expr = T.int32(0)
        for other in range(groups):
            is_before = sums[other] >= sums[group] if other < group else sums[other] > sums[group]
            rank = rank + T.Cast("int32", is_before) if other != group else rank
        is_dropped = T.bind(rank >= problem.groups_used)
        for i, expert in enumerate(numbers):
            is_member = tirx.all(expert >= group * size, expert < (group + 1) * size)
            value = T.Select(tirx.all(is_member, is_dropped), _LOWEST, best.values[i])
            T.buffer_store(best.values, value, [i])


class _Best:
    """Writer of the search of a row's greatest value, which every lane gets, with its expert.

    Parameters
    ----------
    lane : PrimExpr
    values : Buffer
        Registers with the values of experts `lane`, ``lane + 32``, ...
    experts : int
    """

    def __init__(self, lane: Expr, values: Any, experts: int) -> None:
        self.lane, self.values, self._experts = lane, values, experts
        self._best, self._index = local(1, "float32"), local(1, "int32")

    @property
    def value(self) -> Expr:
        """Greatest value."""
        return self._best[0]

    @property
    def expert(self) -> Expr:
        """Expert of the greatest value."""
        return self._index[0]

    def find(self) -> None:
        """Find the greatest value."""
        T.buffer_store(self._best, self.values[0], [0])
        T.buffer_store(self._index, T.min(self.lane, self._experts - 1), [0])
        for i in range(1, int(self.values.shape[0])):
            self._keep_greater(self.values[i], self.lane + i * WARP)
        distance = WARP // 2
        while distance:
            mask = T.uint32(ALL_LANES)
            pair = (self.value, self.expert)
            self._keep_greater(*(T.bind(T.tvm_warp_shuffle_xor(mask, each, distance, WARP, WARP)) for each in pair))
            distance //= 2

    def drop(self) -> None:
        """Remove the greatest value."""
        for i in range(int(self.values.shape[0])):
            is_best = tirx.EQ(self.expert, self.lane + i * WARP)
            T.buffer_store(self.values, T.Select(is_best, _LOWEST, self.values[i]), [i])

    def _keep_greater(self, value: Expr, expert: Expr) -> None:
        """Keep the greater of two values, of equal ones that with the lower number."""
        is_greater = tirx.any(value > self.value, tirx.all(tirx.EQ(value, self.value), expert < self.expert))
        with when(is_greater):
            T.buffer_store(self._best, value, [0])
            T.buffer_store(self._index, expert, [0])
